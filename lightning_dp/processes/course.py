"""Course: where in its epoch a training loader is, so that a resumed fit goes on from there.

The order of an epoch comes from the states that generators had as it began. From these it is drawn
again, and what has been trained on is left out by its indices: it is not loaded.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter, length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.lightning_private import prefetched_batches, training_loaders
from lightning_dp.processes.random_states import RandomState, random_state, set_random_state

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

_NONE: Any = object()  # no batch
_MANY = sys.maxsize  # more than any epoch has


class Course:
    """The places of a fit's training loaders, and the random states of all processes.

    Args:
        trainer: whose fit it is.
        devices: this process's own.
        world: the processes, if there are several.
    """

    def __init__(self, trainer: Any, devices: list[torch.device], world: World | None) -> None:
        self._trainer, self._devices, self._world = trainer, devices, world
        self._random: RandomState | None = None  # to be set as training goes on
        self._is_same = False  # whether as many processes and devices go on as have saved
        self._loaded: list[Any] = []  # the places of loaders that have not been made yet
        self._waiting: dict[LoaderPlace, Callable[[], Any]] = {}

    # In checkpoints

    def state(self, *, is_alone: bool) -> list[Any]:
        """What each process needs in order to go on from here.

        Args:
            is_alone: whether the other processes may not be asked.
        """
        ahead = prefetched_batches(self._trainer)
        places = [getattr(loader, "place", None) for loader in training_loaders(self._trainer)]
        is_at_end = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        own = {
            "devices": len(self._devices),
            "random": random_state(self._devices),
            "loaders": [place and place.state(ahead, is_at_end=is_at_end) for place in places],
        }
        return [own] if self._world is None or is_alone else self._world.gather(own)

    def load(self, states: list[Any]) -> None:
        """Lets training go on from what `state` has returned.

        With other numbers of processes or devices the order of samples is the same, which is the
        first process's; random numbers in the steps are others.
        """
        rank, size = (0, 1) if self._world is None else (self._world.rank, self._world.size)
        own = states[rank if len(states) == size else 0]
        self._is_same = len(states) == size and own["devices"] == len(self._devices)
        self._random = own["random"] if self._is_same or rank == 0 else None
        self._loaded = list(own["loaders"])
        # What is true of Lightning's loaders.
        text = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", message=text)

    def check_start(self) -> None:
        """All processes must go on from the same step."""
        if self._world is None:
            return
        steps = self._world.gather((self._trainer.current_epoch, self._trainer.global_step))
        if len(set(steps)) > 1:
            told = ", ".join(f"process {r}: {e}, {s}" for r, (e, s) in enumerate(steps))
            raise ValueError(
                f"Expected all processes to start at the same epoch and step, got {told}. Each of "
                "them must find the same checkpoint: put it where all machines see it."
            )

    # Loaders

    def placed(self, loader: object) -> object:
        """A training loader that knows its place; what is none, or keeps its own, stays."""
        keeps_own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if not self._trainer.training or not isinstance(loader, DataLoader) or keeps_own:
            return loader
        own = copy.copy(loader)
        own.__class__ = type(type(loader).__name__, (_PlacedLoader, type(loader)), {})
        place: Any = LoaderPlace(self, loader, self._loaded.pop(0) if self._loaded else None)
        own.place = place
        # DataLoader's own __setattr__ refuses.
        if place.has_indices:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            vars(own)[name] = _PlacedSampler(getattr(loader, name), place)
        return own

    @property
    def is_pending(self) -> bool:
        """Whether random states are still to be set."""
        return self._random is not None

    def begin(self, place: LoaderPlace, make: Callable[[], Any]) -> None:
        """A loader's iterator is to be made when training goes on."""
        self._waiting[place] = make

    def go_on(self) -> None:
        """Training goes on: sets the random states with which it does, and makes iterators.

        Those of all loaders that begin an epoch, as their making draws from these states.
        """
        state, self._random = self._random, None
        if state is not None:
            set_random_state(state, self._devices if self._is_same else ())
        for place, make in self._waiting.items():
            place.open(make)
        self._waiting.clear()


