"""Forward mode in several processes: each runs the step with its samples, and one loss is of all.

A process's loss weighs in it what its samples do. Its backward gives the gradients of all
processes, those of parameters, too, which the step uses outside of spread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.gradients import (
    Graph,
    HooksOff,
    JointBackward,
    LossReduction,
    NoLossError,
    StepOutput,
    backward_at_once,
    sum_of_losses,
)
from lightning_dp.parallel.processes import (
    Crossings,
    JointLoss,
    OwnLoss,
    World,
    join_processes,
    one_graph,
)
from lightning_dp.parallel.torch_private import backwards_go_to, hooked


class ForwardLosses:
    """The losses of steps that every process runs once, with its part of the batch.

    Gradients are summed at the end of each backward, unless they accumulate; see `Between`.
    """

    def __init__(
        self, engine: ForwardParallel, world: World, loss_reduction: LossReduction
    ) -> None:
        self._engine, self._world = engine, world
        self._buffers = cast(Any, engine.reducer.buffers_between)
        self._buffers.by_steps = False
        self._is_sum = loss_reduction == "sum"
        self._samples = 0  # of the step that runs
        self._inside = False  # a backward of ours
        self._is_by_hand = False
        self._crossings: Crossings | None = None

    def step(self, call: Callable[[], Any], size: int, *, by_hand: bool) -> Any:
        """Calls a training step for this process's samples; what it is to return.

        That is with the loss of all processes in the place of its own; but if it trains by hand,
        each of its backwards is one of all processes' losses.
        """
        self._samples = 0 if self._world.is_idle else size
        self._is_by_hand = by_hand
        # Collectives that the step calls join the graphs of all processes.
        with one_graph(self._world, size) as self._crossings:
            if not by_hand:
                return self._joined(call())
            with backwards_go_to(self._hand_over):
                return call()

    def _joined(self, output: Any) -> Any:
        try:
            step = None if output is None else StepOutput.parse(output)
        except NoLossError:
            return output  # Lightning says what is wrong with it
        joint = self._loss(step)
        is_mapping = isinstance(output, Mapping)
        return {**output, "loss": joint} if is_mapping and joint is not None else joint

    def number(self, value: Any) -> Any:
        """What an optimizer's closure returns: of all processes, if it is a loss."""
        is_loss = isinstance(value, Tensor) and value.numel() == 1
        told = self._told(StepOutput.parse(value.detach()) if is_loss else None)
        is_told = is_loss and told.value is not None
        return torch.full_like(value, cast(float, told.value)) if is_told else value

    def _told(self, step: StepOutput | None) -> JointLoss:
        own = OwnLoss(None, 0)
        if step is not None:
            loss, items = step.loss, step.num_items
            items = None if items is None else float(items)
            own = OwnLoss(
                float(loss.detach()), self._samples, items, loss.requires_grad, loss.dtype
            )
        return join_processes(own, self._world, is_sum=self._is_sum)

    def _loss(self, step: StepOutput | None, inputs: Sequence[Tensor] = ()) -> Tensor | None:
        told, output_device = self._told(step), self._engine.output_device
        if told.value is None:
            return None
        joint = torch.tensor(told.value, dtype=told.dtype, device=output_device)
        if step is not None:
            joint = joint.to(step.loss.device).reshape(step.loss.shape)
        if not told.has_graph:
            return joint
        graphs = [] if step is None else [Graph(0, step.loss, told.share)]
        crossings = self._crossings
        backward = JointBackward(
            "training_step",
            Shards((self._samples,), []),
            graphs,
            crossings is not None and crossings.are_there,
            self._backward,
            [*self._engine.devices, output_device],
            crossings,
            is_last=not self._is_by_hand,
        )
        backward.inputs = inputs
        return backward.attach(joint)

    def _backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        reducer, parameters = self._engine.reducer, self._engine.replicas.root_parameters
        between: Any = reducer.between
        positions = hooked(parameters)
        with_hooks = [parameters[i] for i in positions]
        waiting = between.own_among(with_hooks)
        if waiting:  # these have hooks since the latest backward, which accumulated
            between.sum_(waiting)
        between.begin(parameters, positions, stay=reducer.accumulating)
        if not positions and not joint.crosses:
            between.leave_early()
        off = [(HooksOff(parameter), parameter.grad) for parameter in with_hooks]
        try:
            for parameter, (hooks, _) in zip(with_hooks, off, strict=True):
                hooks.take()
                parameter.grad = None
            if joint.graphs:
                with replaced(self, _inside=True):
                    inputs = list(joint.inputs) or None
                    backward_at_once(joint.graphs, gradient, keep_graph, inputs)
        finally:
            for hooks, _ in off:
                hooks.put_back()
        if with_hooks:  # one device calls them in every backward, also while gradients accumulate
            between.sum_(with_hooks)
        for hooks, earlier in off:
            hooks.call(earlier)
        if not reducer.accumulating:
            between.finish()
        self._buffers.share_rows()

    def _hand_over(
        self,
        run: Callable[[], Any],
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor],
    ) -> Any:
        """`loss.backward()`, `torch.autograd.backward(...)` or `manual_backward` in a step."""
        if self._inside:
            return run()
        if create_graph:
            raise ValueError(
                "Expected a backward without create_graph=True in several processes: the sums of "
                "their gradients have no graph. Take second derivatives by "
                "torch.autograd.grad(..., create_graph=True) before the backward of the loss."
            )
        loss, gradient = _one_loss(tensors, gradients)
        joint = self._loss(StepOutput.parse(loss), inputs)
        if joint is None or not joint.requires_grad:
            return run()  # torch says what is missing
        with replaced(self, _inside=True):
            return torch.autograd.backward(joint, gradient, retain_graph=keep_graph)


def _one_loss(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Several losses whose backward runs at once are their sum, weighted by their gradients."""
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0], gradients[0]
    return sum_of_losses(tensors, gradients), None
