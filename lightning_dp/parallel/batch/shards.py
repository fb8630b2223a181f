"""A batch in pieces, and what the devices have done with theirs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, count
from typing import Any

import torch

from lightning_dp.parallel.batch.sample_dims import StepDims
from lightning_dp.parallel.split import Order, Sizes


@dataclass
class DeviceUsage:
    """What one device has done in training so far.

    Attributes:
        device: the device.
        name: the replica's name, which is the device's unless several share it.
        samples: training samples it was given; in forward mode the rows of all spread calls.
        busy_seconds: time spent in its forward and backward, as its worker saw it; in forward
            mode in its forward. Accelerators compute asynchronously: there it is the time that
            issuing the forward took.
        peak_bytes: the most memory that was in use on the device since its statistics were reset
            last, by whomever; 0 where devices do not count it, as the CPU.
    """

    device: torch.device
    name: str
    samples: int = 0
    busy_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Shards:
    """A batch after split and scatter: a size and a part per device, None where the size is 0.

    It is `whole` if nothing was cut: the root has the batch as it is. `order` has the positions of
    each shard's samples in the batch, if they are not consecutive. `losses`, of
    `parallel.processes`, are there if other processes are to hear of them when the step ends.
    `added` has the keys of entries that steps have put into the parts.
    """

    sizes: Sizes
    parts: list[Any] = field(repr=False)
    whole: bool = False
    order: Order | None = field(default=None, repr=False)
    dims: StepDims = field(default_factory=StepDims, repr=False, compare=False)
    losses: list[Any] = field(default_factory=list, repr=False, compare=False)
    added: dict[Any, None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def active(self) -> list[int]:
        """The replicas that have samples."""
        return list(compress(count(), self.sizes))

    @cached_property
    def active_sizes(self) -> list[int]:
        """The sizes of the shards of the active replicas."""
        return list(filter(None, self.sizes))

    @cached_property
    def active_order(self) -> Order | None:
        """The positions of the samples of the active replicas, if they are not in order."""
        return None if self.order is None else [self.order[k] for k in self.active]

    def samples(self, k: int) -> str:
        """Which samples replica k has, for people."""
        if self.order is not None:
            some = ", ".join(map(str, self.order[k][:8])) + ", ..." * (self.sizes[k] > 8)
            return f"samples {some} of {sum(self.sizes)}"
        start = sum(self.sizes[:k])
        return f"samples {start} to {start + self.sizes[k] - 1} of {sum(self.sizes)}"

    def place(self, stage: str, k: int) -> str:
        """Completes the sentence "in replica 2 on cuda:1, ..." in an error."""
        return f", {stage}, {self.samples(k)}"


def warn_of_nothing_to_cut(dim: int) -> None:
    """Of a step's batch without a size, which only one device gets."""
    warnings.warn(
        "The batch has no tensor and no list that could be cut: it runs on the root device alone. "
        f"Yield tensors whose dim {dim} counts the samples.",
        stacklevel=2,
    )
