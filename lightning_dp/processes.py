"""Several processes, as Lightning has them: each rank has devices and loads its slice of a batch.

torchrun, SLURM or another of Lightning's cluster environments starts the processes, gives each its
rank, and ends all of them when one fails. With one process, the usual case, the rank is 0 and the
world size 1. Here are the ranks with their devices and process group (`ProcessesMixin`), and the
samples of each batch that a rank loads (`RankLoader`).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_dp.lightning_private import is_index_sampler, join_process_group, running_hook
from lightning_dp.parallel.apply import collectives, current_participant, fewest_samples
from lightning_dp.parallel.checks import expected
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.replicate import refuse_limited_norms
from lightning_dp.parallel.split import Sizes, even, fitted, weighted

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    from lightning_dp.parallel.processes import World
else:
    # `lightning` and `pytorch_lightning` have one ParallelStrategy each: the class that mixes this
    # one in chooses.
    ParallelStrategy = object


def check_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Returns the option as a timedelta, or raises a ValueError."""
    if isinstance(timeout, int | float) and timeout is not True and 0 < timeout < 1e9:
        timeout = timedelta(seconds=timeout)
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return timeout
    wanted = "more than 0 seconds, as a number or a datetime.timedelta, or None"
    raise expected("timeout", wanted, timeout, "Leave it out for torch's default, half an hour.")


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
        size, nodes, devices = self.world_size, self.num_nodes, self.machine_devices or []
        if size == nodes == 1:
            return
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size // nodes))  # processes on this machine
        if here * nodes != size or self.local_rank >= here:
            wanted = f"the number of machines that torchrun or srun started {size} processes on"
            raise expected("num_nodes", wanted, nodes, "Set Trainer(num_nodes=...).")
        cast(Any, rank_zero_only).rank = self.global_rank
        if len(devices) < here:
            wanted = f"at least {here}, one for each of this machine's processes"
            raise expected("devices", wanted, devices, "Name more, or start fewer processes.")
        ends = [0, *accumulate(even(len(devices), here))]
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
        join_process_group(self.cluster_environment, backend, timeout=self._timeout)
        self.world = World(self.global_rank, self.world_size, timeout=self._timeout)
        self._shares = self.world.all_gather_objects(self.share)

    def __getstate__(self) -> dict[str, Any]:
        """A copy joins the processes when it is set up."""
        return {**super().__getstate__(), "world": None}

    def begin_together(self, world: World, options: Mapping[str, Any]) -> None:
        """Checks that all processes have the same options, and gives them rank 0's module."""
        own = [f"{n}={getattr(v, '__qualname__', None) or repr(v)}" for n, v in options.items()]
        for values in zip(*world.all_gather_objects(own), strict=True):
            if len(set(values)) > 1:
                raise expected("DataParallelStrategy", "the same options in all processes", values)
        module = cast(nn.Module, self.lightning_module)
        refuse_limited_norms([*module.modules()])
        world.broadcast_tensors({**dict(module.named_parameters()), **dict(module.named_buffers())})
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
        module = cast(nn.Module, self.lightning_module)

        def sizes(n: int) -> Sizes:
            shares = weighted(n, self._shares)
            return fitted(shares, None, fewest_samples(module)) or shares  # as batch norm needs

        return RankLoader(dataloader, sizes, self.world)

    @property
    def is_distributed(self) -> bool:
        """Whether a hook runs in several processes: `self.log(..., sync_dist=True)` then syncs.

        False elsewhere, and in `on_fit_start` (LearningRateFinder): with True Lightning would
        give DataLoaders a DistributedSampler.
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
        hook = (None if module is None else running_hook(module)) or ""
        # A rank with an empty slice has samples of other batches: its part of an epoch counts.
        of_batches = ("batch", "step", "backward", "zero_grad", "gradient")
        is_left_out = world.is_idle and any(word in hook for word in of_batches)
        sent = None if is_left_out else tensor
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
        """The global batch's tensor, without a new dimension.

        In a step gradients flow through it; outside, the tensors of all ranks have no graph.
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


# Slices: each rank loads only its own samples of every batch


