"""The flow: split -> scatter -> replicate -> apply -> gather, each in the file of its name.

What runs on the replicas, and what comes back, is for the two modes to say: `step` and `forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_dp.parallel.batch import (
    Override,
    SampleDims,
    Scalars,
    Shards,
    StepDims,
    cut_for,
    gather,
    infer_for,
    sample_costs,
    to_device,
)
from lightning_dp.parallel.gradients import Backward, Buffers, reduce_gradients
from lightning_dp.parallel.meter import Meter
from lightning_dp.parallel.out_of_memory import Recovery, Snapshot
from lightning_dp.parallel.ranges import Ranges, stage
from lightning_dp.parallel.replicas import (
    BufferCopies,
    ParameterCopies,
    ReplicaRules,
    Replicas,
    compiles,
    limits_norms,
)
from lightning_dp.parallel.split import Order, Plan, Planner, Sizes, SplitPolicy
from lightning_dp.parallel.workers import Executor, ExecutorName, Rendezvous, Task

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""

T = TypeVar("T")

Call: TypeAlias = Callable[[nn.Module, Any], Any]
"""What one replica does with its shard."""

Around: TypeAlias = Callable[
    [Replicas, str, Shards, tuple[Any, ...], bool], AbstractContextManager[None]
]
"""Of the replicas, the method, the shards, the other arguments, and whether it is a rerun."""


class Engine:
    """Runs something on all replicas of a module, each on its shard of the batch.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        output_device: where gathered outputs end up.
        split: how many samples each device gets.
        dim: the dimension along which batches are cut and outputs joined.
        columns: whether lists are containers of columns whatever is in them.
        cost_key: for a split by cost the entry of the batch that holds the costs; None to ask the
            module's method `sample_cost(batch)`.
        buffers: which buffers (running statistics, say) the root keeps after a training step:
            those of the `"first"` replica, or the `"mean"` of all, weighted by shard size.
        executor: how the replicas run, see `Executor`.
        scalars: how 0-dim outputs are gathered, see `gather`.
        overrides: how outputs under certain keys are gathered, see `gather`.
        rules: how special submodules are replicated.
        around: entered around every apply; for what the replicas leave behind besides their
            outputs. A rerun has done so before, and is to leave nothing.

    Attributes:
        on_cpu: whether all replicas are on the CPU.
        meter: what the devices do in training.
        last_sizes: samples per device in the latest apply.
        ranges: the stages, as profilers see them.
        rendezvous: where the replicas met in the latest apply.
    """

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
        around: Around = lambda *_: nullcontext(),
    ) -> None:
        self.module = module
        self.devices = list(devices)
        self.output_device = output_device
        self.replicas = Replicas(module, devices, rules, before_rebuild=reduce_gradients)
        self.backward = Backward(self.replicas, buffers)
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.last_sizes: Sizes = ()
        self.ranges = Ranges()
        self.rendezvous = Rendezvous()
        self.meter = Meter(devices)
        self._planner = Planner(len(devices), split)
        self._cost_key = cost_key
        if self._planner.learns:
            self.meter.watch()
        self._recovery = Recovery(devices, self._planner)
        self._snapshot = None if self.on_cpu else Snapshot()
        self._is_rerun = False
        # On the CPU two threads may shorten the same row at the same time: twice.
        in_turn = compiles(module) or (self.on_cpu and limits_norms(module))
        self._executor = Executor(devices, "inorder" if in_turn else executor)
        self._dim = dim
        self._columns = columns
        self._scalars: Scalars = scalars
        self._dims = SampleDims(dim, overrides, is_told=scalars == "stack")
        self._around = around
        self._stale = set(range(len(devices)))

    def run(
        self,
        name: str,
        call: Call,
        shards: Shards,
        *,
        training: bool = False,
        constants: tuple[Any, ...] = (),
    ) -> Any:
        """The flow from replicate to gather.

        Args:
            name: of what is called, for errors and for the executor's choice.
            call: what each replica does with its shard.
            shards: what `scatter` made of the batch.
            training: whether the module trains, and may leave buffers behind.
            constants: the call's other arguments, the same on every replica.
        """
        modules = self.replicate(shards, training=training)
        outputs = self.apply(name, call, modules, shards, training=training, constants=constants)
        return self.gather(outputs, shards.active_sizes, shards.active_order, shards.dims)

    @stage("scatter")
    def scatter(
        self,
        batch: Any,
        transfer: Transfer = to_device,
        *,
        name: str = "",
        training: bool = True,
        plan: Plan | None = None,
    ) -> Shards:
        """Decides the sizes, once for the batch; cuts it and moves each shard to its device.

        A module may say by a method `batch_size(batch)` how many samples there are, and cut by
        itself, with a method `split_batch(batch, sizes)` that returns one shard for each size.

        Args:
            batch: what is cut.
            transfer: moves a shard to its device.
            name: of what will be called: what is known of its outputs belongs to it.
            training: whether the batch is trained on.
            plan: sizes that were decided already; samples beyond their sum are left out.
        """
        self._planner.learn(self.meter.latest)
        self._forget_step()
        inferred = infer_for(self.module, batch, self._dim, columns=self._columns)
        n = inferred.size
        if not n:
            return self.whole(batch, transfer)
        costs = partial(sample_costs, self.module, batch, n, self._cost_key)
        dims = self._dims.of(name, training=training)
        telling = self._least(training) if dims.asks else None
        plan = plan or self._planner.plan(n, costs, training=training, telling=telling)
        left_out = n - sum(plan.sizes)
        sizes = (*plan.sizes, left_out) if left_out else plan.sizes
        parts = cut_for(self.module, batch, inferred, sizes, self._dim, plan.order)
        cut_parts = zip(parts, plan.sizes, self.devices, strict=False)
        moved = [transfer(part, device) if size else None for part, size, device in cut_parts]
        return Shards(plan.sizes, moved, order=plan.order, dims=dims)

    def _least(self, training: bool) -> int:
        """The fewest samples that a replica is to have: batch norm needs two to train."""
        layers = self.module.modules() if training else ()
        return 1 + any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)

    def whole(self, batch: Any, transfer: Transfer = to_device) -> Shards:
        """A batch in which there is nothing to cut goes to the root alone."""
        self._planner.nothing()
        sizes = (1, *[0] * (len(self.devices) - 1))
        return Shards(sizes, [transfer(batch, self.devices[0])], whole=True)

    @stage("replicate")
    def replicate(self, shards: Shards, *, training: bool = False) -> list[nn.Module]:
        """The replicas, up to date on the devices that have samples."""
        self.backward.settle()
        self._forget_step()
        stale = self._stale.intersection(shards.active)
        parameters = "all" if stale else self._parameter_copies()
        buffers: BufferCopies = "changed"
        if training:
            buffers = "read" if self.backward.root_keeps_its_buffers(shards) else "all"
            if self._snapshot is not None:
                self._snapshot.take(self.replicas.buffers[0])
        self.replicas.refresh(shards.active, parameters=parameters, buffers=buffers)
        self._stale -= stale
        return self.replicas.modules

    @stage("apply")
    def apply(
        self,
        name: str,
        call: Call,
        modules: Sequence[nn.Module],
        shards: Shards,
        *,
        training: bool = False,
        constants: tuple[Any, ...] = (),
    ) -> list[Any]:
        """Calls every active replica with its shard; outputs in shard order."""
        self.last_sizes = shards.sizes
        shards.dims.has_seen(shards.sizes)
        self.rendezvous = Rendezvous(shards.active_sizes, shards.active_order, self._dim)
        if training:
            self.meter.start(shards.sizes)
        around = self._around(self.replicas, name, shards, constants, self._is_rerun)
        with around, self.replicas.writing() if training else nullcontext():
            calls = [(k, partial(call, modules[k], shards.parts[k])) for k in shards.active]
            outputs, seconds = self._run(name, name, calls, shards, self.rendezvous)
        if training:
            self.backward.after_forward(shards)
            self.meter.count(shards.sizes)
            for k, spent in zip(shards.active, seconds, strict=True):
                self.meter.add(k, spent)
        else:
            self.replicas.adopt_rows(shards.active)
        return outputs

    @stage("gather")
    def gather(
        self,
        outputs: Sequence[Any],
        sizes: Sequence[int],
        order: Order | None = None,
        dims: StepDims | None = None,
    ) -> Any:
        """What one device would have returned for the whole batch, on the output device."""
        return gather(
            outputs,
            self.output_device,
            self._dim,
            sizes=sizes,
            scalars=self._scalars,
            order=order,
            dims=dims,
        )

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.backward.settle()
        self.backward.reduce_waiting()
        self._stale = set(range(len(self.devices)))

    def fitting(
        self,
        name: str,
        attempt: Callable[[], T],
        trial: Callable[[Plan], object],
        *,
        training: bool,
        failure: torch.OutOfMemoryError | None = None,
    ) -> T:
        """Makes an attempt at a step; where memory runs out, others with fewer samples there.

        Args:
            name: of the step, for people.
            attempt: does all of it, from `scatter` on.
            trial: does it with sizes that are given, on a part of the batch.
            training: whether it trains.
            failure: the error, if an attempt was made before.
        """
        return self._recovery.run(
            name, attempt, trial, self._undo, training=training, failure=failure
        )

    def worked(self, *, training: bool) -> None:
        """The step for which a batch was last cut is done, and has fitted."""
        self._planner.worked(training=training)

    @contextlib.contextmanager
    def rerunning(self) -> Iterator[None]:
        """While it lasts, replicas leave nothing behind but outputs, gradients and buffers."""
        self._is_rerun = True
        try:
            yield
        finally:
            self._is_rerun = False

    def _undo(self) -> None:
        """Takes back what a half-done step has left on the root: buffers, gradients, hooks."""
        self.backward.undo()
        if self._snapshot is not None:
            self._snapshot.restore()
        self.meter.uncount()
        self._forget_step()

    def close(self) -> None:
        """Ends the workers, and reads the devices' peaks of memory since the engine was made."""
        self.backward.settle()
        self._executor.close()
        self.meter.read_peaks()

    def _forget_step(self) -> None:
        """From here on there is nothing to undo."""
        self.meter.keep()
        if self._snapshot is not None:
            self._snapshot.drop()

    def _parameter_copies(self) -> ParameterCopies:
        return "changed"

    def _run(
        self,
        kind: str,
        stage: str,
        calls: Sequence[tuple[int, Callable[[], Any]]],
        shards: Shards,
        rendezvous: Rendezvous | None = None,
    ) -> tuple[list[Any], list[float]]:
        """Runs calls of replicas; a stage that differs from the kind of work goes on with it."""
        tasks = [
            Task(k, self.devices[k], call, f", {stage}, {shards.samples(k)}") for k, call in calls
        ]
        results = self._executor.run(
            kind,
            tasks,
            goes_on=stage != kind,
            rendezvous=rendezvous,
        )
        return results, [task.seconds for task in tasks]
