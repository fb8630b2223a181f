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

from lightning_dp.parallel.apply import Executor, ExecutorName, Task
from lightning_dp.parallel.backward import Backward
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.join import Override, Scalars
from lightning_dp.parallel.layout import ReplicaRules
from lightning_dp.parallel.learning import StepUsage
from lightning_dp.parallel.meter import PeakMemory, StepMeter
from lightning_dp.parallel.out_of_memory import Recovery
from lightning_dp.parallel.plan import Plan, Planner
from lightning_dp.parallel.reduce import Buffers
from lightning_dp.parallel.replicate import BufferCopies, ParameterCopies, Replicas
from lightning_dp.parallel.scatter import BatchSizeError, batch_size, cut
from lightning_dp.parallel.shards import DeviceUsage, Shards
from lightning_dp.parallel.snapshot import Snapshot
from lightning_dp.parallel.split import Order, Sizes, SplitPolicy
from lightning_dp.parallel.transfer import to_device

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
        last_sizes: samples per device in the latest apply.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        output_device: torch.device,
        split: SplitPolicy,
        dim: int = 0,
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
        self.replicas = Replicas(module, devices, rules)
        self.backward = Backward(self.replicas, buffers)
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.last_sizes: Sizes = ()
        self.usage = [DeviceUsage(device) for device in devices]
        self._memory = PeakMemory(devices)
        self._meter: StepMeter | None = None
        self._planner = Planner(module, len(devices), split, cost_key)
        if self._planner.learns:
            self.watch()
        self._recovery = Recovery(devices, self._planner)
        self._snapshot = None if self.on_cpu else Snapshot()
        self._counted: Sizes = ()
        self._is_rerun = False
        self._executor = Executor(devices, executor)
        self._dim = dim
        self._scalars: Scalars = scalars
        self._overrides = overrides
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
        return self.gather(outputs, shards.active_sizes, constants, shards.active_order)

    def scatter(
        self,
        batch: Any,
        transfer: Transfer = to_device,
        *,
        training: bool = True,
        plan: Plan | None = None,
    ) -> Shards:
        """Decides the sizes, once for the batch; cuts it and moves each shard to its device.

        A module may cut itself, by a method `split_batch(batch, sizes)` that returns one shard
        for each of the sizes. Where leaves disagree on the batch size, the first one then counts.

        Args:
            batch: what is cut.
            transfer: moves a shard to its device.
            training: whether the batch is trained on.
            plan: sizes that were decided already; samples beyond their sum are left out.
        """
        self._planner.learn(self.latest_usage)
        self._forget_step()
        n = self._batch_size(batch)
        if not n:
            return self.whole(batch, transfer)
        plan = plan or self._planner.plan(batch, n, training=training)
        parts = self._cut(batch, n, plan)
        cut_parts = zip(parts, plan.sizes, self.devices, strict=True)
        moved = [transfer(part, device) if size else None for part, size, device in cut_parts]
        return Shards(plan.sizes, moved, order=plan.order)

    def whole(self, batch: Any, transfer: Transfer = to_device) -> Shards:
        """A batch in which there is nothing to cut goes to the root alone."""
        self._planner.nothing()
        sizes = (1, *[0] * (len(self.devices) - 1))
        return Shards(sizes, [transfer(batch, self.devices[0])], whole=True)

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
        if training and self._meter is not None:
            self._meter.start(shards.sizes)
        with self._around(self.replicas, name, shards, constants, self._is_rerun):
            calls = [(k, partial(call, modules[k], shards.parts[k])) for k in shards.active]
            outputs, seconds = self._run(name, name, calls, shards)
        if training:
            self.backward.after_forward(shards)
            self._counted = shards.sizes
            for k, spent in zip(shards.active, seconds, strict=True):
                self.usage[k].samples += shards.sizes[k]
                self._spent(k, spent)
        return outputs

    def gather(
        self,
        outputs: Sequence[Any],
        sizes: Sequence[int],
        constants: tuple[Any, ...] = (),
        order: Order | None = None,
    ) -> Any:
        """What one device would have returned for the whole batch, on the output device."""
        return gather(
            outputs,
            self.output_device,
            self._dim,
            sizes=sizes,
            scalars=self._scalars,
            overrides=self._overrides,
            constants=constants,
            order=order,
        )

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.backward.settle()
        self._stale = set(range(len(self.devices)))

    def watch(self) -> None:
        """Measures every training step from now on, for `latest_usage`."""
        self._meter = self._meter or StepMeter(self.devices, self._memory)

    @property
    def latest_usage(self) -> StepUsage | None:
        """The latest training step that the devices are through with; None if none is watched."""
        return None if self._meter is None else self._meter.latest()

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
        for usage, size in zip(self.usage, self._counted, strict=False):
            usage.samples -= size
        self._forget_step()

    def close(self) -> None:
        """Ends the workers, and reads the devices' peaks of memory since the engine was made."""
        self.backward.settle()
        self._executor.close()
        for usage, peak in zip(self.usage, self._memory.overall(), strict=True):
            usage.peak_bytes = peak

    def _forget_step(self) -> None:
        """From here on there is nothing to undo."""
        self._counted = ()
        if self._snapshot is not None:
            self._snapshot.drop()

    def _spent(self, k: int, seconds: float) -> None:
        self.usage[k].busy_seconds += seconds
        if self._meter is not None:
            self._meter.add(k, seconds)

    def _stop_meter(self) -> None:
        if self._meter is not None:
            self._meter.stop()

    def _parameter_copies(self) -> ParameterCopies:
        return "changed"

    def _batch_size(self, batch: Any) -> int | None:
        try:
            return batch_size(batch, self._dim)
        except BatchSizeError as error:
            if not error.sizes or not hasattr(self.module, "split_batch"):
                raise
            return error.sizes[0]

    def _cut(self, batch: Any, n: int, plan: Plan) -> list[Any]:
        """The parts of the batch, one per device."""
        own = getattr(self.module, "split_batch", None)
        left_out = n - sum(plan.sizes)
        sizes = (*plan.sizes, left_out) if left_out else plan.sizes
        if own is None:
            return cut(batch, sizes, self._dim, plan.order)[: len(plan.sizes)]
        parts = list(own(batch, sizes))
        if len(parts) != len(sizes):
            raise ValueError(
                f"{type(self.module).__qualname__}.split_batch: expected one shard for each of "
                f"the sizes {sizes}, got {len(parts)} shards. Return a list as long as sizes; "
                "where a size is 0, the entry is not used."
            )
        return parts[: len(plan.sizes)]

    def _run(
        self,
        kind: str,
        stage: str,
        calls: Sequence[tuple[int, Callable[[], Any]]],
        shards: Shards,
    ) -> tuple[list[Any], list[float]]:
        """Runs calls of replicas; a stage that differs from the kind of work goes on with it."""
        tasks = [
            Task(k, self.devices[k], call, f", {stage}, {shards.samples(k)}") for k, call in calls
        ]
        results = self._executor.run(kind, tasks, goes_on=stage != kind)
        return results, [task.seconds for task in tasks]
