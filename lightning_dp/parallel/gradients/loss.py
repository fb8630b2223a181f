"""Loss: the replicas' losses become one loss, whose backward is theirs.

The joint loss is sum(w_i * loss_i), so its gradient is the weighted sum of the replicas'. On the
CPU one backward through all graphs would run on one thread; so every replica runs its own in its
worker. And nobody but `JointBackward` holds the replicas' graphs: they can be let go in the middle,
when memory runs out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.gradients.items import count_of, numbers_of
from lightning_dp.parallel.links import joining_device, on_streams, side_streams
from lightning_dp.parallel.torch_private import keeps_graph, will_run
from lightning_dp.parallel.workers import Task

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import Crossings

LossReduction: TypeAlias = Literal["mean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "sum")

Run: TypeAlias = Callable[["JointBackward", Tensor, bool], None]
"""A method that runs the replicas' backwards and gives all parameters their gradients, given the
gradient of the joint loss and whether graphs are kept."""


@dataclass(frozen=True)
class Graph:
    """The graph of one replica: its loss, of one element, and what that weighs in the joint one.

    The loss's value may be somewhere else already.
    """

    replica: int
    loss: Tensor
    weight: float
    value: Tensor | None = None


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


@dataclass(frozen=True)
class StepOutput:
    """What `training_step` returned on one replica."""

    loss: Tensor
    num_items: float | Tensor | None  # what the loss is a mean over, where that is not samples
    extras: dict[str, Any] | None  # other entries of a returned mapping; None for a bare loss
    tells_items: bool  # by an entry
    value: Tensor | None = None  # of the loss, where that has gone somewhere else

    _KEYS: ClassVar[tuple[str, ...]] = ("loss", "num_items")

    @classmethod
    def parse(cls, output: Any) -> StepOutput:
        """Takes a step's output apart, or says what is wrong with it."""
        if isinstance(output, StepOutput):
            return output
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else output
        if not isinstance(loss, Tensor):
            raise NoLossError(output)
        if loss.numel() != 1:
            raise ValueError(
                f"Expected a loss of one element, got shape {tuple(loss.shape)}. "
                "Take its mean over the samples."
            )
        told = output.get("num_items") if is_mapping else None
        told = getattr(loss, "num_items", None) if told is None else told
        items = None if told is None else count_of(told)
        extras = {k: v for k, v in output.items() if k not in cls._KEYS} if is_mapping else None
        return cls(loss, items, extras, is_mapping and "num_items" in output)


def loss_of(output: Any) -> Tensor | None:
    """The joint loss in what a training step returned."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    return loss


def agreed_items(counts: Sequence[float | Tensor | None]) -> list[float] | None:
    """The replicas' item counts, or None where the losses are means over samples."""
    told = [count for count in counts if count is not None]
    if not told:
        return None
    known = numbers_of(told)
    if len(known) < len(counts) or min(known) < 0:
        numbers = iter(known)
        got = [None if count is None else next(numbers) for count in counts]
        raise ValueError(
            f"Expected num_items of at least 0 from every replica, got {got}. Give it for every "
            "shard: the number of items that the loss is a mean over."
        )
    return known


