"""The backward of the joint loss: that of every replica's loss, each with its weight.

On the CPU one backward through all graphs would run on one thread; this way every replica runs its
own in its worker. And nobody but `JointBackward` holds the replicas' graphs: they can be let go in
the middle, when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.gradients.loss import Graph
from lightning_dp.parallel.torch_private import keeps_graph, will_run
from lightning_dp.parallel.workers import Task

Run: TypeAlias = Callable[["JointBackward", Tensor, bool], None]
"""Runs the replicas' backwards and gives all parameters their gradients, given the gradient of the
joint loss and whether graphs are kept."""


class JointBackward:
    """What the backward of a joint loss does, when somebody calls it.

    Args:
        name: of the step, for errors.
        shards: what its replicas worked on.
        graphs: of all replicas that returned a loss. Those of weight 0 are left out: such a loss is
            a mean over nothing, it may be NaN, and so would its gradient be.
        crosses: whether the graph of one replica goes on in that of another: then none of them has
            a backward of its own.
        run: see `Run`.
    """

    def __init__(
        self, name: str, shards: Shards, graphs: Sequence[Graph], crosses: bool, run: Run
    ) -> None:
        self.name = name
        self.shards = shards
        self.graphs = [g for g in graphs if g.weight != 0 and g.loss.requires_grad]
        self.crosses = crosses
        self._run = run

    def attach(self, joint: Tensor, requested_parameters: Sequence[Tensor] = ()) -> Tensor:
        """A loss of the same value whose backward is this one.

        Args:
            joint: the value.
            requested_parameters: of which somebody may want the gradients alone, which is refused.
                A backward of these would else find no way to them, and do nothing.
        """
        inputs = (joint.detach().requires_grad_(), self, *requested_parameters)
        return _JointLoss.apply(*inputs)  # type: ignore[no-any-return,no-untyped-call]

    def tasks(
        self, gradient: Tensor, keep_graph: bool, devices: Sequence[torch.device]
    ) -> list[Task]:
        """The replicas' own backwards."""
        return [
            Task(
                graph.replica,
                devices[graph.replica],
                partial(graph.loss.backward, gradient * graph.weight, retain_graph=keep_graph),
                partial(self.shards.place, "backward", graph.replica),
            )
            for graph in self.graphs
        ]

    def __call__(self, gradient: Tensor, keep_graph: bool) -> None:
        """Runs it."""
        try:
            self._run(self, gradient, keep_graph)
        except torch.OutOfMemoryError:
            # What they hold is needed to do the step again.
            self.graphs.clear()
            self.shards.parts.clear()
            raise


def backward_at_once(
    graphs: Sequence[Graph],
    gradient: Tensor,
    keep_graph: bool,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """On accelerators, which have an autograd thread each: one backward runs on all of them."""
    gradients = [(gradient * graph.weight).to(graph.loss) for graph in graphs]
    losses = [graph.loss for graph in graphs]
    torch.autograd.backward(losses, gradients, retain_graph=keep_graph, inputs=inputs)


def _refuse_graph_of_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Expected a backward without create_graph=True on the joint loss: the sums of the "
            "replicas' gradients have no graph. Take second derivatives inside training_step, "
            "where torch.autograd.grad(..., create_graph=True) works on every replica."
        )


def _refuse_some_gradients(node: Any) -> None:
    """Raises an error in a backward that is not for all leaves: those come first in the graph."""
    leaf, _ = node.next_functions[0]
    if not will_run(leaf):
        raise RuntimeError(
            "Expected loss.backward() for all parameters of the module, got inputs=... or "
            "torch.autograd.grad on the joint loss, which has no graph of its own. Take such "
            "gradients inside training_step, use manual optimisation, where "
            "self.manual_backward(loss, inputs=...) works, or "
            'DataParallelStrategy(mode="forward").'
        )


class _JointLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, joint: Tensor, joint_backward: JointBackward, *requested: Tensor
    ) -> Tensor:
        ctx.joint_backward = joint_backward  # type: ignore[attr-defined]
        ctx.num_inputs = 2 + len(requested)  # type: ignore[attr-defined]
        return joint.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        _refuse_graph_of_backward()
        _refuse_some_gradients(ctx)
        keep_graph = keeps_graph()
        ctx.joint_backward(gradient, keep_graph)
        nothing: tuple[None, ...] = (None,) * ctx.num_inputs
        return nothing


def wait_for_autograd(devices: Sequence[torch.device]) -> None:
    """Waits until autograd's threads are done with a backward that has failed.

    Whoever asked for it is told of the first error, while the threads of other devices may still
    work: they hold its graph, and write gradients. A little backward of all devices goes through
    the same threads after what they have begun. It is made in a new thread, whose work has the
    lowest numbers: among what waits for a device, that comes last.

    Not for code that itself runs in a backward: its own thread would wait for itself.

    Args:
        devices: those whose threads are waited for; the CPU has none.
    """

    def pass_through() -> None:
        ends = [torch.zeros(0, device=device, requires_grad=True) for device in others]
        ways = [end.clone() for end in ends]
        torch.autograd.grad(ways, ends, [torch.zeros_like(end) for end in ends])

    if others := [device for device in dict.fromkeys(devices) if device.type != "cpu"]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pass_through).result()
