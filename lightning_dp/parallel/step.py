"""Step mode: a step runs in every replica on its shard; losses are joined, gradients summed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.call import ReplicaCall, Transfer
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.gather import without_rows
from lightning_dp.parallel.reduce import (
    JointBackward,
    LossReduction,
    StepOutput,
    agreed_items,
    join_losses,
    loss_of,
    loss_weights,
    parse_outputs,
    wait_for_autograd,
)
from lightning_dp.parallel.scatter import Shards, to_device
from lightning_dp.parallel.torch_private import hooked

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import JointLoss


_REQUIRES_GRAD = attrgetter("requires_grad")


class StepParallel(Engine):
    """Runs a method of a module on all replicas, each on its shard of the batch.

    What comes back is what one device would have returned: outputs in order, the loss of the
    whole batch, and after its backward the gradients of the whole batch in the root's parameters.

    Example:
        >>> class Net(nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().mean()
        >>> cpu = torch.device("cpu")
        >>> net = Net(3, 1)
        >>> engine = StepParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (n - 1, 1))
        >>> engine.train("training_step", torch.randn(8, 3)).backward()
        >>> net.weight.grad.shape
        torch.Size([1, 3])
        >>> engine.close()
    """

    expects_samples = True

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
        self.has_own_backward = False  # the module overrides `backward`
        self.has_warned_of_none = False

    def train(self, method: str, batch: Any, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and joins the losses; see `TrainingStep`."""
        return self.step(TrainingStep(self, method, args), batch)

    def evaluate(self, method: str, batch: Any, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and gathers what it returns."""
        return self.step(EvaluationStep(self, method, args), batch)


class EvaluationStep(ReplicaCall):
    """Calls a method of the module with each shard, and gathers what it returns."""

    is_training = False
    shards: Shards  # of the latest call

    def __init__(
        self,
        engine: StepParallel,
        method: str,
        args: tuple[Any, ...] = (),
        transfer: Transfer = to_device,
    ) -> None:
        super().__init__(method, training=self.is_training, transfer=transfer)
        self.engine, self.args = engine, args
        if self.training and engine.frozen_may_change:
            self.copied_parameters = "frozen"

    def begin(self, shards: Shards) -> None:
        """Remembers the shards: an optimizer's closure may come for the same ones again."""
        self.shards = shards
        if torch.is_grad_enabled():
            self.engine.replicas.refuse_trained_buffers()

    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """The replica's own method."""
        return getattr(module, self.name)(shard, *self.args)

    def gather(self, outputs: Any, shards: Shards) -> Any:
        """See `gather`."""
        return self.engine.join(outputs, shards)


class TrainingStep(EvaluationStep):
    """Calls a method of the module with each shard, and joins the losses that it returns.

    The method returns a loss, or a mapping with the key "loss", or None to leave its shard out. If
    the loss is a mean over something else than samples, "num_items" says how many: an entry of
    the mapping or an attribute of the loss.

    What comes of it is as the method returns it: the joint loss, whose backward fills the root's
    `.grad`; a dict with it and the other entries gathered; or None if no replica returned a loss.
    """

    is_training = has_backward = True
    _of_ranks: JointLoss | None = None

    def to_cpu(self, outputs: list[Any], devices: Collection[torch.device]) -> Any:
        """Losses stay, too: their backward begins where they are."""
        steps = parse_outputs(self.shards.active, outputs)
        parts = [(step.loss.detach(), step.num_items, step.extras) for step in steps.values()]
        return {
            k: step._replace(value=value, num_items=items, extras=extras)
            for (k, step), (value, items, extras) in zip(
                steps.items(), super().to_cpu(parts, devices), strict=True
            )
        }

    def gather(self, outputs: Any, shards: Shards) -> Any:
        """The joint loss, with its backward."""
        engine, world = self.engine, self.engine.world
        steps: dict[int, StepOutput] = outputs
        if not isinstance(outputs, dict):
            steps = parse_outputs(shards.active, outputs)
        if 0 < len(steps) < len(shards.active):
            self._warn_of_none(len(shards.active) - len(steps), len(shards.active))
        sizes, counts, losses, values = [], [], list[Tensor](), []
        for k, step in steps.items():
            sizes.append(shards.sizes[k])
            counts.append(step.num_items)
            losses.append(step.loss)
            values.append(step.loss if step.value is None else step.value)
        loss, items, weights, has_graph = None, None, list[float](), False
        if steps:
            known = agreed_items(counts)
            items = None if known is None else sum(known)
            weights = loss_weights(sizes, engine.loss_reduction, known)
            loss = join_losses(values, weights, engine.output_device)
            has_graph = any(map(_REQUIRES_GRAD, losses))
        if world is not None:
            joint = self._of_ranks
            if joint is None:  # else it is a rerun after out-of-memory: the others have gone on
                from lightning_dp.parallel.processes import exchange_losses

                samples = sum(sizes) or sum(shards.sizes)
                is_sum = engine.loss_reduction == "sum"
                kind = {"has_graph": has_graph, "is_sum": is_sum}
                joint = self._of_ranks = exchange_losses(loss, samples, items, world, **kind)
            engine.reducer.rank_samples = joint.samples
            loss = None if joint.value is None else joint.on(engine.output_device)
            weights = [weight * joint.share for weight in weights]
            items, has_graph = joint.items, joint.has_graph
        if loss is not None and has_graph:
            backward = JointBackward(
                self.name,
                shards,
                zip(steps, losses, weights, strict=True),
                engine.backward,
                engine.accelerators,
                crosses=engine.calls.crossed,
            )
            loss = backward.attach(loss, self._requested_parameters())
        first = next(iter(steps.values()), None)
        if first is None or first.extras is None:
            return loss
        extras = engine.join([step.extras for step in steps.values()], shards, list(steps))
        if world is not None and world.is_idle:
            extras = without_rows(extras, shards.row_rules.dim, sum(shards.sizes))
        whole: dict[str, Any] = {"loss": loss, **extras}
        if first.has_items_entry:
            whole["num_items"] = items
            if isinstance(first.num_items, Tensor):  # then that of all is one, too
                device = engine.output_device
                whole["num_items"] = torch.full_like(first.num_items, items or 0, device=device)
        return whole

    def _requested_parameters(self) -> Sequence[Tensor]:
        """Parameters of which an own backward may ask gradients, without those that have hooks.

        Autograd calls hooks although there is no gradient for them.
        """
        if not self.engine.has_own_backward:
            return ()
        parameters = self.engine.replicas.root_parameters
        with_hooks = set(hooked(parameters))
        return [p for i, p in enumerate(parameters) if p.requires_grad and i not in with_hooks]

    def _warn_of_none(self, count: int, of: int) -> None:
        """Warns once that some replicas returned no loss while others did."""
        if not self.engine.has_warned_of_none:
            self.engine.has_warned_of_none = True
            warnings.warn(
                f"{self.name}: expected a loss from every replica or from none, got None from "
                f"{count} of {of}. Their samples are left out; one device leaves out the whole "
                "batch. Let all decide alike, by what self.all_gather(...) returns, or use "
                'DataParallelStrategy(mode="forward").',
                stacklevel=2,
            )

    def finish(self, result: Any, gradient: Tensor) -> None:
        """The joint loss's backward."""
        loss = loss_of(result)
        if loss is None or not loss.requires_grad:
            return
        try:
            loss.backward(gradient)
        except torch.OutOfMemoryError:
            wait_for_autograd(self.engine.devices)
            raise