def loss_weights(
    sizes: Sequence[int], reduction: LossReduction, num_items: Sequence[float] | None = None
) -> list[float]:
    """The weight of each replica's loss in the joint loss: 1 in a sum, n_i / sum(n) in a mean.

    What the means are over, if not samples (but valid tokens, say), takes the place of the sizes.
    If all these counts are 0, every mean is over nothing, and so is theirs: samples count again.

    Example:
        >>> loss_weights([3, 1], "mean"), loss_weights([3, 1], "mean", num_items=[0, 7])
        ([0.75, 0.25], [0.0, 1.0])
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    counts = num_items if num_items is not None and any(num_items) else sizes
    total = sum(counts)
    return [count / total for count in counts]


def join_losses(graphs: Sequence[Graph], output_device: torch.device) -> Tensor:
    """sum(w_i * loss_i) on the output device, attached to the graphs of all replicas.

    A loss of weight 0 is left out: it contributes nothing, even if it is NaN.

    Example:
        >>> graphs = [Graph(0, torch.tensor(1.0), 1.0), Graph(1, torch.tensor(float("nan")), 0.0)]
        >>> join_losses(graphs, torch.device("cpu"))
        tensor(1.)
    """
    counting = [graph for graph in graphs if graph.weight != 0]
    values = [graph.loss if graph.value is None else graph.value for graph in counting]
    if {value.device for value in values} != {output_device}:
        device = joining_device(values, output_device)
        values = [value.to(device) for value in values]
    joint = values[0] * counting[0].weight
    for loss, graph in zip(values[1:], counting[1:], strict=True):
        joint = joint.add(loss, alpha=graph.weight)
    return joint.to(output_device)


class JointBackward:
    """What the backward of a joint loss does, when somebody calls it.

    Graphs of weight 0 are left out: such a loss is a mean over nothing, it may be NaN, and so would
    its gradient be. Where the graph of one replica goes on in that of another (`crosses`), none of
    them has a backward of its own. All of it runs on the streams that are current on the `devices`
    when it is made, by the method `run`, whose owner it does not keep alive: a graph that reaches
    what holds it is never freed. Through `crossings` it goes on in other processes; whether it
    `is_last` is for these to know.
    """

    inputs: Sequence[Any] = ()  # of each replica, whose gradients alone are wanted
    _end: Tensor | None = None  # of what goes on in other processes

    def __init__(
        self,
        name: str,
        shards: Shards,
        graphs: Sequence[Graph],
        crosses: bool,
        run: Run,
        devices: Sequence[torch.device],
        crossings: Crossings | None = None,
        *,
        is_last: bool = True,
    ) -> None:
        self._crossings, self._is_last = crossings, is_last
        self.name = name
        self.shards = shards
        self.graphs = [g for g in graphs if g.weight != 0 and g.loss.requires_grad]
        self.crosses = crosses
        self._run = weakref.WeakMethod(run)
        self._streams = side_streams(devices) if devices else []

    def attach(self, joint: Tensor, requested_parameters: Sequence[Tensor] = ()) -> Tensor:
        """A loss of the same value whose backward is this one.

        Somebody may want the gradients of the requested parameters alone, which is refused. A
        backward of these would else find no way to them, and do nothing.
        """
        inputs = (joint.detach().requires_grad_(), self, *requested_parameters)
        return _joint_loss(*inputs)

    def tasks(
        self,
        gradient: Tensor,
        keep_graph: bool,
        devices: Sequence[torch.device],
        before_last: Callable[[], None] | None = None,
    ) -> list[Task]:
        """The replicas' own backwards; something may have to be called before the last one."""
        tasks = [
            Task(
                graph.replica,
                devices[graph.replica],
                partial(graph.loss.backward, gradient * graph.weight, retain_graph=keep_graph),
                partial(self.shards.place, "backward", graph.replica),
            )
            for graph in self.graphs
        ]
        if before_last is not None and tasks:
            tasks[-1] = replace(tasks[-1], call=partial(_after, before_last, tasks[-1].call))
        return tasks

    @property
    def fills(self) -> Sequence[int]:
        """The replicas whose parameters it gives gradients, in order."""
        return self.shards.active if self.crosses else [graph.replica for graph in self.graphs]

    def __call__(self, gradient: Tensor, keep_graph: bool) -> None:
        """Runs it."""
        run = self._run()
        if run is None:
            raise RuntimeError(
                "Expected the backward of a loss whose engine still exists, got that of one that "
                "is gone. Keep the engine until then."
            )
        try:
            # Autograd's thread has other ones.
            with on_streams(self._streams) if self._streams else nullcontext():
                if self._crossings is not None:
                    keep_graph = self._cross(self._crossings, keep_graph)
                run(self, gradient, keep_graph)
        except torch.OutOfMemoryError:
            # What they hold is needed to do the step again.
            self._crossings = None
            self.graphs.clear()
            self.shards.parts.clear()
            raise

    def _cross(self, crossings: Crossings, keep_graph: bool) -> bool:
        """Begins at the end of the crossings, too; whether the graph is to be kept."""
        self.graphs = [graph for graph in self.graphs if graph.loss is not self._end]
        losses = [graph.loss for graph in self.graphs]
        end, keep_graph = crossings.end_for(losses, keep_graph, is_last=self._is_last)
        self._end = end
        if end is not None:
            self.graphs.append(Graph(next(iter(self.shards.active), 0), end, 1.0))
        return keep_graph


class _JointLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, backward: JointBackward, *requested: Tensor) -> Tensor:
        ctx.joint_backward = backward
        ctx.num_inputs = 2 + len(requested)
        return joint.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        _check_can_run(ctx)
        ctx.joint_backward(gradient, keeps_graph())
        nothing: tuple[None, ...] = (None,) * ctx.num_inputs
        return nothing


_joint_loss: Callable[..., Tensor] = _JointLoss.apply


def _after(first: Callable[[], None], call: Callable[[], Any]) -> Any:
    first()
    return call()


def _check_can_run(node: Any) -> None:
    """Refuses a backward that has a graph itself, or that is not for all leaves."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Expected a backward without create_graph=True on the joint loss: the sums of the "
            "replicas' gradients have no graph. Take second derivatives inside training_step, "
            "where torch.autograd.grad(..., create_graph=True) works on every replica."
        )
    leaf, _ = node.next_functions[0]  # leaves come first in the graph
    if not will_run(leaf):
        raise RuntimeError(
            "Expected loss.backward() for all parameters of the module, got inputs=... or "
            "torch.autograd.grad on the joint loss, which has no graph of its own. Take such "
            "gradients inside training_step, use manual optimisation, where "
            "self.manual_backward(loss, inputs=...) works, or "
            'DataParallelStrategy(mode="forward").'
        )
