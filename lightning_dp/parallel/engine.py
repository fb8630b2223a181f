"""THE FLOW: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`Engine.step` is all of it. What runs on a replica, and what becomes of its result, is a
`ReplicaCall`: those of `step`, `manual` and `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import (
    Inferred,
    Shards,
    StepDims,
    bring,
    cut_for,
    infer_for,
    sample_costs,
    warn_of_nothing_to_cut,
)
from lightning_dp.parallel.call import PLAIN, PlainTransfer, ReplicaCall, Transfer
from lightning_dp.parallel.gradients import JointBackward, Spread, backward_at_once
from lightning_dp.parallel.likely_cause import LikelyCause
from lightning_dp.parallel.links import host_waits_for
from lightning_dp.parallel.parts import Parts
from lightning_dp.parallel.ranges import InRanges
from lightning_dp.parallel.replicas import BufferCopies
from lightning_dp.parallel.split import Plan
from lightning_dp.parallel.torch_private import is_profiling
from lightning_dp.parallel.workers import Calls, Task, fewest_samples


class Engine(Parts):
    """Runs something on all replicas of a module, each on its shard of the batch; see `Parts`."""

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """A step of a batch, which may have been cut already; see `recover`."""
        try:
            return self.step(call, batch if shards is None else shards)
        except torch.OutOfMemoryError as error:
            return self.recover(call, batch, error)

    def recover(self, call: ReplicaCall, batch: Any, error: torch.OutOfMemoryError) -> Any:
        """What `run` returns where a step ran out of memory; an engine that can runs it again."""
        raise error

    def step(self, call: ReplicaCall, batch: Any, plan: Plan | None = None) -> Any:
        """One step of all replicas, and what one device would have returned for the whole batch.

        If that is a joint loss, somebody's call of its backward goes on with `backward` here.

        Args:
            call: what runs on a replica, and what becomes of its result.
            batch: as the user's code has it; or `Shards`, which are cut already.
            plan: sizes that were decided already; samples beyond their sum are left out.
        """
        stages, training = self.stages, call.training
        if not isinstance(batch, Shards):
            dims = self.dims[call.name, training]
            asks = dims.asks or call.asks
            plan = plan or stages.plan(batch, call.path, training=training, telling=asks)
            batch = stages.scatter(batch, call.transfer, plan, dims)
        modules = stages.replicate(call, batch)
        outputs = stages.apply(call, modules, batch)
        return stages.gather(call, outputs, batch)

    def backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        """What the backward of a joint loss does: every replica's own, then the sums."""
        self.interrupted = gradient
        self.reducer.before_backward(joint, can_fail=not self.on_cpu)
        try:
            spread = self._backwards(joint, gradient, keep_graph)
            self.stages.reduce(spread)
        except BaseException:
            self.reducer.fail()
            raise
        if not self.planner.is_recorded:
            self.planner.record_success(training=True)
        self.interrupted = None

    def _backwards(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> Spread | None:
        """Every replica's own; then the workers may add up."""
        spread = None
        if self.on_cpu and not joint.crosses:
            # A backward for each replica: on the calling thread they would queue.
            tasks = joint.tasks(gradient, keep_graph, self.devices, self.reducer.before_last)
            self.executor.run(joint.name, tasks, goes_on=True)
            self._count_work(tasks)
            spread = self.executor.spreading(joint.name)
        else:
            during = self.meter.working([graph.replica for graph in joint.graphs])
            backward_at_once(joint.graphs, gradient, keep_graph, during=during)
        if self.meter.steps is not None:
            self.meter.steps.stop()
        return spread

    # Its stages

    @property
    def stages(self) -> Engine:
        """This engine; while a profiler listens, with methods that are ranges to it."""
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
        if self.meter.steps is not None:
            self.planner.learn(self.meter.latest)  # also reads it: unread steps would be dropped
        self.forget_step()
        n, reading = infer_for(self.asked, batch, self._dim, columns=self._columns)
        kind = (n, reading, path, training)
        if kind == self.planner.repeated and not telling:
            return self.planner.latest
        if n is None and self.expects_samples:
            warn_of_nothing_to_cut(self._dim)
        if not n:
            return self.planner.whole()
        costs = partial(sample_costs, self.asked, batch, n, self._cost_key)
        least = partial(fewest_samples, self.module, path)
        plan = partial(self.planner.plan, n, costs, least=least, kind=kind)
        return plan(training=training, reading=reading, telling=telling)

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
        late = call.may_begin_early and self._overlaps
        self.replicas.refresh(shards.active, parameters=copied, buffers=buffers, late=late)
        self._stale -= stale
        compiles = self.replicas.may_compile
        in_threads = self.executor.choose(call.name, len(shards.active), compiles=compiles)
        if call.training:
            # Where no two backwards run at once, they accumulate into the root's own gradients.
            self.replicas.share_parameters(call.has_backward and not in_threads)
        return self.replicas.modules

    def apply(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> list[Any]:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes = shards.sizes
        training, steps = call.training, self.meter.steps if call.training else None
        if shards.dims.asks:
            shards.dims.has_seen(shards.sizes)
        self.calls = Calls(shards.active_sizes, shards.active_order, self._dim, self.world)
        call.begin(shards)
        if steps is not None and not shards.whole:
            steps.start(shards.sizes)
        context = self._context(self.replicas, call.name, shards, self.is_rerun)
        noticed = self.replicas.noticed(shards.active, training=training)
        compiles = self.replicas.may_compile
        compiled = self.replicas.compiled
        compiling = compiled.as_often() if compiles else nullcontext()
        before = compiled.counts()["total"]
        with context, noticed, compiling:
            tasks = self._tasks(call, modules, shards)
            if steps is not None:
                steps.follow(tasks)
            outputs = self.executor.run(call.name, tasks, goes_on=True, calls=self.calls)
            if self.replicas.are_late:
                self.replicas.arrive()
            if self._sends_home and call.gathers:  # what replicas have logged has left already
                outputs = call.leave(outputs, self.devices)
                host_waits_for(*self.devices)
            outputs = outputs if self.world is None else call.tell(outputs, shards)
        if compiled.counts()["total"] != before:  # by functions that nobody knew of
            compiled.are_known = True
        if training:
            self.reducer.after_forward(shards)
            self._count_samples(call, shards)
            self._count_work(tasks)
        else:
            self.replicas.adopt_rows(shards.active)
        if steps is not None and not call.has_backward:
            steps.stop()
        return outputs

    def _tasks(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> list[Task]:
        """The calls of the replicas that work."""
        tasks = []
        for k in shards.active:
            own = partial(call.on_replica, modules[k], shards.parts[k])
            place = partial(shards.place, call.name, k)
            cause = LikelyCause(modules[k], self.devices[k], shards, k)
            tasks.append(Task(k, self.devices[k], own, place, cause))
        return tasks

    def _count_samples(self, call: ReplicaCall, shards: Shards) -> None:
        """A training step's forward is done."""
        self.meter.kind, self.meter.counted = call.name, shards.sizes
        for usage, size in zip(self.meter.usage, shards.sizes, strict=True):
            usage.samples += size
        if self.meter.steps is not None:
            self.meter.steps.note(in_turns=self.calls.one_by_one)

    def _count_work(self, tasks: Sequence[Task]) -> None:
        """The workers spent their seconds in these calls."""
        for task in tasks:
            self.meter.usage[task.replica].busy_seconds += task.seconds
            if self.meter.steps is not None:
                self.meter.steps.add(task.replica, task.seconds)

    def gather(self, call: ReplicaCall, outputs: list[Any], shards: Shards) -> Any:
        """What one device would have returned for the whole batch, on the output device."""
        result = call.gather(outputs, shards)
        if not call.has_backward and not self.planner.is_recorded:
            self.planner.record_success(training=call.training)
        return result

    def reduce(self, spread: Spread | None = None) -> None:
        """The sums of the replicas' gradients become the root's."""
        self.reducer.after_backward(spread)

    # Around it

    def forget_step(self) -> None:
        """From here on there is nothing to undo."""
        self.meter.counted = ()
        if self.snapshot is not None:
            self.snapshot.drop()
