"""Steps that the root does alone, as Lightning itself does them, where that is fastest.

`split="auto"` decides before a batch is moved. What it decides by are the times of all steps, which
are taken here: from a step's begin to the end of its backward, with the gradients' sums.

Not in several processes: their steps wait for each other, and tell nothing of one's own devices.
There `split="auto"` shares the samples out over all devices of a process, by their speeds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_dp.modes import ForwardMode, Mode, StepMode
from lightning_dp.parallel.batch import BatchSizeError, infer_for
from lightning_dp.parallel.links import Stretch
from lightning_dp.parallel.root_memory import RootMemory
from lightning_dp.parallel.split import Auto, Piece

_STEPS = {
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""The steps of Lightning's stages."""

_UNREAD = 16
"""Pieces of work that may wait for devices to be through with them; older ones are dropped."""

_KEPT = 8
"""Batches of which is known what was decided: a callback may have moved one in between."""


class AloneSteps:
    """The steps of a Trainer whose strategy may let the root work alone."""

    is_done = False

    def __init__(self, mode: Mode, split: Auto, trainer: Trainer) -> None:
        self.is_alone = False  # the latest step
        self.is_watched = False  # somebody wants to know what devices do in every step
        self._mode, self._split, self._trainer = mode, split, trainer
        self._engine = mode.engine
        self._memory = RootMemory(mode.engine)
        root, output = self._engine.devices[0], self._engine.output_device
        stays = isinstance(mode, ForwardMode) and not mode.moves_batch and root.type != "cpu"
        # What Lightning does without us is on the root.
        self._is_at_home = root == output and not stays
        self._dim = self._engine.dims["", True].dim
        self._root, self._places = [root], [*self._engine.devices, output]
        self._decided: dict[int, tuple[Piece | None, bool]] = {}  # by the batches that the loop has
        self._piece: Piece | None = None
        self._is_open = False  # micro-batches of one step of the optimizer are one piece
        self._steps = 0
        self._stretches: list[Stretch] = []
        self._running: Stretch | None = None
        self._inside = False
        self._began = 0.0
        self._replicas_worked = self._has_workers = True
        self._ended: deque[tuple[Piece, list[Stretch], int, tuple[int, ...]]] = deque(
            maxlen=_UNREAD
        )

    # What the strategy's hooks call

    def batch(self, batch: Any, dataloader_idx: int, move: Callable[..., Any]) -> Any:
        """What the loop gets for a batch: on the root if it will work alone."""
        piece = self._begin_piece(batch)
        is_alone = piece is not None and piece.way == 0 and self._can_skip_engine(piece.n)
        if is_alone:
            stretch = Stretch(self._root) if piece is not None and piece.counts else None
            result = move(batch, None, dataloader_idx)
            if stretch is not None:
                stretch.end()
                self._stretches.append(stretch)
        else:
            result = self._mode.batch(batch, dataloader_idx)
        if len(self._decided) > _KEPT:
            self._decided.clear()
        self._decided[id(result)] = piece, is_alone
        return result

    def step(
        self, method: str, batch: Any, alone: Callable[[], Any], several: Callable[[], Any]
    ) -> Any:
        """Runs a step: `alone` is Lightning's own, `several` the engine's."""
        decided = self._decided.get(id(batch))
        if decided is None or isinstance(batch, Iterator):
            decided = self._not_decided()
        piece, self.is_alone = decided
        training = method == "training_step"
        if self.is_alone and self._replicas_worked:
            self._end_of_replicas()
        if not self.is_alone:
            self._replicas_worked = self._has_workers = True
        elif self._has_workers and self._is_at_rest(piece):
            # Threads that wait keep memory, and the cores' attention.
            self._engine.executor.close()
            self._has_workers = False
        if piece is not None and piece.counts:
            self._running = Stretch(self._root if self.is_alone else self._places)
        self._began, self._inside = time.perf_counter(), True
        if self.is_alone and piece is not None:
            engine = self._engine
            engine.last_sizes = (piece.n, *[0] * (len(engine.devices) - 1))
            if training and self.is_watched and engine.meter.steps is not None:
                engine.meter.steps.start(engine.last_sizes)
                alone = partial(self._watched, alone)
            output = alone()
        else:
            output = several()
        self._inside = False
        # The backward of an automatic step comes next, and ends it.
        if not training or not self._trainer.lightning_module.automatic_optimization:
            self._end_step(training=training)
        return output

    def backward(self, call: Callable[[], Any]) -> Any:
        """Runs the backward of a step; one that the step has called itself is a part of it."""
        if self._inside:
            return call()
        loss = self._watched(call) if self.is_alone and self.is_watched else call()
        self._end_step(training=True)
        return loss

    def _watched(self, call: Callable[[], Any]) -> Any:
        with self._engine.meter.working([0]):
            return call()

    # Pieces of work

    def _begin_piece(self, batch: Any) -> Piece | None:
        """Decides how a batch is worked on; None where there is no choice."""
        self._read()
        kind = _STEPS.get(self._stage())
        n = None if kind is None or isinstance(batch, Iterator) else self._samples(batch)
        if kind is None or not n:
            self._split.use_all()
            self._drop()
            return None
        if self._must_stay_even(kind):
            self._split.keep_even()
            self._drop()
            return None
        training = kind == "training_step"
        open_piece = self._piece if self._is_open and training else None
        if open_piece and (open_piece.way > 0 or self._memory.may_take(n, training=True)):
            self._piece = replace(open_piece, n=n)
            return self._piece
        if self._piece is not None:
            self._drop()
        self._piece = self._split.begin(
            kind,
            n,
            training=training,
            can_be_alone=lambda: self._memory.may_take(n, training=training),
            is_settled=lambda: self._is_settled(str(kind)),
        )
        return self._piece

    def _not_decided(self) -> tuple[Piece | None, bool]:
        """Somebody else's batch, or an iterator, of whose batches nothing is known yet."""
        self._drop()
        self._split.use_all()
        return None, False

    def _end_step(self, *, training: bool) -> None:
        """A step is done, and its backward."""
        engine, piece = self._engine, self._piece
        if self.is_alone and training:
            seconds = time.perf_counter() - self._began
            engine.meter.add_alone(engine.last_sizes[0], seconds)
            if self.is_watched and engine.meter.steps is not None:
                engine.meter.steps.stop()
        if piece is None:
            return
        if not self.is_alone and engine.last_sizes[:1] == (piece.n,):
            self._memory.note_alone(piece.n, training=training)
        self._is_open = training and engine.reducer.accumulating
        if not piece.counts or self._running is None:
            return
        self._running.end()
        self._stretches.append(self._running)
        self._running = None
        self._steps += 1
        if not self._is_open:
            ended = (piece, self._stretches, self._steps, engine.last_sizes)
            self._ended.append(ended)
            self._stretches, self._steps = [], 0

    def _drop(self) -> None:
        """What was not ended is not counted."""
        self._piece, self._is_open, self._running = None, False, None
        self._stretches, self._steps = [], 0

    def _read(self) -> None:
        """Tells the split the times of those pieces that the devices are through with."""
        while self._ended and all([stretch.is_over() for stretch in self._ended[0][1]]):
            piece, stretches, steps, sizes = self._ended.popleft()
            seconds = sum([stretch.device_seconds for stretch in stretches])
            self._split.end(piece, seconds / steps, sizes)

    def _end_of_replicas(self) -> None:
        """What replicas have left goes to the root, and what they hold is let go."""
        self._replicas_worked = False
        self._engine.resync()
        if isinstance(self._mode, StepMode):
            self._mode.batch(None, 0)  # nobody asks for the latest shards any more

    # What decides whether there is a choice

    def _can_skip_engine(self, n: int) -> bool:
        if not self._is_at_home or self._memory.is_free:
            return self._is_at_home
        return self._memory.is_safe(n, training=self._stage() == "train")

    def _is_at_rest(self, piece: Piece | None) -> bool:
        return piece is None or piece.choice is None or not piece.choice.is_examining

    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return "" if stage is None else str(stage.value)

    def _samples(self, batch: Any) -> int | None:
        engine = self._engine
        try:
            return infer_for(engine.asked, batch, self._dim).size
        except BatchSizeError:
            return None  # the step says so, where it can be told what is wrong

    def _is_settled(self, kind: str) -> bool:
        executor = self._engine.executor
        return executor.is_settled(kind if isinstance(self._mode, StepMode) else None)

    def _must_stay_even(self, kind: str) -> bool:
        """Whether each replica has to have the samples that it always has."""
        if torch.are_deterministic_algorithms_enabled():
            return True
        return self._engine.dims[kind, kind == "training_step"].keeps_sizes
