"""The options of an engine, and the interface of what it runs on each replica in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.apply import ExecutorName
from lightning_dp.parallel.gather import Override, Scalars
from lightning_dp.parallel.reduce import Buffers
from lightning_dp.parallel.replicate import ParameterCopies, ReplicaRules, Replicas
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together
from lightning_dp.parallel.split import SplitPolicy

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""

StepContext: TypeAlias = Callable[[Replicas, str, Shards, bool], AbstractContextManager[None]]
"""Takes (replicas, name of the call, shards, is_rerun); returns the context for one apply."""


@dataclass(frozen=True)
class EngineOptions:
    """What users and modes choose for an engine.

    Attributes:
        output_device: where gathered outputs end up.
        split: how many samples each device gets.
        dim: the dimension along which batches are cut and outputs joined.
        is_call_arguments: whether batches are the arguments of a call, see `infer_batch_size`.
        cost_key: the batch's entry that holds costs; None to ask the module, see `sample_costs`.
        buffers: which buffers the root keeps after a training step, see `reduce_buffers`.
        executor: how the replicas run, see `Executor`.
        scalars, overrides: how 0-dim outputs and those under certain keys are gathered.
        rules: how special submodules are replicated.
        context: entered around every apply, for what replicas leave behind besides outputs.
        world: the processes that train together; None if this is the only one.
        timeout: how long replicas wait in a collective for one that does not come.
    """

    output_device: torch.device
    split: SplitPolicy
    dim: int = 0
    is_call_arguments: bool = False
    cost_key: str | None = None
    buffers: Buffers = "first"
    executor: ExecutorName = "auto"
    scalars: Scalars = "merge"
    overrides: Mapping[str, Override] | None = None
    rules: ReplicaRules | None = None
    context: StepContext = field(default=lambda *_: nullcontext())
    world: World | None = None
    timeout: timedelta | None = None


class ReplicaCall(ABC):
    """What runs on each replica in one step, and what becomes of its results.

    Args:
        name: what errors call it; the executor chooses by it how the call runs.
        training: whether the root takes over the buffers that the call writes.
        transfer: moves the shards.
    """

    has_backward: ClassVar[bool] = False  # the step ends with the backward of a joint loss
    gathers: ClassVar[bool] = True  # or the outputs stay where they are
    copied_parameters: ParameterCopies = "changed"  # to replicas
    path = ""  # of the submodule that is called

    def __init__(
        self, name: str, *, training: bool = False, transfer: Transfer = to_device
    ) -> None:
        self.name, self.training, self.transfer = name, training, transfer

    @abstractmethod
    def begin(self, shards: Shards) -> None:
        """Called when the replicas are up to date, before `on_replica`."""

    @abstractmethod
    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """What a replica does with its shard."""

    def to_cpu(self, outputs: list[Any], devices: Collection[torch.device]) -> Any:
        """Starts to copy the outputs to the CPU; the caller waits for these devices."""
        return to_device_together(outputs, torch.device("cpu"), later=devices)

    @abstractmethod
    def gather(self, outputs: Any, shards: Shards) -> Any:
        """Joins the active replicas' outputs into what one device would have returned."""

    def finish(self, result: Any, gradient: Tensor) -> None:
        """Runs the backward, if any, of a step that is done again."""
        return None
