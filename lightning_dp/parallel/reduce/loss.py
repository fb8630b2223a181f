"""Loss: the replicas' losses become one loss, whose backward is theirs.

The joint loss is sum(w_i * loss_i), so its gradient is the weighted sum of the replicas'.

[Note: one backward per replica on the CPU] Autograd runs a joint backward of CPU graphs on the
calling thread, so K replicas would queue. Each replica's backward therefore runs in its own worker.
Accelerators have an autograd thread per device: there one joint backward runs them all at once.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply import Task
from lightning_dp.parallel.comm import on_streams, scalar_device, side_streams
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import keeps_graph, will_run

LossReduction: TypeAlias = Literal["mean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "sum")

Run: TypeAlias = Callable[["JointBackward", Tensor, bool], None]
"""A method that runs the replicas' backwards, given the joint loss's gradient and whether graphs
are kept."""

_CPU = torch.device("cpu")
_DEVICE = attrgetter("device")


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
    num_items: float | Tensor | None = None  # what the loss is a mean over, if not samples
    extras: dict[str, Any] | None = None  # other entries of a returned mapping
    has_items_entry: bool = False  # the mapping has "num_items"
    value: Tensor | None = None  # the loss's value, where it was copied to the CPU

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
            got = tuple(items.shape) if isinstance(items, Tensor) else type(items).__qualname__
            raise TypeError(
                f"Expected num_items to be a number or a tensor of one element, got {got}. Give "
                "the number of items that the loss is a mean over."
            )
        if not is_mapping:
            return cls(loss, items)
        extras = {k: v for k, v in output.items() if k not in ("loss", "num_items")}
        return cls(loss, items, extras, "num_items" in output)


def loss_of(output: Any) -> Tensor | None:
    """The joint loss in what a training step returned."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    return loss


def parse_outputs(active: Sequence[int], outputs: Sequence[Any]) -> dict[int, StepOutput]:
    """What those replicas returned that returned a loss, by their numbers."""
    steps = {}
    for k, output in zip(active, outputs, strict=True):
        if type(output) is Tensor and output.numel() == 1 and not output.__dict__:
            steps[k] = StepOutput(output)  # as `parse` would; most steps return such a loss
        elif output is not None:
            steps[k] = StepOutput.parse(output)
    return steps


# Weights


def agreed_items(counts: Sequence[float | Tensor | None]) -> list[float] | None:
    """The replicas' item counts, or None where the losses are means over samples.

    The calling thread waits once for counts that lie on accelerators.
    """
    if counts.count(None) == len(counts):
        return None
    tensors = [count.detach().reshape(()) for count in counts if isinstance(count, Tensor)]
    device = scalar_device(tensors, _CPU)
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

    Example:
        >>> loss_weights([3, 1], "mean"), loss_weights([3, 1], "mean", num_items=[0, 7])
        ([0.75, 0.25], [0.0, 1.0])
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    counts = num_items if num_items is not None and any(num_items) else sizes
    total = sum(counts)
    return [count / total for count in counts]


@torch.no_grad()
def join_losses(
    losses: Sequence[Tensor], weights: Sequence[float], output_device: torch.device
) -> Tensor:
    """The value sum(w_i * loss_i) on the output device.

    A loss of weight 0 is left out, even if it is NaN.

    Example:
        >>> losses = [torch.tensor(1.0), torch.tensor(float("nan"))]
        >>> join_losses(losses, [1.0, 0.0], torch.device("cpu"))
        tensor(1.)
    """
    values, kept = [], []
    for loss, weight in zip(losses, weights, strict=True):
        if weight != 0:
            values.append(loss)
            kept.append(weight)
    if {*map(_DEVICE, values)} != {output_device}:
        device = scalar_device(values, output_device)
        values = [value.to(device) for value in values]
    joint = values[0] * kept[0]
    for value, weight in zip(values[1:], kept[1:], strict=True):
        joint = joint.add(value, alpha=weight)
    return joint.to(output_device)


# The joint loss


