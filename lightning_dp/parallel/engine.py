"""The flow of one step: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`Engine.step` and `Engine.backward` are all of it. What runs on a replica, and how the results are
joined, is a `ReplicaCall`: those of `step` and `forward`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

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
from lightning_dp.parallel.comm import synchronize
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.gather import Join, Override, RowRules, Scalars
from lightning_dp.parallel.out_of_memory import Recovery
from lightning_dp.parallel.reduce import (
    Buffers,
    JointBackward,
    Reducer,
    single_threaded,
    wait_for_autograd,
)
from lightning_dp.parallel.replicate import OwnAttributes, Replicas
from lightning_dp.parallel.scatter import (
    Inferred,
    Shards,
    cut_for,
    infer_for,
    sample_costs,
    to_device,
    to_device_together,
    warn_of_nothing_to_cut,
)
from lightning_dp.parallel.split import Plan, Planner, Sizes, SplitPolicy
from lightning_dp.parallel.torch_private import (
    backward_id,
    dynamo_utils,
    is_profiling,
    more_recompilations,
)
from lightning_dp.parallel.usage import DeviceUsage, UsageMeter

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""

StepContext: TypeAlias = Callable[[Replicas, str, Shards, bool], AbstractContextManager[None]]
"""Takes (replicas, name of the call, shards, is_rerun); returns the context for one apply."""


class ReplicaCall(ABC):
    """What runs on each replica in one step, and what becomes of its results.

    Args:
        name: what errors call it; the executor chooses by it how the call runs.
        training: whether the root takes over the buffers that the call writes.
        transfer: moves the shards.
    """

    has_backward: ClassVar[bool] = False  # the step ends with the backward of a joint loss
    is_one_graph: ClassVar[bool] = False  # one backward runs through the graphs of all replicas
    resends_frozen = False  # replicas get parameters with requires_grad=False, changed or not
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

    def to_cpu(self, outputs: list[Any], devices: Sequence[torch.device]) -> list[Any]:
        """Starts to copy the outputs to the CPU; the caller waits for these devices."""
        return to_device_together(outputs, torch.device("cpu"), later=devices)

    @abstractmethod
    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """Joins the active replicas' outputs into what one device would have returned."""


