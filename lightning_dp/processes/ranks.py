"""Ranks: a strategy with several devices in one process, or in each of several.

torchrun, SLURM or another of Lightning's cluster environments starts the processes and gives each
its rank. With one process, the usual case, the rank is 0 and the world size 1.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_dp.lightning_private import join_process_group, running_hook
from lightning_dp.parallel.apply import collectives, current_participant, fewest_samples
from lightning_dp.parallel.checks import short_repr
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.split import Sizes, even, fitted, weighted
from lightning_dp.processes.slices import RankLoader, open_slices

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    from lightning_dp.parallel.processes import World
else:
    # `lightning` and `pytorch_lightning` have one ParallelStrategy each: the class that mixes this
    # one in chooses.
    ParallelStrategy = object

_OF_TRAINER = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision"),
    *("max_epochs", "max_steps", "check_val_every_n_epoch", "val_check_interval"),
    *("num_sanity_val_steps", "overfit_batches", "log_every_n_steps"),
    *(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")),
)
"""The Trainer's options that decide which steps there are, and what they do."""

_OF_BATCHES = ("batch", "step", "backward", "zero_grad", "gradient")
"""Parts of the names of the hooks that a loop calls for every batch."""


class ProcessesMixin(ParallelStrategy):
    """The ranks of a strategy, their process group and their slices of the DataLoader.

    The devices of a machine are shared out among its processes, in order. With one process
    collectives act in a replica's step, over all replicas (see `collectives`); with several ones
    outside of steps, over the processes.
    """

    machine_devices: list[torch.device] | None
    """The devices of this machine, which its processes share out."""
    share: float
    """This process's share of each batch, in proportion to those of the others."""
    num_nodes = 1  # machines; the Trainer sets it
    world: World | None = None
    """The processes that train together; None if there is only one."""
    _process_group_backend: str | None = None
    _timeout: timedelta | None = None
    _shares: list[float]  # of all ranks in a batch; only their ratios matter

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The names of this process's replicas in logs, errors and tables."""
        rank = self.global_rank if self.world_size > 1 else None
        return tuple(replica_names(self.parallel_devices or [], rank))

    # Starting

    @abstractmethod
    def take_devices(self, own: slice) -> None:
        """Keeps these of the machine's devices, which are this process's."""

    def set_world_ranks(self) -> None:
        """Called by the Trainer once it knows the environment, the devices and the machines."""
        is_slurm = hasattr(self.cluster_environment, "auto_requeue")  # in both packages
        if is_slurm and "SLURM_NTASKS" not in os.environ:
            self.cluster_environment = LightningEnvironment()  # srun has started one process
        size, nodes, count = self.world_size, self.num_nodes, len(self.machine_devices or ())
        if size == 1:
            if nodes > 1:
                raise ValueError(
                    f"num_nodes: expected 1, as no processes were started on other machines, got "
                    f"{nodes}. Start the script on each machine by torchrun or srun."
                )
            return
        cast(Any, rank_zero_only).rank = self.global_rank
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size // nodes))  # processes on this machine
        if here * nodes != size or self.local_rank >= here:
            raise ValueError(
                f"num_nodes: expected the number of machines, on which {size} processes were "
                f"started, got {nodes}. Set Trainer(num_nodes=...)."
            )
        if count < here:
            raise ValueError(
                f"devices: expected at least {here}, one for each of this machine's processes, "
                f"which share out its devices, got {count}."
            )
        ends = [0, *accumulate(even(count, here))]
        self.take_devices(slice(ends[self.local_rank], ends[self.local_rank + 1]))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size == 1 or self.world is not None:
            return
        from lightning_dp.parallel.processes import World

        backend, devices = self._process_group_backend, self.machine_devices or []
        if backend is None:  # NCCL, which has not been run yet, takes a GPU from one process only
            has_nccl = devices[0].type == "cuda" and len(set(devices)) == len(devices)
            backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        options = {} if self._timeout is None else {"timeout": self._timeout}
        join_process_group(self.cluster_environment, backend.lower(), **options)
        self.world = World(self.global_rank, self.world_size, timeout=self._timeout)
        self._shares = self.world.all_gather_objects(self.share)

    def __getstate__(self) -> dict[str, Any]:
        """A copy joins the processes when it is set up."""
        return {**super().__getstate__(), "world": None}

    def begin_together(self, world: World, options: Mapping[str, Any], trainer: Any) -> None:
        """Checks that all processes have the same options, and gives them rank 0's module."""
        own = {n: getattr(v, "__qualname__", None) or repr(v) for n, v in options.items()}
        own |= {f"Trainer's {name}": repr(getattr(trainer, name)) for name in _OF_TRAINER}
        ranks = world.all_gather_objects(own)
        for name in own:
            values = [rank[name] for rank in ranks]
            if len(set(values)) > 1:
                raise ValueError(
                    f"{name}: expected the same in all processes, got {', '.join(values)} in turn. "
                    "Start them with the same options."
                )
        module = cast(nn.Module, self.lightning_module)
        if any(getattr(part, "max_norm", None) is not None for part in module.modules()):
            raise ValueError(
                "nn.Embedding(max_norm=...): expected none in several processes, as its forward "
                "changes weights, which would differ between them. Use one process."
            )
        named = [*module.named_parameters(), *module.named_buffers()]
        world.broadcast_tensors({name: t for name, t in named if not is_lazy(t)})
        # Lightning's loops ask the precision plugin first what becomes of a batch.
        plugin = self.precision_plugin
        convert = type(plugin).convert_input.__get__(plugin)

        def open_and_convert(batch: Any) -> Any:
            batch, world.is_idle = open_slices(batch)
            return convert(batch)

        vars(plugin)["convert_input"] = open_and_convert

    @override
    def teardown(self) -> None:
        vars(self.precision_plugin).pop("convert_input", None)
        super().teardown()

    # Batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Replaces a loader by one of this rank's slices."""
        if self.world is None:
            return super().process_dataloader(dataloader)
        return RankLoader(dataloader, self._slice_sizes, self.world)

    def _slice_sizes(self, n: int) -> Sizes:
        """The sizes of all ranks' slices, none too small for the module's batch norm layers."""
        sizes = weighted(n, self._shares)
        return fitted(sizes, None, fewest_samples(cast(nn.Module, self.lightning_module))) or sizes

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning may treat the running hook as one of several processes'.

        In hooks `self.log(..., sync_dist=True)` is for all processes; in `setup` BatchSizeFinder
        refuses them. Outside of hooks, and in `on_fit_start`, where LearningRateFinder runs,
        Lightning would give DataLoaders a DistributedSampler.
        """
        module = self.lightning_module
        hook = None if self.world is None or module is None else running_hook(module)
        return hook not in (None, "on_fit_start")

    # Collectives

    @property
    def _outside(self) -> World | None:
        """The processes, where no replica calls."""
        return None if current_participant() is not None else self.world

    def _of_ranks(self, tensor: Tensor, what: str) -> list[Tensor]:
        """The tensors of all ranks, or in a batch's hook of those that have samples of it."""
        world, module = cast(Any, self.world), self.lightning_module
        hook = None if module is None else running_hook(module)
        # A rank with an empty slice has samples of other batches: its part of an epoch counts.
        is_of_batch = hook is not None and any(word in hook for word in _OF_BATCHES)
        sent = None if is_of_batch and world.is_idle else tensor
        return [t.to(tensor.device) for t in world.all_gather_objects(sent, what) if t is not None]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Outside of steps, each process counts as one."""
        if not isinstance(tensor, Tensor):
            return tensor
        if self._outside is None:
            return collectives.reduce(tensor, reduce_op)
        name = collectives.op_name(reduce_op)
        tensors = self._of_ranks(tensor, f"reduce with op={name!r}")
        return collectives.reduced(name, tensors, [1] * len(tensors))

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """The global batch's tensor, without a new dimension; gradients flow through it in a step.

        Outside of steps the processes' tensors are joined along the first dimension, in the order
        of the ranks, and have no graph.
        """
        if self._outside is None:
            return collectives.all_gather(tensor)
        return cast(Tensor, gather(self._of_ranks(tensor, "all_gather"), tensor.device))

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._outside is not None:
            return self._outside.broadcast(obj, src)
        return collectives.broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        module = self.lightning_module
        if self._outside is None:
            collectives.barrier(name)
        # After an error the other processes may not come to it.
        elif module is None or not module.trainer.interrupted:
            self._outside.barrier()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._outside is None:
            return collectives.decide(decision, everybody=all)
        decisions = self._outside.all_gather_objects(bool(decision), "reduce_boolean_decision")
        return min(decisions) if all else max(decisions)


def check_group_options(backend: str | None, timeout: timedelta | float | None) -> timedelta | None:
    """Raises a ValueError where these options are wrong; returns the timeout as a timedelta."""
    known = {*torch.distributed.Backend.backend_list}
    names = backend.lower().split(",") if isinstance(backend, str) else [""]
    if backend is not None and not {name.rpartition(":")[2] for name in names} <= known:
        raise ValueError(
            "process_group_backend: expected a name such as 'gloo', 'nccl' or "
            f"'cpu:gloo,cuda:nccl', or None, got {short_repr(backend)}. Leave it out to have it "
            "chosen."
        )
    if isinstance(timeout, int | float) and timeout is not True and 0 < timeout < 1e9:
        timeout = timedelta(seconds=timeout)
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return timeout
    raise ValueError(
        "timeout: expected more than 0 seconds, as a number or a datetime.timedelta, or None, "
        f"got {short_repr(timeout)}. Leave it out for torch's default, half an hour with gloo."
    )
