"""What runs on each replica in a step, and what becomes of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Shards, to_device, to_device_together
from lightning_dp.parallel.likely_cause import LikelyCause
from lightning_dp.parallel.replicas import ParameterCopies, Replicas
from lightning_dp.parallel.workers import Task

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""


class PlainTransfer(partial[Any]):
    """A transfer that copies tensors as `to_device` does, and leaves those that are there alone."""


PLAIN = PlainTransfer(to_device)


StepContext: TypeAlias = Callable[[Replicas, str, Shards, bool], AbstractContextManager[None]]
"""Of the replicas, what is called, the shards, and whether it is a rerun."""


HOST = torch.device("cpu")


class ReplicaCall(ABC):
    """One step's call, for `Engine.step`.

    By its name errors call it, and the executor chooses how it runs. In training the module may
    leave buffers behind.
    """

    has_backward: ClassVar[bool] = False  # the step ends with the backward of a joint loss
    gathers: ClassVar[bool] = True  # or the outputs stay where they are
    copied_parameters: ParameterCopies = "changed"  # by replicas elsewhere
    path = ""  # of the submodule that is called

    def __init__(self, name: str, *, training: bool = False, transfer: Transfer = PLAIN) -> None:
        self.name = name
        self.training = training
        self.transfer = transfer

    def begin(self, shards: Shards) -> None:
        """The replicas are up to date, and about to be called."""
        return None

    @abstractmethod
    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """What a replica does with its shard."""

    def tasks(
        self, modules: Sequence[nn.Module], shards: Shards, devices: Sequence[torch.device]
    ) -> list[Task]:
        """The calls of the replicas that work."""
        tasks = []
        for k in shards.active:
            call = partial(self.on_replica, modules[k], shards.parts[k])
            place = partial(shards.place, self.name, k)
            cause = LikelyCause(modules[k], devices[k], shards, k)
            tasks.append(Task(k, devices[k], call, place, cause))
        return tasks

    def leave(self, outputs: list[Any], devices: Collection[torch.device]) -> list[Any]:
        """The outputs on their way to the host, which does not wait for these devices yet."""
        return to_device_together(outputs, HOST, later=devices)

    def tell(self, outputs: list[Any], shards: Shards) -> Any:
        """The outputs, as `gather` takes them; what other processes are to hear is in the shards.

        Only where there are several processes.
        """
        return outputs

    @abstractmethod
    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """What one device would have returned, where the replicas that work returned `outputs`."""

    def finish(self, result: Any, gradient: Tensor | None = None) -> None:
        """Does what comes after a step whose result nobody else gets: its backward, if any."""
        return None

    def without_trace(self) -> AbstractContextManager[None]:
        """What surrounds a step that only tries whether it fits."""
        return nullcontext()