class JointBackward:
    """The backward of a joint loss. Only it holds the replicas' graphs, and frees them on OOM.

    Losses of weight 0 are left out: the gradient of a mean over nothing would be NaN.

    Args:
        name: of the step, for errors.
        shards: the batch.
        parts: replicas, their losses, and the weights of these in the joint loss.
        run: a method, held weakly: a graph that reaches its own holder is never freed.
        devices: accelerators, on whose present current streams the backward runs.
        crosses: whether one replica's graph continues in another's, so that they cannot run alone.
    """

    def __init__(
        self,
        name: str,
        shards: Shards,
        parts: Iterable[tuple[int, Tensor, float]],
        run: Run,
        devices: Sequence[torch.device],
        *,
        crosses: bool = False,
    ) -> None:
        self.name, self.shards, self.crosses = name, shards, crosses
        self.parts = [(k, loss, w) for k, loss, w in parts if w != 0 and loss.requires_grad]
        self._run = weakref.WeakMethod(run)
        self._streams = side_streams(devices) if devices else []

    def attach(self, joint: Tensor, requested_parameters: Sequence[Tensor] = ()) -> Tensor:
        """A loss of the same value whose backward is this one.

        It is a function of the requested parameters, so that a backward for these alone, which is
        refused, gets here.
        """
        return _joint_loss(joint.detach().requires_grad_(), self, *requested_parameters)

    def __call__(self, gradient: Tensor, keep_graph: bool) -> None:
        """Runs it by the engine's method."""
        run = self._run()
        if run is None:
            raise RuntimeError(
                "Expected the backward of a loss whose engine still exists, got that of one that "
                "is gone. Keep the engine until then."
            )
        try:
            # Autograd's thread has other current streams.
            with on_streams(self._streams) if self._streams else nullcontext():
                run(self, gradient, keep_graph)
        except torch.OutOfMemoryError:
            self.parts.clear()
            self.shards.parts.clear()
            raise

    def tasks(
        self, gradient: Tensor, keep_graph: bool, devices: Sequence[torch.device]
    ) -> list[Task]:
        """The replicas' backwards, see the note."""
        tasks = []
        for k, loss, weight in self.parts:
            backward = partial(loss.backward, gradient * weight, retain_graph=keep_graph)
            tasks.append(Task(k, devices[k], backward, partial(self.shards.place, "backward", k)))
        return tasks

    def start(self, gradient: Tensor, keep_graph: bool) -> Callable[[], None]:
        """One backward of all graphs; returns the call that runs it: the gradients are made now."""
        losses = [loss for _, loss, _ in self.parts]
        # Autograd makes a new gradient for each backward: this thread need not wait for its copies.
        gradients = [(gradient * w).to(loss, non_blocking=True) for _, loss, w in self.parts]
        return partial(torch.autograd.backward, losses, gradients, retain_graph=keep_graph)


class _JointLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, backward: JointBackward, *requested: Tensor) -> Tensor:
        ctx.joint_backward = backward
        ctx.num_inputs = 2 + len(requested)
        return joint.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected a backward without create_graph=True on the joint loss: the sums of the "
                "replicas' gradients have no graph. Take second derivatives inside training_step, "
                "where torch.autograd.grad(..., create_graph=True) works on every replica."
            )
        leaf, _ = ctx.next_functions[0]  # leaves come first in the graph
        if not will_run(leaf):
            raise RuntimeError(
                "Expected loss.backward() for all parameters of the module, got inputs=... or "
                "torch.autograd.grad on the joint loss, which has no graph of its own. Take such "
                "gradients inside training_step, use manual optimisation, where "
                "self.manual_backward(loss, inputs=...) works, or "
                'DataParallelStrategy(mode="forward").'
            )
        ctx.joint_backward(gradient, keeps_graph())
        return (None,) * int(ctx.num_inputs)


_joint_loss: Callable[..., Tensor] = _JointLoss.apply


def wait_for_autograd(devices: Sequence[torch.device]) -> None:
    """Waits until autograd's threads are done with a backward that has failed.

    Autograd raises the first error while the threads of other devices still work. A small backward
    of all devices queues behind their work: in a new thread it has the lowest sequence numbers,
    which come last. Never call it inside a backward, whose own thread would wait for itself.
    """

    def pass_through() -> None:
        ends = [torch.zeros(0, device=device, requires_grad=True) for device in others]
        clones = [end.clone() for end in ends]
        torch.autograd.grad(clones, ends, [torch.zeros_like(end) for end in ends])

    if others := [device for device in dict.fromkeys(devices) if device.type != "cpu"]:
        # A daemon thread, not a pool's, which the interpreter's exit would wait for.
        thread = threading.Thread(target=pass_through, name="dp-autograd", daemon=True)
        thread.start()
        while thread.is_alive():  # on Windows, Ctrl-C cannot interrupt a longer wait
            thread.join(0.5)
