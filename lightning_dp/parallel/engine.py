"""The flow of one step: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`Engine.step` and `Engine.backward` are all of it. What runs on a replica, and how the results are
joined, is a `ReplicaCall`: those of `step` and `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar

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
from lightning_dp.parallel.call import EngineOptions, ReplicaCall, Transfer
from lightning_dp.parallel.comm import synchronize
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.gather import Join, RowRules
from lightning_dp.parallel.out_of_memory import Recovery
from lightning_dp.parallel.reduce import (
    BufferSnapshot,
    JointBackward,
    Reducer,
    reduce_gradients,
    single_threaded,
    wait_for_autograd,
)
from lightning_dp.parallel.replicate import BufferCopies, Replicas
from lightning_dp.parallel.scatter import (
    Inferred,
    Shards,
    cut_for,
    infer_for,
    sample_costs,
    to_device,
    warn_of_nothing_to_cut,
)
from lightning_dp.parallel.split import Plan, Planner, Sizes
from lightning_dp.parallel.torch_private import (
    is_in_backward,
    is_profiling,
    num_compiled_frames,
)
from lightning_dp.parallel.usage import UsageMeter


class Engine:
    """Runs calls on all replicas of a module, each on its shard of the batch.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        fields: those of `EngineOptions`.

    Attributes:
        asked: the module whose `batch_size`, `split_batch` and `sample_cost` are called.
        last_sizes: samples per device in the latest `apply`.
        accumulating: whether the optimizer waits for a later backward.
        before_replica: called before each replica's call.
        profile: enters a range of a Trainer's profiler by its name.
        is_rerun: whether the step runs again after out of memory; replicas then leave behind
            nothing but outputs, gradients and buffers.
    """

    expects_samples: ClassVar[bool] = False  # a batch is cut, and not the arguments of some call
    frozen_may_change = True  # code between steps may write to parameters that are not trained
    accumulating = is_rerun = _compiles = False
    last_sizes: Sizes = ()
    before_replica: Callable[[], object] | None = None
    profile: Callable[[str], AbstractContextManager[None]] | None = None

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], **fields: Any) -> None:
        self.options = options = EngineOptions(**fields)
        self.module = self.asked = module
        self.devices, self.output_device = list(devices), options.output_device
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.accelerators = [d for d in (*devices, options.output_device) if d.type != "cpu"]
        self.world = options.world
        self.planner = Planner(len(devices), options.split)
        self.replicas = Replicas(module, devices, options.rules, reduce_gradients)
        self.reducer = Reducer(self.replicas, self.devices, options.buffers, self.world)
        self.row_rules = RowRules(options.dim, options.overrides or {})
        self.meter = UsageMeter(devices, None if self.world is None else self.world.rank)
        if self.planner.learns:
            self.meter.is_watched = True
        self.calls = Calls()  # of the replicas, in the latest apply
        # nn.Embedding(max_norm=...) rescales rows of its weight in the forward. Replicas on the CPU
        # share that weight, so two threads would rescale a row twice.
        in_order = self.on_cpu and bool(self.replicas.max_norm_embeddings)
        how: ExecutorName = "inorder" if in_order else options.executor
        seconds = Calls.timeout if options.timeout is None else options.timeout.total_seconds()
        self.executor = Executor(devices, how, self.replicas.lose, self.meter.names, seconds)
        self._recovery = Recovery(self.planner, self.devices)
        self._snapshot = BufferSnapshot()
        self._undo: list[Callable[[], None]] = []  # what the present step has left on the root
        self._kept_memory = KeptMemory() if self.on_cpu else None
        self._stale = set(range(len(devices)))  # replicas that get everything at their next step

    # One step

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """Runs a step, and again if it is out of memory; `shards`: the batch, if cut already."""
        try:
            return self.step(call, batch if shards is None else shards)
        except torch.OutOfMemoryError as error:
            attempt = partial(self.step, call, batch)
            return self._recovery.retry(call.name, call.training, self._make_room, attempt, error)

    def step(self, call: ReplicaCall, batch: Any) -> Any:
        """Runs a call on all replicas; returns what one device would for the whole batch.

        If that is a joint loss, its backward calls `backward` here.

        Args:
            call: what runs on a replica, and how results are joined.
            batch: as the user's code has it; or `Shards`, which are cut already.
        """
        self._undo = []
        stage = self.profiler_range if self.profile or is_profiling() else nullcontext
        if not isinstance(batch, Shards):
            with stage("lightning_dp.plan"):
                plan = self.plan(batch, call.path, training=call.training)
            with stage("lightning_dp.scatter"):
                batch = self.scatter(batch, call.transfer, plan)
        with stage("lightning_dp.replicate"):
            modules = self.replicate(call, batch)
        with stage("lightning_dp.apply"):
            outputs = self.apply(call, modules, batch)
        with stage("lightning_dp.gather"):
            return call.gather(outputs, batch)

    def backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        """The backward of a joint loss: every replica's, then the sums of their gradients."""
        stage = self.profiler_range if self.profile or is_profiling() else nullcontext
        self.reducer.begin(joint, gradient, can_fail=not self.on_cpu)
        try:
            if self.on_cpu and not joint.crosses:
                # One backward per replica: on the calling thread they would queue.
                tasks = joint.tasks(gradient, keep_graph, self.devices)
                self.executor.run(joint.name, tasks, continues_previous=True)
                self.meter.add_seconds(tasks)
            else:
                backward = joint.start(gradient, keep_graph)
                with self.meter.working([k for k, *_ in joint.parts]):
                    backward()
            if self.meter.is_watched:
                self.meter.stop()
            in_threads = self.on_cpu and self.executor.is_in_threads(joint.name)
            with stage("lightning_dp.reduce"), single_threaded() if in_threads else nullcontext():
                self.reducer.commit()
        except BaseException:
            if self.reducer.backward is not None:
                self.reducer.backward.abort()
            raise

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
        n, reading = self._infer(batch)
        if n is None and self.expects_samples:
            warn_of_nothing_to_cut(self.options.dim)
        if not n:
            return self.planner.whole()
        costs = partial(sample_costs, self.asked, batch, n, self.options.cost_key)
        least = partial(fewest_samples, self.module, path)
        return self.planner.plan(n, costs, training=training, reading=reading, least=least)

    def scatter(
        self, batch: Any, transfer: Transfer = to_device, plan: Plan | None = None
    ) -> Shards:
        """Cuts a batch and moves each shard to its device.

        A batch without anything to cut goes to the root alone. The module may cut itself, by a
        method `split_batch(batch, sizes)` that returns one shard for each of the sizes.
        """
        plan = plan or self.plan(batch)
        if plan.whole:
            parts = [transfer(batch, self.devices[0])]
        else:
            inferred = Inferred(sum(plan.sizes), plan.reading)
            parts = cut_for(self.asked, batch, inferred, plan.sizes, self.options.dim, plan.order)
            for k, device in enumerate(self.devices):
                parts[k] = transfer(parts[k], device) if plan.sizes[k] else None
        order, rules = plan.order, self.row_rules
        return Shards(plan.sizes, parts, whole=plan.whole, order=order, row_rules=rules)

    def replicate(self, call: ReplicaCall, shards: Shards) -> list[nn.Module]:
        """Copies what has changed on the root to the active replicas; returns all replicas."""
        self.reducer.settle()
        buffers: BufferCopies = "changed"
        if call.training:
            buffers = "read" if self.reducer.root_keeps_its_buffers(shards) else "all"
            if not self.on_cpu:
                self._snapshot.take(self.replicas.root_buffers)
                self._undo.append(self._snapshot.restore)
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

    def apply(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> Any:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes, meter, dim = shards.sizes, self.meter, self.options.dim
        self.calls = calls = Calls(shards.active_sizes, shards.active_order, dim, self.world)
        call.begin(shards)
        is_measured = call.training and meter.is_watched
        if is_measured and not shards.whole:
            meter.start(shards.sizes)
        compiled = self.replicas.compiled
        compiling = compiled.as_often() if self._compiles else nullcontext()
        num_compiled = num_compiled_frames()
        try:
            # Records what replicas do to metrics, logs and lists.
            with self.options.context(self.replicas, call.name, shards, self.is_rerun), compiling:
                tasks = []
                for k in shards.active:
                    run = partial(call.on_replica, modules[k], shards.parts[k])
                    if self.before_replica is not None:
                        run = partial(_after, self.before_replica, run)
                    place = partial(shards.place, call.name, k)
                    tasks.append(Task(k, self.devices[k], run, place))
                if is_measured:
                    meter.follow(tasks)
                outputs: Any = self.executor.run(
                    call.name, tasks, continues_previous=True, calls=calls
                )
                if call.gathers and self.output_device.type == "cpu" and self.accelerators:
                    # What replicas have logged has left already.
                    outputs = call.to_cpu(outputs, self.devices)
                    synchronize(*self.devices)
        except BaseException:
            if not is_in_backward():  # where a checkpoint ends its recomputation by an exception
                self.replicas.fail()
            raise
        if num_compiled_frames() != num_compiled:  # of functions that were not known
            compiled.are_known = True
        if call.training:
            self.reducer.after_forward(shards)
            meter.add_forward(call.name, shards.sizes, in_turns=calls.one_by_one)
            meter.add_seconds(tasks)
            if not self.on_cpu:
                self._undo.append(partial(meter.take_back, shards.sizes))
            if not call.has_backward:
                meter.stop()
        elif self.replicas.max_norm_embeddings:
            self.replicas.copy_back_renormalized_rows(shards.active)
        return outputs

    def join(
        self, outputs: Sequence[Any], shards: Shards, replicas: Sequence[int] | None = None
    ) -> Any:
        """Joins replicas' outputs into what one device would return, on the output device.

        Args:
            outputs: of the replicas.
            shards: all shards of the step, also those of replicas that are not joined here.
            replicas: which ones; None for all that are active.
        """
        sizes, order = shards.active_sizes, shards.active_order
        if replicas is not None:
            sizes = [shards.sizes[k] for k in replicas]
            order = None if shards.order is None else [shards.order[k] for k in replicas]
        rules, scalars = shards.row_rules, self.options.scalars
        return Join(tuple(sizes), self.output_device, rules, scalars, order).gather(outputs)

    # Out of memory

    def undo(self) -> None:
        """Takes back what a half-done step has left on the root: buffers, gradients, hooks."""
        self.reducer.undo()
        while self._undo:
            self._undo.pop()()

    def _make_room(self) -> bool:
        """Undoes the step; there is nothing else to free."""
        self.undo()
        return False

    def rerun(
        self,
        call: ReplicaCall,
        batch: Any,
        context: Callable[[], AbstractContextManager[None]],
        error: torch.OutOfMemoryError,
    ) -> None:
        """Runs a step and its backward again, after the joint loss's backward ran out of memory.

        What the step has logged and left on the module was right, and stays. An error from outside
        of the joint loss's backward is raised again.
        """
        failed = self.reducer.backward
        if failed is None:
            raise error
        wait_for_autograd(self.devices)

        def attempt() -> None:
            with context(), replaced(self, is_rerun=True):
                result = self.step(call, batch)
            call.finish(result, failed.gradient)

        self._recovery.retry(
            f"{call.name}'s backward", call.training, self._make_room, attempt, error
        )

    # Around it

    def count_samples(self, batch: Any) -> int | None:
        """Counts the samples of a batch; None if there is nothing to cut."""
        return self._infer(batch).size

    def _infer(self, batch: Any) -> Inferred:
        options = self.options
        return infer_for(
            self.asked, batch, options.dim, is_call_arguments=options.is_call_arguments
        )

    def cut(self, batch: Any, sizes: Sizes) -> list[Any]:
        """Cuts a batch into parts of these sizes without moving it; None for a size of 0."""
        return cut_for(self.asked, batch, self._infer(batch), sizes, self.options.dim)

    def profiler_range(self, name: str) -> AbstractContextManager[Any]:
        """A range of `torch.profiler` and of the Trainer's profiler, if they record."""
        stack = ExitStack()
        if is_profiling():
            stack.enter_context(record_function(name))
        if self.profile is not None:
            stack.enter_context(self.profile(name))
        return stack

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