class Slice(NamedTuple):
    """This rank's part of a batch. An empty one has samples of other ranks in `batch`.

    The rank runs the step with these, so that it takes part in all exchanges; their results are
    left out.
    """

    batch: Any
    is_empty: bool


class RankLoader:
    """Replaces the user's DataLoader in a Trainer: yields this rank's slice of every batch.

    The batch of a DataLoader is the global batch, as on one device. Rank 0 draws the indices of
    each batch for all, so any sampler works and all random numbers come from one source. Each rank
    then loads its slice, whose size `sizes` says, given the batch's. No sample is padded, repeated
    or dropped. Every other attribute is that of the user's loader.
    """

    def __init__(self, loader: Any, sizes: Callable[[int], Sizes], world: World) -> None:
        if isinstance(loader, RankLoader):  # Lightning hands a CombinedLoader's loaders in again
            loader = loader.loader
        _check_loader(loader)
        self.loader: DataLoader[Any] = loader
        self._are_empty: deque[bool] = deque()  # of slices drawn, but not yielded yet
        self._own = object.__new__(type(loader))
        # Past DataLoader.__setattr__, which refuses a new batch_sampler; without the iterator that
        # holds persistent workers.
        kept = {n: v for n, v in vars(loader).items() if not isinstance(v, Iterator)}
        sampler = _SliceSampler(loader.batch_sampler, sizes, world, self._are_empty)
        vars(self._own).update(kept, in_order=True, batch_sampler=sampler)

    def __len__(self) -> int:
        """The number of global batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Slice]:
        """One slice for each batch."""
        self._are_empty.clear()
        for batch in self._own:
            yield Slice(batch, self._are_empty.popleft())

    def __getattr__(self, name: str) -> Any:
        """Of the user's loader."""
        return getattr(self.loader, name)


@dataclass
class _SliceSampler:
    """The indices of this rank's slices: the `batch_sampler` of a copied DataLoader."""

    sampler: Any
    sizes: Callable[[int], Sizes]
    world: World
    are_empty: deque[bool]

    def __iter__(self) -> Iterator[list[Any]]:
        rank, drawn = self.world.rank, iter(self.sampler if self.world.rank == 0 else ())
        notes = is_index_sampler(self.sampler)  # it notes the indices of `predict` for writers
        if notes:
            self.sampler.seen_batch_indices = []
        for number in count():
            indices = self.world.broadcast(next(drawn, None))
            if indices is None:
                return
            indices = list(indices)
            ends = [0, *accumulate(self.sizes(len(indices)))]
            own = indices[ends[rank] : ends[rank + 1]]
            if notes:
                self.sampler.seen_batch_indices[number:] = [own]
            self.are_empty.append(not own)
            yield own or indices[:2]  # batch norm needs two samples


def open_slices(batch: Any) -> tuple[Any, bool]:
    """A batch without its `Slice`, and whether this rank's slice is empty.

    Batches of several DataLoaders come in lists or dicts.
    """
    are_empty: list[bool] = []

    def opened(part: Slice) -> Any:
        are_empty.append(part.is_empty)
        return part.batch

    batch = apply_to_collection(batch, Slice, opened)
    if len(set(are_empty)) > 1:
        wanted = "each process to have samples of all loaders' batches or of none"
        hint = "True stands for no samples. Set drop_last=True, or use larger batches."
        raise expected("DataLoaders", wanted, are_empty, hint)
    return batch, any(are_empty)


def _check_loader(loader: Any) -> None:
    """Refuses loaders whose samples have no indices that the ranks could share out."""
    dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    samplers = [getattr(part, "sampler", None) for part in (loader, batches)]
    is_torchs = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    has_indices = batches is not None and not isinstance(dataset, IterableDataset)
    if is_torchs and has_indices and all(getattr(s, "num_replicas", 1) == 1 for s in samplers):
        return
    parts = [type(part).__name__ for part in (loader, dataset, *samplers) if part is not None]
    raise TypeError(
        "Expected torch's DataLoader in several processes, with a map-style data set, a batch size "
        "and no sampler that shares samples out itself, as each process loads its slice of a batch "
        f"by indices, got {', '.join(parts)}. Use such a loader, or one process, which can have "
        "all devices of the machine."
    )
