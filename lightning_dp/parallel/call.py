"""What runs on each replica in a step, and what becomes of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicate import ParameterCopies, Replicas
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""

PLAIN: Transfer = to_device

StepContext: TypeAlias = Callable[[Replicas, str, Shards, bool], AbstractContextManager[None]]
"""Of the replicas, what is called, the shards, and whether it is a rerun."""

HOST = torch.device("cpu")


class ReplicaCall(ABC):
    """One step's call, for `Engine.step`.

    Args:
        name: what errors call it; the executor chooses by it how the call runs.
        training: whether the module may leave buffers behind.
        transfer: moves the shards.
    """

    has_backward: ClassVar[bool] = False  # the step ends with the backward of a joint loss
    gathers: ClassVar[bool] = True  # or the outputs stay where they are
    copied_parameters: ParameterCopies = "changed"  # to replicas
    path = ""  # of the submodule that is called

    def __init__(self, name: str, *, training: bool = False, transfer: Transfer = PLAIN) -> None:
        self.name, self.training, self.transfer = name, training, transfer

    @abstractmethod
    def begin(self, shards: Shards) -> None:
        """The replicas are up to date, and about to be called."""

    @abstractmethod
    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """What a replica does with its shard."""

    def leave(self, outputs: list[Any], devices: Collection[torch.device]) -> list[Any]:
        """The outputs on their way to the host, which does not wait for these devices yet."""
        return to_device_together(outputs, HOST, later=devices)

    def exchange_losses(self, outputs: list[Any], shards: Shards) -> Any:
        """Exchanges loss, samples and items with the other ranks; returns what `gather` takes."""
        return outputs

    @abstractmethod
    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """What one device would have returned, where the replicas that work returned `outputs`."""

    def finish(self, result: Any, gradient: Tensor | None = None) -> None:
        """Does what comes after a step whose result no other code gets: its backward, if any."""
        return None
