"""What an engine is made of, and how that begins and ends; what it does is `engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Override, SampleDims, Scalars, gather
from lightning_dp.parallel.call import StepContext
from lightning_dp.parallel.gradients import Buffers, Reducer, Snapshot, reduce_gradients
from lightning_dp.parallel.links import Ahead
from lightning_dp.parallel.meter import Meter
from lightning_dp.parallel.ranges import Ranges
from lightning_dp.parallel.replicas import ReplicaRules, Replicas, limits_norms
from lightning_dp.parallel.split import Planner, Sizes, SplitPolicy
from lightning_dp.parallel.workers import Calls, Executor, ExecutorName, KeptMemory

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class Parts:
    """What an engine has from its beginning to its end.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        output_device: where gathered outputs end up.
        split: how many samples each device gets.
        dim: the dimension along which batches are cut and outputs joined.
        columns: whether lists are containers of columns whatever is in them.
        cost_key: the batch's entry that holds costs; None to ask the module, see `sample_costs`.
        buffers: which buffers the root keeps after a training step, see `reduce_buffers`.
        executor: how the replicas run, see `Executor`.
        scalars, overrides: how 0-dim outputs and those under certain keys are gathered.
        rules: how special submodules are replicated.
        context: entered around every apply, for what replicas leave behind besides outputs.
        overlap: whether gradients leave devices while the backward runs, and parameters come while
            the forward does.
        world: the processes that train together; None if this is the only one.
    """

    expects_samples: ClassVar[bool] = False  # what is cut is a batch, not some call's arguments
    last_sizes: Sizes = ()  # samples per device in the latest apply
    interrupted: Tensor | None = None  # of the joint loss whose backward has not ended

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        output_device: torch.device,
        split: SplitPolicy,
        dim: int = 0,
        columns: bool = False,
        cost_key: str | None = None,
        buffers: Buffers = "first",
        executor: ExecutorName = "auto",
        scalars: Scalars = "merge",
        overrides: Mapping[str, Override] | None = None,
        rules: ReplicaRules | None = None,
        context: StepContext = lambda *_: nullcontext(),
        overlap: bool = True,
        world: World | None = None,
    ) -> None:
        self.module = self.asked = module  # which says by its methods how batches are cut
        self.devices = list(devices)
        self.world = world
        self.output_device = output_device
        self.replicas = Replicas(module, devices, rules, reduce_gradients, buffers == "mean")
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.accelerators = [d for d in (*devices, output_device) if d.type != "cpu"]
        self.meter = Meter(devices, None if world is None else world.rank)
        self._overlaps = overlap and not self.on_cpu
        stays = self.meter.is_by_counts if self._overlaps else None
        self.reducer = Reducer(self.replicas, buffers, self.devices, stays)
        if world is not None:
            self.reducer.join(world)
        self.ahead = None if self.on_cpu else Ahead([*devices, output_device])
        self._sends_home = output_device.type == "cpu" and not self.on_cpu
        self.ranges = Ranges()  # the stages, as profilers see them
        self.calls = Calls()  # of the replicas, in the latest apply
        self.planner = Planner(len(devices), split)
        if self.planner.learns:
            self.meter.watch()
        self.snapshot = None if self.on_cpu else Snapshot()
        self.is_rerun = False
        # Two threads would shorten the same row of a weight twice.
        in_order = self.on_cpu and limits_norms(self.module)
        how: ExecutorName = "inorder" if in_order else executor
        self.executor = Executor(devices, how, self.replicas.lose, self.meter.names)
        self._kept = KeptMemory() if self.on_cpu else None
        self._dim, self._columns, self._cost_key = dim, columns, cost_key
        self.dims = SampleDims(dim, overrides, is_told=not self.expects_samples)
        self.join = partial(gather, output_device=output_device, dim=dim, scalars=scalars)
        self._context = context
        self._stale = set(range(len(devices)))

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.reducer.resync()
        self._stale = set(range(len(self.devices)))

    def close(self) -> None:
        """Ends the workers, gives freed memory back, and reads the devices' peaks of memory."""
        self.reducer.close()
        self.executor.close()
        if self._kept is not None:
            self._kept.close()
        self.ahead = None
        self.meter.read_peaks()