class LoaderPlace:
    """Where a loader is in its epoch.

    Args:
        course: of the fit.
        loader: the loader.
        saved: its place in the checkpoint from which the fit goes on, if there is one.

    Attributes:
        has_indices: whether batches can be left out without loading them.
    """

    def __init__(self, course: Course, loader: DataLoader[Any], saved: Any) -> None:
        self._course, self._saved = course, saved
        self.has_indices = not isinstance(loader.dataset, IterableDataset)
        samplers = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        owners = (*samplers, loader.sampler, loader)
        found = (getattr(owner, "generator", None) for owner in owners)
        own = {id(g): g for g in found if isinstance(g, torch.Generator)}
        self._generators = list(own.values())  # samplers may have some of their own
        self._start: dict[str, Any] | None = None
        self._opened: Iterator[Any] = iter(())
        self._numbers = iter(range(_MANY))  # one is taken for each batch
        self._left_out = 0

    def state(self, ahead: int, *, is_at_end: bool) -> Any:
        """How the epoch began, and how many batches have been trained on since."""
        if self._start is None:
            return None
        drawn = _MANY - length_hint(self._numbers)
        batches = 0 if is_at_end else drawn - ahead
        return {"start": self._start, "batches": batches, "generators": self._states()}

    def iterate(self, loader: _PlacedLoader, make: Callable[[], Any]) -> Iterator[Any]:
        """The batches of an epoch, or of what is left of it."""
        if self._saved is None and not self._course.is_pending:
            return self._whole(make)
        self._course.begin(self, make)
        return self._resumed(loader, make)

    def open(self, make: Callable[[], Any]) -> None:
        """Training goes on: if that is with an epoch's begin, makes an iterator."""
        if self._saved is None or not self._saved["batches"]:
            saved, self._saved = self._saved, None
            if saved is not None:
                self._set_generators(saved["generators"])
            self._opened = self._whole(make)

    def _whole(self, make: Callable[[], Any]) -> Iterator[Any]:
        if not self.has_indices:
            self._note_start()
        return self._counted(make())

    def _resumed(self, loader: _PlacedLoader, make: Callable[[], Any]) -> Iterator[Any]:
        """Begins when training asks for a batch: before, the Trainer may not have loaded all."""
        self._course.go_on()
        saved, self._saved = self._saved, None
        yield from self._opened if saved is None else self._rest(loader, make, saved)

    def _rest(self, loader: _PlacedLoader, make: Callable[[], Any], saved: Any) -> Iterator[Any]:
        self._start = saved["start"]
        own = loader.generator
        if self.has_indices:
            self._left_out = saved["batches"]
            # Of the present states, those of steps, no seed for workers is drawn this time.
            seeds = torch.Generator()
            seeds.set_state(saved["start"]["random"]["torch"])
            loader.generator = seeds
        try:
            iterator = make() if self.has_indices else self._without(saved["batches"], make)
            first = next(iterator, _NONE)
        finally:
            loader.generator = own
        batches = iter(()) if first is _NONE else chain((first,), iterator)
        return self._counted(batches, saved["batches"])

    def _without(self, batches: int, make: Callable[[], Any]) -> Iterator[Any]:
        """What comes after so many batches of a data set without indices: it loads them."""
        now = random_state()
        self._begin_again()
        iterator = make()
        for _ in islice(iterator, batches):
            pass
        set_random_state(now)
        return iter(iterator)

    def indices(self, sampler: Iterable[Any]) -> Iterator[Any]:
        """Those of an epoch, or of what is left of it."""
        left_out, self._left_out = self._left_out, 0
        if not left_out:
            self._note_start()
            return iter(sampler)
        now = random_state()
        self._begin_again()
        iterator = iter(sampler)
        for _ in islice(iterator, left_out):
            pass
        set_random_state(now)
        return iterator

    def _counted(self, iterator: Iterator[Any], drawn: int = 0) -> Iterator[Any]:
        """Counts batches as they are drawn, without a call of Python code for each."""
        self._numbers = iter(range(drawn, _MANY))
        return map(itemgetter(0), zip(iterator, self._numbers, strict=False))

    def _note_start(self) -> None:
        self._start = {"random": random_state(), "generators": self._states()}

    def _begin_again(self) -> None:
        start: Any = self._start
        set_random_state(start["random"])
        self._set_generators(start["generators"])

    def _states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _PlacedSampler:
    """Yields what a sampler yields, but for what has been trained on."""

    def __init__(self, sampler: Any, place: LoaderPlace) -> None:
        self._sampler, self._place = sampler, place

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """As a generator would: nothing is drawn before the first indices are asked for."""
        return chain.from_iterable(self._begun())

    def _begun(self) -> Iterator[Any]:
        yield self._place.indices(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _PlacedLoader(DataLoader[Any]):
    """A DataLoader that knows its place."""

    place: LoaderPlace

    def __iter__(self) -> Any:
        """The batches of an epoch, or of what is left of it."""
        return self.place.iterate(self, super().__iter__)