class Engine:
    """Runs calls on all replicas of a module, each on its shard of the batch.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        output_device: where gathered outputs end up.
        split: how many samples each device gets.
        dim: the dimension along which batches are cut and outputs joined.
        is_call_arguments: whether batches are the arguments of a call, see `infer_batch_size`.
        cost_key: the batch's entry that holds costs; None to ask the module, see `sample_costs`.
        buffers: which buffers the root keeps after a training step, see `reduce_buffers`.
        executor: how the replicas run, see `Executor`.
        scalars: how 0-dim outputs are gathered.
        overrides: how outputs under certain keys are gathered.
        own_attributes: gives a replica's modules attributes of their own.
        context: entered around every apply, for what replicas leave behind besides outputs.
        world: the processes that train together; None if this is the only one.
        timeout: how long replicas wait in a collective for one that does not come.

    Attributes:
        asked: the module whose `batch_size`, `split_batch` and `sample_cost` are called.
        last_sizes: samples per device in the latest `apply`.
        usage: what each replica has done in training.
        before_replica: called before each replica's call.
        is_rerun: whether the step runs again because its backward ran out of memory; what replicas
            then log or write to attributes is undone: the first run's stays.
    """

    expects_samples: ClassVar[bool] = False  # warns of a batch that has nothing to cut
    frozen_may_change = True  # code between steps may write to parameters that are not trained
    is_rerun = False
    last_sizes: Sizes = ()
    before_replica: Callable[[], object] | None = None

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        output_device: torch.device,
        split: SplitPolicy,
        dim: int = 0,
        is_call_arguments: bool = False,
        cost_key: str | None = None,
        buffers: Buffers = "first",
        executor: ExecutorName = "auto",
        scalars: Scalars = "merge",
        overrides: Mapping[str, Override] | None = None,
        own_attributes: OwnAttributes = lambda *_: {},
        context: StepContext = lambda *_: nullcontext(),
        world: World | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.module = self.asked = module
        self.devices, self.output_device = list(devices), output_device
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.accelerators = [d for d in (*devices, output_device) if d.type != "cpu"]
        self.dim, self.world = dim, world
        self._is_call_arguments, self._cost_key = is_call_arguments, cost_key
        self._scalars, self._row_rules = scalars, RowRules(dim, overrides or {})
        self._context = context
        self.planner = Planner(len(devices), split)
        self.replicas = Replicas(module, devices, own_attributes)
        self.replicas.mark_stale()  # the module may be written to until the first step
        self.reducer = Reducer(self.replicas, self.devices, buffers, world)
        names = replica_names(devices, None if world is None else world.rank)
        self.usage = list(map(DeviceUsage, devices, names))
        self.meter = UsageMeter(devices, getattr(split, "learn", None))
        self.calls = Calls()  # of the replicas, in the latest apply
        seconds = Calls.timeout if timeout is None else timeout.total_seconds()
        self.executor = Executor(devices, executor, self.replicas.drop, names, seconds)
        self._recovery = Recovery(self.planner, self.devices)
        self._counted: Sizes = ()  # the samples that the present step has added to the usage
        self._kept_memory = KeptMemory() if self.on_cpu else None

    # One step

    def run(self, call: ReplicaCall, batch: Any, shards: Shards | None = None) -> Any:
        """Runs a step, and again if it is out of memory; `shards`: the batch, if cut already."""
        try:
            return self.step(call, batch if shards is None else shards)
        except torch.OutOfMemoryError as error:
            attempt = partial(self.step, call, batch)
            return self._recovery.retry(call.name, call.training, self.undo, attempt, error)

    def step(self, call: ReplicaCall, batch: Any) -> Any:
        """Runs a call on all replicas; returns what one device would for the whole batch.

        If that is a joint loss, its backward calls `backward` here. The batch is as the user's code
        has it, or `Shards`, which are cut already.
        """
        self._counted = ()
        self.reducer.snapshot = None
        stage = record_function if is_profiling() else nullcontext
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
        stage = record_function if is_profiling() else nullcontext
        self.reducer.begin(joint, gradient)
        try:
            if self.on_cpu and not joint.crosses:  # see the note in `reduce`
                tasks = joint.tasks(gradient, keep_graph, self.devices)
                self.executor.run(joint.name, tasks)
                self._add_seconds(tasks)
            else:
                with self.meter.working([k for k, *_ in joint.parts]):
                    joint.run_together(gradient, keep_graph)
            if self.meter.is_watched:
                self.meter.stop()
            in_threads = self.on_cpu and self.executor.is_in_threads(joint.name)
            with stage("lightning_dp.reduce"), single_threaded() if in_threads else nullcontext():
                self.reducer.commit()
        except BaseException:
            self.reducer.abort()
            raise

    # Its stages

    def plan(self, batch: Any, path: str = "", *, training: bool = True) -> Plan:
        """Decides which samples each device gets, once for everything in the batch.

        Batch norm in the submodule at `path`, which is called, takes no shard of one sample.
        """
        if self.meter.is_watched:
            self.meter.update()  # a policy that learns gets the steps that are over
        n, reading = self._infer(batch)
        if n is None and self.expects_samples:
            warn_of_nothing_to_cut(self.dim)
        if not n:
            return self.planner.whole()
        costs = partial(sample_costs, self.asked, batch, n, self._cost_key)
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
            parts = cut_for(self.asked, batch, inferred, plan.sizes, self.dim)
            for k, device in enumerate(self.devices):
                parts[k] = transfer(parts[k], device) if plan.sizes[k] else None
        return Shards(plan.sizes, parts, whole=plan.whole, row_rules=self._row_rules)

    def replicate(self, call: ReplicaCall, shards: Shards) -> list[nn.Module]:
        """Copies what has changed on the root to the active replicas; returns all replicas."""
        replicas = self.replicas
        buffers = self.reducer.begin_step(shards, training=call.training)
        replicas.refresh(shards.active, frozen=call.resends_frozen, buffers=buffers)
        in_order = replicas.compiles or replicas.run_in_order
        in_threads = self.executor.choose(call.name, len(shards.active), in_order=in_order)
        # Backwards that run one at a time may accumulate into the root's gradients. In forward mode
        # replicas compute with aliases instead if the backward's end has to call `take_buffers`.
        replicas.share_parameters(buffers != "all" if call.is_one_graph else not in_threads)
        return replicas.modules

    def apply(self, call: ReplicaCall, modules: Sequence[nn.Module], shards: Shards) -> list[Any]:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes = shards.sizes
        self.calls = calls = Calls(shards.active_sizes, self.dim, self.world)
        call.begin(shards)
        tasks = []
        for k in shards.active:
            run = partial(call.on_replica, modules[k], shards.parts[k])
            if self.before_replica is not None:
                run = partial(_after, self.before_replica, run)
            tasks.append(Task(k, self.devices[k], run, partial(shards.place, call.name, k)))
        if call.training and self.meter.is_watched and not shards.whole:
            self.meter.start(shards.sizes, tasks)
        compiles, num_compiled = self.replicas.compiles, _num_compiled()
        compiling = more_recompilations(len(self.devices)) if compiles else nullcontext()
        try:
            # The context records what replicas do to metrics, logs and lists.
            with self._context(self.replicas, call.name, shards, self.is_rerun), compiling:
                outputs = self.executor.run(call.name, tasks, calls)
                if self.output_device.type == "cpu" and self.accelerators:
                    # Copies of logged values are on their way already: one wait serves all.
                    outputs = call.to_cpu(outputs, self.devices)
                    synchronize(*self.devices)
        except BaseException:
            # Within a backward it may be a checkpoint that stops its recomputation early: no error.
            if backward_id() < 0:
                self.replicas.drop()
            raise
        if _num_compiled() != num_compiled:  # of functions that were not known
            self.replicas.compiles = True
        if call.training:
            self.reducer.after_forward(shards)
            self._counted = shards.sizes
            for usage, size in zip(self.usage, shards.sizes, strict=True):
                usage.samples += size
            self._add_seconds(tasks)
            if self.meter.is_watched and not call.has_backward:
                self.meter.stop()
        return outputs

    def _add_seconds(self, tasks: Sequence[Task]) -> None:
        """Adds the seconds that workers spent in these calls."""
        for task in tasks:
            self.usage[task.replica].busy_seconds += task.seconds
        if self.meter.is_watched:
            self.meter.add_seconds({t.replica: t.seconds for t in tasks})

    def join(self, outputs: Sequence[Any], shards: Shards) -> Any:
        """Joins replicas' outputs into what one device would return, on the output device."""
        sizes, rules = tuple(shards.active_sizes), shards.row_rules
        return Join(sizes, self.output_device, rules, self._scalars).gather(outputs)

    # Out of memory

    def undo(self) -> None:
        """Takes back what a half-done step has left: gradients, hooks, buffers, counts."""
        if backward_id() < 0:  # where a checkpoint calls the module again
            wait_for_autograd(self.devices)
        self.reducer.undo()
        for usage, size in zip(self.usage, self._counted, strict=False):
            usage.samples -= size
        self._counted = ()

    def rerun(
        self,
        call: ReplicaCall,
        batch: Any,
        context: Callable[[], AbstractContextManager[None]],
        error: torch.OutOfMemoryError,
    ) -> None:
        """Runs a step and its backward again, after the joint loss's backward ran out of memory.

        What the step has logged and left on the module was right, and stays. Other errors than
        those of the joint loss's backward are raised again.
        """
        if self.reducer.backward is None:
            raise error
        gradient = self.reducer.backward.gradient

        def attempt() -> None:
            with context(), replaced(self, is_rerun=True):
                result = self.step(call, batch)
            loss = result["loss"] if isinstance(result, Mapping) else result
            if loss is not None and loss.requires_grad:
                loss.backward(gradient)

        name = f"{call.name}'s backward"
        self._recovery.retry(name, call.training, self.undo, attempt, error)

    # Around it

    def count_samples(self, batch: Any) -> int | None:
        """Counts the samples of a batch; None if there is nothing to cut."""
        return self._infer(batch).size

    def _infer(self, batch: Any) -> Inferred:
        return infer_for(self.asked, batch, self.dim, is_call_arguments=self._is_call_arguments)

    def cut(self, batch: Any, sizes: Sizes) -> list[Any]:
        """Cuts a batch into parts of these sizes without moving it; None for a size of 0."""
        return cut_for(self.asked, batch, self._infer(batch), sizes, self.dim)

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.reducer.settle()
        self.replicas.mark_stale()

    def close(self) -> None:
        """Ends the workers, gives kept memory back, and reads the devices' peaks of memory."""
        self.reducer.close()
        self.executor.close()
        if self._kept_memory is not None:
            self._kept_memory.close()
        for usage, peak in zip(self.usage, self.meter.peaks(), strict=True):
            usage.peak_bytes = peak


def _after(before: Callable[[], object], call: Callable[[], Any]) -> Any:
    before()
    return call()


def _num_compiled() -> int:
    """How many frames the process has compiled so far."""
    dynamo = dynamo_utils()
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])
