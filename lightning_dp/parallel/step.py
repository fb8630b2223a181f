"""Step mode: a step runs in every replica on its shard; losses are joined, gradients summed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.engine import Engine, ReplicaCall, Transfer
from lightning_dp.parallel.gather import without_rows
from lightning_dp.parallel.reduce import JointBackward
from lightning_dp.parallel.scatter import Shards, to_device
from lightning_dp.parallel.torch_private import hooks_of

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import JointLoss

LossReduction: TypeAlias = Literal["mean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "sum")


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
    has_own_backward = False  # the module overrides `backward`
    has_warned_of_none = False

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
            self.resends_frozen = True

    def begin(self, shards: Shards) -> None:
        """Remembers the shards: an optimizer's closure may come for the same ones again."""
        self.shards = shards
        if torch.is_grad_enabled():
            self.engine.replicas.refuse_trained_buffers()

    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """The replica's own method."""
        return getattr(module, self.name)(shard, *self.args)

    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """The outputs of the whole batch."""
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

    def on_replica(self, module: nn.Module, shard: Any) -> StepOutput | None:
        """The replica's own method; returns its output taken apart."""
        output = getattr(module, self.name)(shard, *self.args)
        if type(output) is Tensor and output.numel() == 1 and not output.__dict__:
            return StepOutput(output, output.detach())  # as `parse` would; the usual case
        return None if output is None else StepOutput.parse(output)

    def to_cpu(self, outputs: list[Any], devices: Sequence[torch.device]) -> list[Any]:
        """Copies values only: the losses' backward begins where they are."""
        parts = [step and (step.value, step.num_items, step.extras) for step in outputs]
        return [
            step and step._replace(value=part[0], num_items=part[1], extras=part[2])
            for step, part in zip(outputs, super().to_cpu(parts, devices), strict=True)
        ]

    def gather(self, outputs: list[StepOutput | None], shards: Shards) -> Any:
        """The joint loss, with its backward."""
        engine, world = self.engine, self.engine.world
        steps = {k: step for k, step in zip(shards.active, outputs, strict=True) if step}
        if 0 < len(steps) < len(outputs):
            self._warn_of_none(len(outputs) - len(steps), len(outputs))
        loss, items, weights = None, None, list[float]()
        if steps:
            counts = agreed_items([step.num_items for step in steps.values()])
            items = None if counts is None else sum(counts)
            weights = loss_weights([shards.sizes[k] for k in steps], engine.loss_reduction, counts)
            values = [step.value for step in steps.values()]
            loss = join_losses(values, weights, engine.output_device)
        has_graph = any([step.loss.requires_grad for step in steps.values()])
        if world is not None:
            joint = self._of_ranks
            if joint is None:  # else it is a rerun after out-of-memory: the others have gone on
                from lightning_dp.parallel.processes import exchange_losses

                samples = sum([shards.sizes[k] for k in steps]) or sum(shards.sizes)
                is_sum = engine.loss_reduction == "sum"
                kind = {"has_graph": has_graph, "is_sum": is_sum}
                joint = self._of_ranks = exchange_losses(loss, samples, items, world, **kind)
            engine.reducer.rank_samples = joint.samples
            loss = None if joint.value is None else joint.on(engine.output_device)
            weights = [weight * joint.share for weight in weights]
            items, has_graph = joint.items, joint.has_graph
        if loss is not None and has_graph:
            losses = [step.loss for step in steps.values()]
            # An own backward may ask for some parameters' gradients alone, which is refused.
            asked = engine.replicas.root_parameters if engine.has_own_backward else ()
            requested = [p for p in asked if p.requires_grad and not any(hooks_of(p))]
            loss = JointBackward(
                self.name,
                shards,
                zip(steps, losses, weights, strict=True),
                engine.backward,
                engine.accelerators,
                crosses=engine.calls.crossed,
            ).attach(loss, requested)
        first = next(iter(steps.values()), None)
        if first is None or first.extras is None:
            return loss
        sizes = tuple([size if k in steps else 0 for k, size in enumerate(shards.sizes)])
        own = replace(shards, sizes=sizes)
        extras = engine.join([step.extras for step in steps.values()], own)
        if world is not None and world.is_idle:
            extras = without_rows(extras, shards.row_rules.dim, sum(shards.sizes))
        if first.has_items_entry:
            extras["num_items"] = items
            if isinstance(first.num_items, Tensor):  # then that of all is one, too
                device = engine.output_device
                extras["num_items"] = torch.full_like(first.num_items, items or 0, device=device)
        return {"loss": loss, **extras}

    def _warn_of_none(self, count: int, of: int) -> None:
        """Warns once that some replicas returned no loss while others did."""
        if not self.engine.has_warned_of_none:
            self.engine.has_warned_of_none = True
            warnings.warn(
                f"{self.name}: expected a loss from every replica or from none, got None from "
                f"{count} of {of}. Their samples are left out. Let all replicas decide alike, by "
                "what self.all_gather(...) returns.",
                stacklevel=2,
            )


