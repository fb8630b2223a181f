"""Ranges: the stages of a step under their names, for profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.profiler import record_function

from lightning_dp.parallel.contexts import Contexts, Paired
from lightning_dp.parallel.torch_private import is_profiling


class Ranges:
    """Says when a stage begins and ends: `lightning_dp.scatter`, `lightning_dp.apply` and so on.

    `torch.profiler` is told whenever it is on, and so is `profile`, if given: something that enters
    a range by its name.
    """

    def __init__(self) -> None:
        self.profile: Callable[[str], AbstractContextManager[None]] | None = None
        self._open: set[str] = set()

    def of(self, stage: str) -> AbstractContextManager[None]:
        """The range of a stage. Inside of itself, as a stage may call its own parts, it is none."""
        return nullcontext() if stage in self._open else Contexts(self._parts(stage))

    def _parts(self, stage: str) -> Iterator[AbstractContextManager[Any]]:
        yield Paired(partial(self._open.add, stage), partial(self._open.discard, stage))
        name = f"lightning_dp.{stage}"
        if is_profiling():
            yield record_function(name)
        if self.profile is not None:
            yield self.profile(name)


class InRanges:
    """The methods of an object, each call of which is a range of the method's name."""

    def __init__(self, owner: Any, ranges: Ranges) -> None:
        self._owner, self._ranges = owner, ranges

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the object."""
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._ranges.of(name):
            return getattr(self._owner, name)(*args, **kwargs)
