"""The flow: split -> scatter -> replicate -> apply -> gather, and after it backward -> reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.apply import Executor, ExecutorName, Task
from lightning_dp.parallel.backward import Backward
from lightning_dp.parallel.devices import peak_memory, reset_peak_memory
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.layout import ReplicaRules
from lightning_dp.parallel.loss import (
    LossReduction,
    StepOutput,
    join_losses,
    loss_weights,
    num_items,
    with_callbacks,
    with_separate_backward,
)
from lightning_dp.parallel.reduce import Buffers
from lightning_dp.parallel.replicate import BufferCopies, Replicas
from lightning_dp.parallel.scatter import batch_size, cut
from lightning_dp.parallel.shards import DeviceUsage, Shards
from lightning_dp.parallel.split import SplitPolicy
from lightning_dp.parallel.transfer import to_device

Transfer: TypeAlias = Callable[[Any, torch.device], Any]
"""Moves one shard to a device."""


Around: TypeAlias = Callable[[Replicas, str, Shards, tuple[Any, ...]], AbstractContextManager[None]]


class StepParallel:
    """Runs a method of a module on all replicas, each on its shard of the batch.

    What comes back is what one device would have returned: outputs in order, the loss of the
    whole batch, and after its backward the gradients of the whole batch in the root's parameters.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        output_device: where loss and gathered outputs end up.
        split: how many samples each device gets.
        loss_reduction: whether the step's loss is a `"mean"` or a `"sum"` over its samples.
        buffers: which buffers (running statistics, say) the root keeps after a training step:
            those of the `"first"` replica, or the `"mean"` of all, weighted by shard size.
        executor: how the replicas run, see `Executor`.
        rules: how special submodules are replicated.
        around: entered around every apply with the replicas, the method, the shards and the other
            arguments; for what the replicas leave behind besides their outputs.

    Example:
        >>> class Net(nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().mean()
        >>> cpu = torch.device("cpu")
        >>> net = Net(3, 1)
        >>> engine = StepParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (n - 1, 1))
        >>> engine.train("training_step", engine.scatter(torch.randn(8, 3))).backward()
        >>> net.weight.grad.shape
        torch.Size([1, 3])
        >>> engine.close()
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        output_device: torch.device,
        split: SplitPolicy,
        loss_reduction: LossReduction = "mean",
        buffers: Buffers = "first",
        executor: ExecutorName = "auto",
        rules: ReplicaRules | None = None,
        around: Around = lambda replicas, method, shards, args: nullcontext(),
    ) -> None:
        self.devices = list(devices)
        self.output_device = output_device
        self.replicas = Replicas(module, devices, rules)
        self.usage = [DeviceUsage(device) for device in devices]
        for device in devices:
            reset_peak_memory(device)
        self.backward = Backward(self.replicas, buffers)
        self._executor = Executor(devices, executor)
        self._split = split
        self._loss_reduction: LossReduction = loss_reduction
        self._around = around
        self._stale = True
        self._on_cpu = all(device.type == "cpu" for device in devices)

    def evaluate(self, method: str, shards: Shards, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and gathers what it returns."""
        modules = self.replicate(shards)
        outputs, _ = self.apply(modules, method, shards, *args)
        return gather(outputs, self.output_device, sizes=shards.active_sizes, constants=args)

    def train(self, method: str, shards: Shards, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and joins the losses that it returns.

        The method returns a loss, or a mapping with the key "loss" (and "num_items", if the loss
        is a mean over something else than samples), or None to leave its shard out.

        Returns:
            As the method does: the joint loss, whose backward fills the root's `.grad`; a dict
            with it and the other entries gathered; or None if no replica returned a loss.
        """
        modules = self.replicate(shards, training=True)
        outputs, seconds = self.apply(modules, method, shards, *args)
        self.backward.after_forward(shards)
        self._count(shards, seconds)
        return self._join(method, outputs, shards, args)

    def scatter(self, batch: Any, transfer: Transfer = to_device) -> Shards:
        """Decides the sizes, once for the batch; cuts it and moves each shard to its device.

        A batch in which there is nothing to cut goes to the root alone, with a warning.
        """
        n = batch_size(batch)
        if n is None:
            warnings.warn(
                "The batch has no tensor and no list that could be cut: it runs on the root "
                "device alone. Yield tensors whose first dimension counts the samples.",
                stacklevel=2,
            )
        if not n:
            return Shards((1, *[0] * (len(self.devices) - 1)), [transfer(batch, self.devices[0])])
        sizes = self._split(n)
        parts = [
            transfer(part, device) if size else None
            for part, size, device in zip(cut(batch, sizes), sizes, self.devices, strict=True)
        ]
        return Shards(sizes, parts)

    def replicate(self, shards: Shards, *, training: bool = False) -> list[nn.Module]:
        """The replicas, up to date on the devices that have samples."""
        self.backward.settle()
        active = None if self._stale else shards.active
        buffers: BufferCopies = "changed"
        if training:
            buffers = "read" if self.backward.root_keeps_its_buffers(shards) else "all"
        self.replicas.refresh(active, everything=self._stale, buffers=buffers)
        self._stale = False
        return self.replicas.modules

    def apply(
        self, modules: list[nn.Module], method: str, shards: Shards, *args: Any
    ) -> tuple[list[Any], list[float]]:
        """Calls the method on every active replica; outputs and seconds in shard order."""
        with self._around(self.replicas, method, shards, args):
            calls = [
                (k, partial(getattr(modules[k], method), shards.parts[k], *args))
                for k in shards.active
            ]
            return self._run(method, calls, shards)

    def resync(self) -> None:
        """Makes the next step copy everything to the replicas, changed or not."""
        self.backward.settle()
        self._stale = True

    def close(self) -> None:
        """Ends the workers, and reads the devices' peaks of memory since the engine was made."""
        self.backward.settle()
        self._executor.close()
        for usage in self.usage:
            usage.peak_bytes = peak_memory(usage.device)

    def _run(
        self,
        method: str,
        calls: Sequence[tuple[int, Callable[[], Any]]],
        shards: Shards,
        *,
        backward: bool = False,
    ) -> tuple[list[Any], list[float]]:
        stage = "backward" if backward else method
        tasks = [
            Task(k, self.devices[k], call, f", {stage}, {shards.samples(k)}") for k, call in calls
        ]
        results = self._executor.run(method, tasks, goes_on=backward)
        return results, [task.seconds for task in tasks]

    def _join(
        self, method: str, outputs: list[Any], shards: Shards, constants: tuple[Any, ...]
    ) -> Any:
        kept = [k for k, output in zip(shards.active, outputs, strict=True) if output is not None]
        if not kept:
            return None
        steps = [StepOutput.parse(output) for output in outputs if output is not None]
        sizes = [shards.sizes[k] for k in kept]
        counts = num_items(steps)
        weights = loss_weights(sizes, self._loss_reduction, counts)
        losses = [step.loss for step in steps]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._on_cpu):
            joint = join_losses(losses, weights, self.output_device)
        if any(loss.requires_grad for loss in losses):
            joint = self._with_backward(method, joint, kept, losses, weights, shards)
        if steps[0].extras is None:
            return joint
        extras = [step.extras for step in steps]
        joined = gather(extras, self.output_device, sizes=sizes, constants=constants)
        count = {} if counts is None else {"num_items": sum(counts)}
        return {"loss": joint, **joined, **count}

    def _with_backward(
        self,
        method: str,
        joint: Tensor,
        replicas: list[int],
        losses: list[Tensor],
        weights: list[float],
        shards: Shards,
    ) -> Tensor:
        if not self._on_cpu:
            return with_callbacks(joint, self.backward.before, self.backward.after)
        graphs = [g for g in zip(replicas, losses, weights, strict=True) if g[2] != 0]

        def backward_each(gradient: Tensor, keep_graph: bool) -> None:
            calls = [
                (k, partial(loss.backward, gradient * weight, retain_graph=keep_graph))
                for k, loss, weight in graphs
                if loss.requires_grad
            ]
            self.backward.before()
            _, seconds = self._run(method, calls, shards, backward=True)
            for (k, _), spent in zip(calls, seconds, strict=True):
                self.usage[k].busy_seconds += spent
            self.backward.after()

        return with_separate_backward(joint, backward_each)

    def _count(self, shards: Shards, seconds: list[float]) -> None:
        for k, spent in zip(shards.active, seconds, strict=True):
            self.usage[k].samples += shards.sizes[k]
            self.usage[k].busy_seconds += spent
