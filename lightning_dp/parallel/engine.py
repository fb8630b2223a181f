"""THE FLOW: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`Engine.step` is all of it. What runs on a replica, and what becomes of its result, is a
`ReplicaCall`: those of `step`, `manual` and `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import (
    Inferred,
    Override,
    SampleDims,
    Scalars,
    Shards,
    StepDims,
    bring,
    cut_for,
    gather,
    infer_for,
    sample_costs,
    warn_of_nothing_to_cut,
)
from lightning_dp.parallel.call import PLAIN, PlainTransfer, ReplicaCall, StepContext, Transfer
from lightning_dp.parallel.gradients import (
    Buffers,
    JointBackward,
    Reducer,
    Snapshot,
    Spread,
    backward_at_once,
    reduce_gradients,
)
from lightning_dp.parallel.links import Ahead, host_waits_for
from lightning_dp.parallel.meter import Meter
from lightning_dp.parallel.ranges import InRanges, Ranges
from lightning_dp.parallel.replicas import BufferCopies, ReplicaRules, Replicas, limits_norms
from lightning_dp.parallel.split import Plan, Planner, Sizes, SplitPolicy
from lightning_dp.parallel.torch_private import is_profiling
from lightning_dp.parallel.workers import Calls, Executor, ExecutorName, fewest_samples

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class Engine:
    """Runs something on all replicas of a module, each on its shard of the batch.

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
        overlap: whether gradients leave devices while the backward runs.
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
        stays = self.meter.is_by_counts if overlap and not self.on_cpu else None
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
        self._dim, self._columns, self._cost_key = dim, columns, cost_key
        self.dims = SampleDims(dim, overrides, is_told=not self.expects_samples)
        self.join = partial(gather, output_device=output_device, dim=dim, scalars=scalars)
        self._context = context
        self._stale = set(range(len(devices)))

    # The flow

    def step(self, call: ReplicaCall, batch: Any, plan: Plan | None = None) -> Any:
        """One step of all replicas, and what one device would have returned for the whole batch.

        If that is a joint loss, somebody's call of its backward goes on with `backward` here.

        Args:
            call: what runs on a replica, and what becomes of its result.
            batch: as the user's code has it; or `Shards`, which are cut already.
            plan: sizes that were decided already; samples beyond their sum are left out.
        """
        do = self.stages
        if not isinstance(batch, Shards):
            dims = self.dims[call.name, call.training]
            plan = plan or do.plan(batch, call.path, training=call.training, telling=dims.asks)
            batch = do.scatter(batch, call.transfer, plan, dims)
        modules = do.replicate(call, batch)
        outputs = do.apply(call, modules, batch)
        return do.gather(call, outputs, batch)

    def backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        """What the backward of a joint loss does: every replica's own, then the sums."""
        self.interrupted = gradient
        spread = None
        self.reducer.before_backward(joint, can_fail=not self.on_cpu)
        if self.on_cpu and not joint.crosses:
            # A backward for each replica: on the calling thread they would queue.
            tasks = joint.tasks(gradient, keep_graph, self.devices, self.reducer.before_last)
            self.executor.run(joint.name, tasks, goes_on=True)
            self.meter.add(tasks)
            spread = self.executor.spreading(joint.name)
        else:
            during = self.meter.working([graph.replica for graph in joint.graphs])
            backward_at_once(joint.graphs, gradient, keep_graph, during=during)
        self.meter.stop()
        self.stages.reduce(spread)
        self.planner.record_success(training=True)
        self.interrupted = None

    # Its stages

    @property
    def stages(self) -> Engine:
        """Whose methods they are: the engine, or while a profiler listens what tells it of them."""
        return cast(Engine, InRanges(self, self.ranges)) if self.is_heard else self

    @property
    def is_heard(self) -> bool:
        """Whether a profiler is told of stages."""
        return self.ranges.profile is not None or is_profiling()

    def plan(
        self, batch: Any, path: str = "", *, training: bool = True, telling: bool = False
    ) -> Plan:
        """Decides which samples each device gets, once for everything in the batch.

        A module may say by a method `batch_size(batch)` how many samples there are. If they are to
        be `telling`, shards are unequal, which shows what counts samples. The submodule `path` is
        called: batch norm in it takes no shard of one sample.
        """
        self.planner.learn(self.meter.latest)
        self.forget_step()
        n, reading = infer_for(self.asked, batch, self._dim, columns=self._columns)
        if n is None and self.expects_samples:
            warn_of_nothing_to_cut(self._dim)
        if not n:
            return self.planner.whole()
        costs = partial(sample_costs, self.asked, batch, n, self._cost_key)
        least = partial(fewest_samples, self.module, path)
        return self.planner.plan(
            n, costs, training=training, reading=reading, telling=telling, least=least
        )

    def scatter(
        self,
        batch: Any,
        transfer: Transfer = PLAIN,
        plan: Plan | None = None,
        dims: StepDims | None = None,
    ) -> Shards:
        """Cuts a batch and moves each shard to its device.

        A batch in which there is nothing to cut goes to the root alone. A module may cut itself, by
        a method `split_batch(batch, sizes)` that returns one shard for each of the sizes.
        """
        dims = dims or self.dims["", True]
        plan = plan or self.plan(batch, telling=dims.asks)
        if plan.whole:
            return Shards(plan.sizes, [transfer(batch, self.devices[0])], whole=True, dims=dims)
        sizes = (*plan.sizes, plan.left_out) if plan.left_out else plan.sizes
        inferred = Inferred(sum(sizes), plan.reading)
        parts = cut_for(self.asked, batch, inferred, sizes, self._dim, plan.order)
        if self.ahead is not None and isinstance(transfer, PlainTransfer):
            parts = [part if size else None for part, size in zip(parts, plan.sizes, strict=False)]
            parts = bring(parts, self.devices, self.ahead)
        cut_parts = zip(parts, plan.sizes, self.devices, strict=False)
        moved = [transfer(part, device) if size else None for part, size, device in cut_parts]
        return Shards(plan.sizes, moved, order=plan.order, dims=dims)

    def replicate(self, call: ReplicaCall, shards: Shards) -> list[nn.Module]:
        """The replicas, up to date on the devices that have samples."""
        self.reducer.settle(trains=call.training)
        self.forget_step()
        buffers: BufferCopies = "changed"
        if call.training:
            buffers = "read" if self.reducer.root_keeps_its_buffers(shards) else "all"
            if self.snapshot is not None:
                self.snapshot.take(self.replicas.root_buffers)
        stale = self._stale.intersection(shards.active)
        copied = "all" if stale else call.copied_parameters
        self.replicas.refresh(shards.active, parameters=copied, buffers=buffers)
        self._stale -= stale
        compiles = self.replicas.compiled.may_come
        in_threads = self.executor.choose(call.name, len(shards.active), compiles=compiles)
        if call.training:
            # Where no two backwards run at once, they accumulate into the root's own gradients.
            self.replicas.share_parameters(call.has_backward and not in_threads)
        return self.replicas.modules

    def apply(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> list[Any]:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes = shards.sizes
        training = call.training
        if shards.dims.asks:
            shards.dims.has_seen(shards.sizes)
        self.calls = Calls(shards.active_sizes, shards.active_order, self._dim, self.world)
        call.begin(shards)
        if training and not shards.whole:
            self.meter.start(shards.sizes)
        context = self._context(self.replicas, call.name, shards, self.is_rerun)
        noticed = self.replicas.noticed(shards.active) if training else nullcontext()
        with context, noticed, self.replicas.compiled.around_calls():
            tasks = call.tasks(modules, shards, self.devices)
            if self.meter.is_watched:
                self.meter.follow(tasks)
            outputs = self.executor.run(call.name, tasks, goes_on=True, calls=self.calls)
            if self._sends_home and call.gathers:  # what replicas have logged has left already
                outputs = call.leave(outputs, self.devices)
                host_waits_for(*self.devices)
            outputs = outputs if self.world is None else call.tell(outputs, shards)
        if training:
            self.reducer.after_forward(shards)
            self.meter.count(shards.sizes, call.name, in_turns=self.calls.one_by_one)
            self.meter.add(tasks)
        else:
            self.replicas.adopt_rows(shards.active)
        if training and not call.has_backward:
            self.meter.stop()
        return outputs

    def gather(self, call: ReplicaCall, outputs: list[Any], shards: Shards) -> Any:
        """What one device would have returned for the whole batch, on the output device."""
        result = call.gather(outputs, shards)
        if not call.has_backward:
            self.planner.record_success(training=call.training)
        return result

    def reduce(self, spread: Spread | None = None) -> None:
        """The sums of the replicas' gradients become the root's."""
        self.reducer.after_backward(spread)

    # Around it

    def forget_step(self) -> None:
        """From here on there is nothing to undo."""
        self.meter.keep()
        if self.snapshot is not None:
            self.snapshot.drop()

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.reducer.resync()
        self._stale = set(range(len(self.devices)))

    def close(self) -> None:
        """Ends the workers, and reads the devices' peaks of memory since the engine was made."""
        self.reducer.close()
        self.executor.close()
        self.ahead = None
        self.meter.read_peaks()
