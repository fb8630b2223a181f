"""Buffers between processes: each has those that its own steps have left, and then one for all.

By policy these are the means of all processes, after every training step; or those of the first
process that had samples, when somebody may look: before a step that reads what another has written,
and where `share` is called. So are the rows of embeddings that a forward shortens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_dp.parallel.gradients.buffers import Buffers, reduce_buffers
from lightning_dp.parallel.processes import JointLoss, World
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import version


class BuffersBetween:
    """Makes the root's buffers alike in all processes.

    Args:
        replicas: of this process.
        world: the processes.
        policy: whose buffers they become.

    Attributes:
        by_steps: whether all processes do as many forwards, and so end each of them together.
    """

    def __init__(self, replicas: Replicas, world: World, policy: Buffers) -> None:
        self._replicas, self._world, self._policy = replicas, world, policy
        self.by_steps = True
        self._are_shortened = False
        self._samples = 0
        self._is_open = False  # means are to be taken of the latest step
        self._differ = False
        self._are_read = False
        self._first = 0  # process with samples in the latest step
        self._marks: list[int] = []

    def before_step(self) -> None:
        """A training step begins, which may read buffers."""
        if self._differ and self._are_read:
            self.share()
        self._marks = self._marked()

    def has_written(self) -> bool:
        """Whether the step has written to buffers that steps may read."""
        return self._marks != self._marked()

    def _marked(self) -> list[int]:
        buffers = self._replicas.read_buffers()
        return [-1 if b is None or b.is_inference() else version(b) for b in buffers]

    def told(self, joined: JointLoss) -> None:
        """What all processes' steps have done."""
        self._are_read, self._first = joined.writes, joined.first

    def after_forward(self, samples: int) -> None:
        """A training step's forward has ended, in all processes."""
        self._samples = 0 if self._world.is_idle else samples
        self._is_open = self._policy == "mean"
        self._differ = self._policy == "first"
        self._are_shortened = True

    def after_step(self) -> None:
        """The buffers are as the step has left them."""
        if self.by_steps and self._are_shortened:
            self.share_rows()
        if self._is_open:
            self._is_open = False
            self._take(lambda: self._world.gather((self._samples, self._own())))

    def share_rows(self) -> None:
        """Makes the rows of embeddings alike that forwards have shortened."""
        self._are_shortened = False
        if self._replicas.limited is not None:
            self._replicas.limited.share(self._world)

    def share(self) -> None:
        """Makes them alike, if steps have left them different."""
        self.share_rows()
        if self._differ:
            self._differ = False
            own = (1, self._own() if self._world.rank == self._first else [])
            self._take(lambda: [self._world.broadcast(own, self._first)])

    def _own(self) -> list[torch.Tensor | None]:
        buffers = self._replicas.buffers_of_steps[0]
        return [None if buffer is None else buffer.detach().cpu() for buffer in buffers]

    def _take(self, exchange: Callable[[], list[tuple[int, list[torch.Tensor | None]]]]) -> None:
        root = self._replicas.buffers_of_steps[0]
        if any(buffer is not None for buffer in root):
            told = [(n, buffers) for n, buffers in exchange() if n]
            sizes = [n for n, _ in told]
            reduce_buffers(root, [buffers for _, buffers in told], sizes, self._policy)
