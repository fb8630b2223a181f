"""The flow of one step: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`Engine.step` and `Engine.backward` are all of it. What runs on a replica, and how the results are
joined, is a `ReplicaCall`: those of `step` and `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_dp.parallel.apply import (
    Calls,
    Executor,
    ExecutorName,
    KeptMemory,
    Task,
    fewest_samples,
)
from lightning_dp.parallel.call import PLAIN, ReplicaCall, StepContext, Transfer
from lightning_dp.parallel.comm import host_waits_for
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.gather import Override, RowRules, Scalars, gather
from lightning_dp.parallel.reduce import (
    Buffers,
    JointBackward,
    ParallelFor,
    Reducer,
    Snapshot,
    backward_at_once,
    reduce_gradients,
)
from lightning_dp.parallel.replicate import BufferCopies, ReplicaRules, Replicas
from lightning_dp.parallel.scatter import (
    Inferred,
    Shards,
    cut_for,
    infer_for,
    sample_costs,
    warn_of_nothing_to_cut,
)
from lightning_dp.parallel.split import Plan, Planner, Sizes, SplitPolicy
from lightning_dp.parallel.torch_private import is_in_backward, is_profiling
from lightning_dp.parallel.usage import UsageMeter

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

STAGES = ("plan", "scatter", "replicate", "apply", "gather", "reduce")


class Engine:
    """Runs calls on all replicas of a module, each on its shard of the batch.

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
        timeout: how long replicas wait in a collective for one that does not come.

    Attributes:
        asked: the module whose `batch_size`, `split_batch` and `sample_cost` are called.
        last_sizes: samples per device in the latest `apply`.
        interrupted: gradient of the joint loss whose backward has not ended.
        before_replica: called before each replica's call.
        profile: enters a range of a Trainer's profiler by its name.
        is_rerun: whether the step runs again after out of memory; replicas then leave behind
            nothing but outputs, gradients and buffers.
    """

    expects_samples: ClassVar[bool] = False  # a batch is cut, and not the arguments of some call
    frozen_may_change = True  # code between steps may write to parameters that are not trained

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
        timeout: timedelta | None = None,
    ) -> None:
        self.module = self.asked = module
        self.devices, self.output_device, self.world = list(devices), output_device, world
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.accelerators = [d for d in (*devices, output_device) if d.type != "cpu"]
        self.last_sizes: Sizes = ()
        self.interrupted: Tensor | None = None
        self.before_replica: Callable[[], object] | None = None
        self.profile: Callable[[str], AbstractContextManager[None]] | None = None
        self.is_rerun = self._compiles = False
        self.replicas = Replicas(module, devices, rules, reduce_gradients)
        self.meter = UsageMeter(devices, None if world is None else world.rank)
        is_timed = self.meter.is_by_counts if overlap and not self.on_cpu else None
        self.reducer = Reducer(self.replicas, buffers, self.devices, is_timed, world)
        self.calls = Calls()  # of the replicas, in the latest apply
        self.planner = Planner(len(devices), split)
        if self.planner.learns:
            self.meter.watch()
        self.snapshot = None if self.on_cpu else Snapshot()
        # Two threads would limit the norm of the same row of a weight twice.
        in_order = self.on_cpu and bool(self.replicas.limited)
        how: ExecutorName = "inorder" if in_order else executor
        seconds = Calls.timeout if timeout is None else timeout.total_seconds()
        self.executor = Executor(devices, how, self.replicas.lose, self.meter.names, seconds)
        self.row_rules = RowRules(dim, overrides or {})
        self.join = partial(gather, output_device=output_device, dim=dim, scalars=scalars)
        self._kept_memory = KeptMemory() if self.on_cpu else None
        self._dim, self._columns, self._cost_key = dim, columns, cost_key
        self._context = context
        self._to_host = output_device.type == "cpu" and not self.on_cpu
        self._stale = set(range(len(devices)))  # replicas that get everything at their next step

    # One step

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """A step of a batch, which may have been cut already; out of memory leads to `recover`."""
        try:
            return self.step(call, batch if shards is None else shards)
        except torch.OutOfMemoryError as error:
            return self.recover(call, batch, error)

    def step(self, call: ReplicaCall, batch: Any) -> Any:
        """Runs a call on all replicas; returns what one device would for the whole batch.

        If that is a joint loss, its backward calls `backward` here.

        Args:
            call: what runs on a replica, and how results are joined.
            batch: as the user's code has it; or `Shards`, which are cut already.
        """
        if (self.profile is not None or is_profiling()) and "apply" not in vars(self):
            with self._in_ranges():
                return self.step(call, batch)
        if not isinstance(batch, Shards):
            plan = self.plan(batch, call.path, training=call.training)
            batch = self.scatter(batch, call.transfer, plan)
        modules = self.replicate(call, batch)
        outputs = self.apply(call, modules, batch)
        return self.gather(call, outputs, batch)

    def backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        """The backward of a joint loss: every replica's, then the sums of their gradients."""
        self.interrupted = gradient
        parallel_for = None  # where workers have run the backwards, they also add up
        self.reducer.before_backward(joint, can_fail=not self.on_cpu)
        try:
            if self.on_cpu and not joint.crosses:
                # One backward per replica: on the calling thread they would queue.
                tasks = joint.tasks(gradient, keep_graph, self.devices)
                self.executor.run(joint.name, tasks, continues_previous=True)
                self.meter.add_seconds(tasks)
                parallel_for = self.executor.parallel_for(joint.name)
            else:
                during = self.meter.working([graph.replica for graph in joint.graphs])
                backward_at_once(joint.graphs, gradient, keep_graph, during=during)
            if self.meter.is_watched:
                self.meter.stop()
            if self.profile is not None or is_profiling():
                with self._in_ranges():
                    self.reduce(parallel_for)
            else:
                self.reduce(parallel_for)
        except BaseException:
            self.reducer.fail()
            raise
        self.interrupted = None

    def recover(self, call: ReplicaCall, batch: Any, error: torch.OutOfMemoryError) -> Any:
        """What `run` returns where a step ran out of memory; see `RecoveringEngine`."""
        raise error

    # Its stages

    def plan(self, batch: Any, path: str = "", *, training: bool = True) -> Plan:
        """Decides which samples each device gets, once for everything in the batch.

        Args:
            batch: the batch; the module's `batch_size(batch)` may say how many samples it has.
            path: the submodule that is called; batch norm in it takes no shard of one sample.
            training: whether it is a training step.
        """
        if self.meter.is_watched:
            self.planner.learn(self.meter.latest())  # reads it, too: unread steps are dropped
        n, reading = infer_for(self.asked, batch, self._dim, columns=self._columns)
        if n is None and self.expects_samples:
            warn_of_nothing_to_cut(self._dim)
        if not n:
            return self.planner.whole()
        costs = partial(sample_costs, self.asked, batch, n, self._cost_key)
        least = partial(fewest_samples, self.module, path)
        return self.planner.plan(n, costs, training=training, reading=reading, least=least)

    def scatter(self, batch: Any, transfer: Transfer = PLAIN, plan: Plan | None = None) -> Shards:
        """Cuts a batch and moves each shard to its device.

        A batch without anything to cut goes to the root alone. The module may cut itself, by a
        method `split_batch(batch, sizes)` that returns one shard for each of the sizes.
        """
        plan = plan or self.plan(batch)
        if plan.whole:
            parts = [transfer(batch, self.devices[0])]
        else:
            inferred = Inferred(sum(plan.sizes), plan.reading)
            parts = list(cut_for(self.asked, batch, inferred, plan.sizes, self._dim, plan.order))
            for k, device in enumerate(self.devices):
                parts[k] = transfer(parts[k], device) if plan.sizes[k] else None
        order, rules = plan.order, self.row_rules
        return Shards(plan.sizes, parts, whole=plan.whole, order=order, row_rules=rules)

    def replicate(self, call: ReplicaCall, shards: Shards) -> list[nn.Module]:
        """Copies what has changed on the root to the active replicas; returns all replicas."""
        self.reducer.settle(trains=call.training)
        self.commit()
        buffers: BufferCopies = "changed"
        if call.training:
            buffers = "read" if self.reducer.root_keeps_its_buffers(shards) else "all"
            if self.snapshot is not None:
                self.snapshot.take(self.replicas.root_buffers)
        stale = self._stale.intersection(shards.active)
        copied = "all" if stale else call.copied_parameters
        self.replicas.refresh(shards.active, parameters=copied, buffers=buffers)
        self._stale -= stale
        self._compiles = self.replicas.compiled.are_known
        in_threads = self.executor.choose(call.name, len(shards.active), compiles=self._compiles)
        if call.training:
            # Where no two backwards run at once, they accumulate into the root's gradients.
            self.replicas.share_parameters(call.has_backward and not in_threads)
        return self.replicas.modules

    def apply(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> list[Any]:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes = shards.sizes
        self.calls = calls = Calls(shards.active_sizes, shards.active_order, self._dim, self.world)
        call.begin(shards)
        if call.training and self.meter.is_watched and not shards.whole:
            self.meter.start(shards.sizes)
        compiled = self.replicas.compiled
        compiling = compiled.as_often() if self._compiles else nullcontext()
        num_compiled = compiled.counts()["total"]
        try:
            # Records what replicas do to metrics, logs and lists.
            with self._context(self.replicas, call.name, shards, self.is_rerun), compiling:
                tasks = []
                for k in shards.active:
                    run = partial(call.on_replica, modules[k], shards.parts[k])
                    if self.before_replica is not None:
                        run = partial(_after, self.before_replica, run)
                    place = partial(shards.place, call.name, k)
                    tasks.append(Task(k, self.devices[k], run, place))
                if call.training and self.meter.is_watched:
                    self.meter.follow(tasks)
                outputs = self.executor.run(call.name, tasks, continues_previous=True, calls=calls)
                if self._to_host and call.gathers:  # what replicas have logged has left already
                    outputs = call.leave(outputs, self.devices)
                    host_waits_for(*self.devices)
                if self.world is not None:
                    outputs = call.exchange_losses(outputs, shards)
        except BaseException:
            if not is_in_backward():  # where a checkpoint ends its recomputation by an exception
                self.replicas.fail()
            raise
        if compiled.counts()["total"] != num_compiled:  # of functions that were not known
            compiled.are_known = True
        if call.training:
            self.reducer.after_forward(shards)
            self.meter.add_forward(call.name, shards.sizes, in_turns=calls.one_by_one)
            self.meter.add_seconds(tasks)
            if not call.has_backward:
                self.meter.stop()
        elif self.replicas.limited:
            self.replicas.adopt_rows(shards.active)
        return outputs

    def gather(self, call: ReplicaCall, outputs: list[Any], shards: Shards) -> Any:
        """What one device would have returned for the whole batch, on the output device."""
        return call.gather(outputs, shards)

    def reduce(self, parallel_for: ParallelFor | None = None) -> None:
        """Adds the replicas' gradients to the root's."""
        self.reducer.after_backward(parallel_for)

    # Around it

    def count_samples(self, batch: Any) -> int | None:
        """How many samples a batch has; None if there is nothing to cut."""
        return infer_for(self.asked, batch, self._dim, columns=self._columns).size

    def cut(self, batch: Any, sizes: Sizes) -> list[Any]:
        """A batch in parts of these sizes, where it is; None for a size of 0."""
        inferred = infer_for(self.asked, batch, self._dim, columns=self._columns)
        return cut_for(self.asked, batch, inferred, sizes, self._dim)

    def profiler_range(self, name: str) -> AbstractContextManager[Any]:
        """A range of `torch.profiler` and of the Trainer's profiler, if they record."""
        stack = ExitStack()
        if is_profiling():
            stack.enter_context(record_function(name))
        if self.profile is not None:
            stack.enter_context(self.profile(name))
        return stack

    def _in_ranges(self) -> AbstractContextManager[None]:
        """Makes each stage a profiler range `lightning_dp.<its name>`."""

        def in_range(name: str, stage: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.profiler_range(f"lightning_dp.{name}"):
                return stage(*args, **kwargs)

        return replaced(
            self, **{name: partial(in_range, name, getattr(self, name)) for name in STAGES}
        )

    def commit(self) -> None:
        """The latest step will not be undone."""
        self.meter.commit()
        if self.snapshot is not None:
            self.snapshot.drop()

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.reducer.settle()
        self._stale = set(range(len(self.devices)))

    def close(self) -> None:
        """Ends the workers, gives kept memory back, and reads the devices' peaks of memory."""
        self.reducer.close()
        self.executor.close()
        if self._kept_memory is not None:
            self._kept_memory.close()
        self.meter.read_peaks()


def _after(before: Callable[[], object], call: Callable[[], Any]) -> Any:
    before()
    return call()
