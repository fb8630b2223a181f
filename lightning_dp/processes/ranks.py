"""Ranks: a strategy of several devices in one process, or in several processes.

With one process, the usual case, the rank is 0 and the world's size 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_dp.lightning_private import may_log, running_hook
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.split import OwnShare, Shares, Sizes, agreed_shares, at_least
from lightning_dp.parallel.workers import (
    Calls,
    as_one_replica,
    collectives,
    current_participant,
    fewest_samples,
)
from lightning_dp.processes.group import chosen_backend, join_group
from lightning_dp.processes.loaders import no_predictions, of_process
from lightning_dp.processes.machine import local_size, number_processes, share
from lightning_dp.processes.slices import opened

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    from lightning_dp.parallel.processes import World
else:
    # The packages `lightning` and `pytorch_lightning` have the same classes twice: which
    # ParallelStrategy comes next is for the class to say that mixes this one in.
    ParallelStrategy = object


class ProcessesMixin(ParallelStrategy):
    """Who is who among the processes, if there are several.

    Whoever starts them (torchrun, SLURM, Lightning's environments) tells them their ranks. The
    devices of a machine are shared out among its processes, in order.

    Collectives act over the replicas where a replica calls them in its step; see `collectives` for
    what they give. Elsewhere they act over the processes. To be mixed into the `ParallelStrategy`
    of either package.
    """

    _world: World | None = None
    shares: Shares
    """How many samples of a batch each process gets."""
    machine_devices: list[torch.device] | None
    """The devices of this machine, which its processes share out."""
    _store: Any = None  # what the processes of this attempt share
    _num_nodes = 1
    _process_group_backend: str | None = None
    _timeout: timedelta | None = None

    @property
    def num_nodes(self) -> int:
        """How many machines there are; the Trainer sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def global_rank(self) -> int:
        return self._environment.global_rank() if self._has_several else 0

    @property
    @override
    def local_rank(self) -> int:
        return self._environment.local_rank() if self._has_several else 0

    @property
    @override
    def node_rank(self) -> int:
        return self._environment.node_rank() if self._has_several else 0

    @property
    @override
    def world_size(self) -> int:
        return self._environment.world_size() if self._has_several else 1

    @property
    def replica_names(self) -> tuple[str, ...]:
        """What this process's replicas are called in logs, errors, tables and pictures."""
        process = self.global_rank if self._has_several else None
        return tuple(replica_names(self.parallel_devices or [], process))

    @property
    def _environment(self) -> ClusterEnvironment:
        return cast(ClusterEnvironment, self.cluster_environment)

    @property
    def _has_several(self) -> bool:
        environment = self.cluster_environment
        return environment is not None and environment.world_size() > 1

    def set_world_ranks(self) -> None:
        """Called by the Trainer once it knows the environment, the devices and the machines."""
        number_processes(self._environment, self.num_nodes)
        if self._has_several:
            cast(Any, rank_zero_only).rank = self.global_rank
            count = len(self.machine_devices or ())
            self.take_devices(share(count, self._local_size, self.local_rank))

    @property
    def _local_size(self) -> int:
        """How many processes this machine has."""
        return local_size(self._environment, self.num_nodes)

    @property
    @abstractmethod
    def own_share(self) -> OwnShare:
        """What decides how many samples of a batch are this process's."""

    @abstractmethod
    def take_devices(self, own: slice) -> None:
        """These of the machine's devices are this process's."""

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._has_several and self._world is None:
            self._join()

    def _join(self) -> None:
        from lightning_dp.parallel.processes import World

        devices, n = self.machine_devices or [], self._local_size
        roots = [devices[share(len(devices), n, rank)][0] for rank in range(n)]
        backend = chosen_backend(self._process_group_backend, roots)
        options: dict[str, Any] = {} if self._timeout is None else {"timeout": self._timeout}
        self._store = join_group(self._environment, backend, **options)
        world = World(self.global_rank, self.world_size, timeout=self._timeout)
        self.shares = agreed_shares(world.gather(self.own_share))
        world.device_counts = self.shares.device_counts
        self._world = world

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds its place among the processes when it is set up."""
        return {**super().__getstate__(), "_world": None, "_store": None}

    # Batches

    @property
    def is_distributed(self) -> bool:
        """Whether `self.log(..., sync_dist=True)` is for all processes, as Lightning asks in hooks.

        Where nothing can be logged it asks whether a DataLoader needs a sampler for this process:
        none does, for `trainer.estimated_stepping_batches` or for a callback's own fit.
        """
        module = self.lightning_module
        hook = None if self._world is None or module is None else running_hook(module)
        return hook is not None and may_log(hook)

    @property
    def world(self) -> World | None:
        """The processes that train together; None while there is one alone."""
        return self._world

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Lets it load this process's samples alone."""
        if self._world is None:
            return super().process_dataloader(dataloader)
        return of_process(dataloader, self._parts_of, self._world)

    def _parts_of(self, n: int) -> Sizes:
        """The sizes of all processes' parts of a batch, none too small for the module's layers."""
        sizes, module = self.shares(n), self.lightning_module
        least = 1 if module is None else fewest_samples(module)
        return at_least(sizes, least) or sizes if least > 1 else sizes

    def open_slices(self, world: World) -> None:
        """From now on, batches are taken out of their slices before anybody sees them.

        Lightning asks its precision plugin first, in every loop.
        """
        plugin = self.precision_plugin
        own = type(plugin).convert_input.__get__(plugin)
        vars(plugin)["convert_input"] = partial(_converted, world, own)

    def own_rows(self, output: Any, n: int) -> Any:
        """What this process's samples have given, of what a step returns for n samples."""
        is_idle = self._world is not None and self._world.is_idle
        return no_predictions(output, n) if is_idle else output

    @override
    def teardown(self) -> None:
        vars(self.precision_plugin).pop("convert_input", None)
        super().teardown()

    # Collectives

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Outside of replicas and of steps, in hooks: each process counts as one."""
        if not isinstance(tensor, Tensor):
            return tensor
        return collectives.reduce(tensor, reduce_op, self._host(tensor.device))

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """The batch's tensor; gradients flow through it whatever `sync_grads`, as on one device.

        Outside of replicas, too, nothing gets a new dimension: what all processes have is joined
        along the first one, in their order.
        """
        return collectives.all_gather(tensor, self._host(tensor.device))

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._world is not None and current_participant() is None:
            return self._world.broadcast(obj, src)
        return collectives.broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._world is not None and current_participant() is None:
            self._world.barrier()
        collectives.barrier(name)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._world is not None and current_participant() is None:
            decisions = self._world.gather(bool(decision))
            return min(decisions) if all else max(decisions)
        return collectives.decide(decision, everybody=all)

    def _host(self, device: torch.device) -> Calls | None:
        """What stands for this process outside of replicas, if there are others."""
        world = self._world
        if world is None or current_participant() is not None:
            return None
        module = self.lightning_module
        hook = None if module is None else running_hook(module)
        # An idle process has samples of other batches: what it has of an epoch counts.
        is_of_batch = hook is not None and any(word in hook for word in _OF_BATCHES)
        return as_one_replica(world, device, is_idle=is_of_batch and world.is_idle)


_OF_BATCHES = ("batch", "step", "backward", "zero_grad", "gradient")
"""Found in the names of the steps and hooks that a loop calls for every batch."""


def _converted(world: World, own: Callable[[Any], Any], batch: Any) -> Any:
    batch, world.is_idle = opened(batch)
    return own(batch)
