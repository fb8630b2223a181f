"""Step mode: a step runs in every replica on its shard; losses are joined, gradients summed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Shards, batch_size, to_device
from lightning_dp.parallel.engine import Engine, Transfer
from lightning_dp.parallel.gradients import (
    EarlierGradients,
    LossReduction,
    StepOutput,
    agreed_items,
    join_losses,
    loss_of,
    loss_weights,
    wait_for_autograd,
    with_separate_backward,
)
from lightning_dp.parallel.ranges import stage

Graph: TypeAlias = tuple[int, Tensor, float]
"""A replica, its loss with its graph, and the weight of that in the joint loss."""


class StepParallel(Engine):
    """Runs a method of a module on all replicas, each on its shard of the batch.

    What comes back is what one device would have returned: outputs in order, the loss of the
    whole batch, and after its backward the gradients of the whole batch in the root's parameters.

    Args:
        module: the user's module, on the root device.
        devices: the replicas' devices, root first; an entry may repeat.
        loss_reduction: whether the step's loss is a `"mean"` or a `"sum"` over its samples.
        options: those of `Engine`.

    Attributes:
        has_own_backward: whether code that nobody knows makes the joint loss's backward.

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
        loss_reduction: LossReduction = "mean",
        **options: Any,
    ) -> None:
        super().__init__(module, devices, **options)
        self.loss_reduction: LossReduction = loss_reduction
        self.has_own_backward = False
        self._interrupted: Tensor | None = None

    def evaluate(self, method: str, shards: Shards, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and gathers what it returns."""
        output = self.run(method, partial(_step, method, args), shards, constants=args)
        self.worked(training=False)
        return output

    def train(self, method: str, shards: Shards, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and joins the losses that it returns.

        The method returns a loss, or a mapping with the key "loss", or None to leave its shard
        out. If the loss is a mean over something else than samples, "num_items" tells how many:
        an entry of the mapping or an attribute of the loss.

        Returns:
            As the method does: the joint loss, whose backward fills the root's `.grad`; a dict
            with it and the other entries gathered; or None if no replica returned a loss.
        """
        self._interrupted = None
        modules = self.replicate(shards, training=True)
        step = partial(_step, method, args)
        outputs = self.apply(method, step, modules, shards, training=True, constants=args)
        return self._join(method, outputs, shards, args)

    def train_apart(self, method: str, shards: Shards, *args: Any) -> None:
        """Trains on shards, forward and backward, and leaves no trace of it but in buffers."""
        earlier = EarlierGradients(self.replicas.parameters)
        try:
            with self.rerunning():
                loss = loss_of(self.train(method, shards, *args))
            if loss is not None and loss.requires_grad:
                self.run_backward(loss)
        finally:
            earlier.put_back()

    def run_backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """A joint loss's backward; where it runs out of memory, nobody works on it any more."""
        try:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            wait_for_autograd(self.devices)
            raise

    def interrupted(self) -> Tensor | None:
        """The gradient of the joint loss, if its backward began and has not ended; once.

        When it returns, nobody works on that backward any more.
        """
        gradient, self._interrupted = self._interrupted, None
        if gradient is not None:
            wait_for_autograd(self.devices)
        return gradient

    def scatter(self, batch: Any, transfer: Transfer = to_device, **options: Any) -> Shards:
        """As every scatter; a batch in which there is nothing to cut is warned about."""
        shards = super().scatter(batch, transfer, **options)
        if shards.whole and batch_size(batch, self._dim) is None:
            warnings.warn(
                "The batch has no tensor and no list that could be cut: it runs on the root "
                f"device alone. Yield tensors whose dim {self._dim} counts the samples.",
                stacklevel=2,
            )
        return shards

    @stage("gather")
    def _join(
        self, method: str, outputs: list[Any], shards: Shards, constants: tuple[Any, ...]
    ) -> Any:
        kept = [k for k, output in zip(shards.active, outputs, strict=True) if output is not None]
        if not kept:
            return None
        returned = [output for output in outputs if output is not None]
        steps = [StepOutput.parse(output) for output in returned]
        sizes = [shards.sizes[k] for k in kept]
        counts = agreed_items([step.num_items for step in steps])
        weights = loss_weights(sizes, self.loss_reduction, counts)
        losses = [step.loss for step in steps]
        with torch.no_grad():  # the joint loss has a backward of its own
            joint = join_losses(losses, weights, self.output_device)
        if any(loss.requires_grad for loss in losses):
            joint = self._with_backward(method, joint, kept, losses, weights, shards)
        if steps[0].extras is None:
            return joint
        order = None if shards.order is None else [shards.order[k] for k in kept]
        joined = self.gather([step.extras for step in steps], sizes, constants, order)
        count = {"num_items": sum(counts)} if counts and "num_items" in returned[0] else {}
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
        graphs = [
            graph
            for graph in zip(replicas, losses, weights, strict=True)
            if graph[2] != 0 and graph[1].requires_grad
        ]
        # Where graphs go on in each other, none of them has a backward of its own.
        is_joint = not self.on_cpu or self.rendezvous.crossed

        def backward_each(gradient: Tensor, keep_graph: bool) -> None:
            self._interrupted = gradient
            self.backward.before(can_fail=not self.on_cpu)
            try:
                if is_joint:
                    backward_at_once(graphs, gradient, keep_graph)
                else:
                    self._backward_in_workers(method, graphs, gradient, keep_graph, shards)
                self.meter.stop()
                with self.ranges.of("reduce"):
                    self.backward.after()
            except torch.OutOfMemoryError:
                # What they hold is needed to do the step again.
                graphs.clear()
                shards.parts.clear()
                raise
            self._interrupted = None
            self.worked(training=True)

        return with_separate_backward(joint, backward_each, self._asked_for())

    def _asked_for(self) -> list[nn.Parameter]:
        """Parameters of which an own backward may ask gradients, without those that have hooks.

        Autograd calls hooks although there is no gradient for them.
        """
        if not self.has_own_backward:
            return []
        return [
            parameter
            for parameter in self.replicas.parameters[0]
            if parameter.requires_grad
            and not parameter._backward_hooks
            and not parameter._post_accumulate_grad_hooks
        ]

    def _backward_in_workers(
        self, method: str, graphs: list[Graph], gradient: Tensor, keep_graph: bool, shards: Shards
    ) -> None:
        """On the CPU: a backward for each replica, as on the calling thread they would queue."""
        calls = [
            (k, partial(loss.backward, gradient * weight, retain_graph=keep_graph))
            for k, loss, weight in graphs
        ]
        _, seconds = self._run(method, "backward", calls, shards)
        for (k, _), spent in zip(calls, seconds, strict=True):
            self.meter.add(k, spent)


def backward_at_once(
    graphs: list[Graph],
    gradient: Tensor,
    keep_graph: bool,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """On accelerators, which have an autograd thread each: one backward runs on all of them."""
    losses = [loss for _, loss, _ in graphs]
    gradients = [(gradient * weight).to(loss) for _, loss, weight in graphs]
    torch.autograd.backward(losses, gradients, retain_graph=keep_graph, inputs=inputs)


def _step(method: str, args: tuple[Any, ...], module: nn.Module, shard: Any) -> Any:
    return getattr(module, method)(shard, *args)