# What a step returns


class NoLossError(TypeError):
    """A step returned something else than a loss; `output` is that."""

    def __init__(self, output: Any) -> None:
        is_mapping = isinstance(output, Mapping)
        got = f"a mapping with keys {list(output)}" if is_mapping else type(output).__qualname__
        super().__init__(
            "Expected training_step to return a loss tensor, a mapping with one under 'loss', "
            f"or None, got {got}. Return the loss of the samples in the batch."
        )
        self.output = output


class StepOutput(NamedTuple):
    """What `training_step` returned on one replica."""

    loss: Tensor
    value: Tensor  # the loss without its graph; may be on the CPU
    num_items: float | Tensor | None = None  # what the loss is a mean over, if not samples
    extras: dict[str, Any] | None = None  # other entries of a returned mapping
    has_items_entry: bool = False  # the mapping has "num_items"

    @classmethod
    def parse(cls, output: Any) -> StepOutput:
        """Takes a step's output apart, or raises an error that names what is wrong with it."""
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else output
        if not isinstance(loss, Tensor):
            raise NoLossError(output)
        if loss.numel() != 1:
            raise ValueError(
                f"Expected a loss of one element, got shape {tuple(loss.shape)}. "
                "Take its mean over the samples."
            )
        items = output.get("num_items") if is_mapping else None
        items = getattr(loss, "num_items", None) if items is None else items
        is_one = isinstance(items, Tensor) and items.numel() == 1
        if not (items is None or is_one or isinstance(items, int | float)):
            got = str(tuple(items.shape)) if isinstance(items, Tensor) else type(items).__qualname__
            raise TypeError(
                f"Expected num_items to be a number or a tensor of one element, got {got}. Give "
                "the number of items that the loss is a mean over."
            )
        if not is_mapping:
            return cls(loss, loss.detach(), items)
        extras = {k: v for k, v in output.items() if k not in ("loss", "num_items")}
        return cls(loss, loss.detach(), items, extras, "num_items" in output)


def agreed_items(counts: Sequence[float | Tensor | None]) -> list[float] | None:
    """The replicas' item counts, or None where the losses are means over samples.

    The calling thread waits once for counts that lie on accelerators.
    """
    if counts.count(None) == len(counts):
        return None
    tensors = [count.detach().reshape(()) for count in counts if isinstance(count, Tensor)]
    device = _scalar_device(tensors, torch.device("cpu"))
    values = iter(torch.stack([t.to(device) for t in tensors]).tolist() if tensors else ())
    known = [next(values) if isinstance(count, Tensor) else count for count in counts]
    agreed = [n for n in known if n is not None and math.isfinite(n) and n >= 0]
    if len(agreed) < len(counts):
        raise ValueError(
            f"Expected finite num_items of at least 0 from every replica, got {known}. Give it for "
            "every shard: the number of items that the loss is a mean over."
        )
    return agreed


def loss_weights(
    sizes: Sequence[int], reduction: LossReduction, num_items: Sequence[float] | None = None
) -> list[float]:
    """The weight of each replica's loss in the joint loss: 1 in a sum, n_i / sum(n) in a mean.

    Item counts, if given, take the place of the sizes, unless all of them are 0.
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    counts = num_items if num_items is not None and any(num_items) else sizes
    total = sum(counts)
    return [count / total for count in counts]


def join_losses(
    losses: Sequence[Tensor], weights: Sequence[float], output_device: torch.device
) -> Tensor:
    """The value sum(w_i * loss_i) of losses without graphs, on the output device.

    A loss of weight 0 is left out, even if it is NaN.
    """
    device, joint = _scalar_device(losses, output_device), None
    for loss, weight in zip(losses, weights, strict=True):
        if weight:
            value = loss.to(device)
            joint = value * weight if joint is None else joint.add(value, alpha=weight)
    assert joint is not None
    return joint.to(output_device)


def _scalar_device(values: Sequence[object], output_device: torch.device) -> torch.device:
    """Where a few small values become one: not on the CPU, which would wait for each device."""
    if output_device.type == "cpu":
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return value.device
    return output_device
