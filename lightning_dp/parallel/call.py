"""What runs on each replica in a step, and what becomes of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class ReplicaCall(ABC):
    """One step's call, for `Engine.step`.

    By its name errors call it, and the executor chooses how it runs. In training the module may
    leave buffers behind.
    """

    has_backward: ClassVar[bool] = False  # the step ends with the backward of a joint loss
    gathers: ClassVar[bool] = True  # or the outputs stay where they are
    copied_parameters: ParameterCopies = field(default="changed", init=False)  # elsewhere
    path = ""  # of the submodule that is called

    name: str
    training: bool = field(default=False, kw_only=True)
    transfer: Transfer = field(default=PLAIN, kw_only=True)

    def begin(self, shards: Shards) -> None:
        """The replicas are up to date, and about to be called."""
        return None

    @abstractmethod
    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """What a replica does with its shard."""

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
