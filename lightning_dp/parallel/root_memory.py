"""The root's memory: whether it has room for a whole batch, before one goes there."""

from __future__ import annotations

from lightning_dp.parallel.devices import memory_capacity, peak_memory
from lightning_dp.parallel.engine import Engine

SAFE = 0.7
"""Share of a device's memory up to which a batch may go to it without the way back."""

TRIED = 0.9
"""Share up to which a batch may go to it at all, by the peaks of smaller ones."""


class RootMemory:
    """Whether the root has room for a whole batch.

    A batch that does not fit one device never goes to it: its peak is predicted from that of the
    root's shard. A step that the engine runs can be undone if that was wrong; one without the
    engine cannot, and is for batches whose peak has been seen, far below the limit.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        root, *others = self._engine.devices
        self._root = root
        # Replicas on the root's own device take as much of it all together.
        self.is_free = all(device == root for device in others) or root.type == "cpu"
        self._safe = {True: 0, False: 0}

    def is_safe(self, n: int, *, training: bool) -> bool:
        """Whether n samples take no engine that could undo them."""
        return self.is_free or n <= self._safe[training]

    def may_take(self, n: int, *, training: bool) -> bool:
        """Whether n samples should fit."""
        if self._root.type == "cpu":
            return True
        cap = self._engine.planner.cap(0, training=training)
        if cap is not None and cap < n:
            return False
        if self.is_safe(n, training=training):
            return True
        predicted, capacity = self._predicted(n, training), memory_capacity(self._root)
        return 0 < predicted <= TRIED * capacity

    def note_alone(self, n: int, *, training: bool) -> None:
        """The engine has run a step of n samples on the root alone."""
        if not self.is_free and peak_memory(self._root) <= SAFE * memory_capacity(self._root):
            self._safe[training] = max(n, self._safe[training])

    def _predicted(self, n: int, training: bool) -> float:
        """The peak of n samples; 0 where nothing is known.

        By all that the latest training step has added to what was there: that is too much for
        samples alone, and evaluation takes less.
        """
        step = self._engine.meter.latest
        if step is None or not any(step.peak_bytes) or not step.sizes[0]:
            sizes = self._engine.last_sizes
            return 0.0 if training or not any(sizes) else self._without_training(n, sizes[0])
        added = step.peak_bytes[0] - step.start_bytes[0]
        return step.start_bytes[0] + added * max(1.0, n / step.sizes[0])

    def _without_training(self, n: int, samples: int) -> float:
        return peak_memory(self._root) * n / samples if samples else 0.0
