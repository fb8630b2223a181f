"""Forward mode in several processes: each runs the step with its samples, and the loss is joint.

A rank's loss is weighted by its samples, and each backward gives the root the gradients of all
ranks, also those of parameters that the step uses outside of spread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.processes import JointLoss, OwnLoss, RankGraph, World, join_processes
from lightning_dp.parallel.reduce import (
    Graph,
    JointBackward,
    LossReduction,
    NoLossError,
    StepOutput,
    SuspendedHooks,
    backward_at_once,
    sum_of_losses,
)
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import backwards_go_to, hooked


class ForwardLosses:
    """Joins the losses of steps that every rank runs once, with its slice of the batch."""

    def __init__(
        self, engine: ForwardParallel, world: World, loss_reduction: LossReduction
    ) -> None:
        self._engine, self._world = engine, world
        # Ranks may spread different numbers of calls: buffers are exchanged once per step, here.
        self._buffers: Any = engine.reducer.rank_buffers
        engine.reducer.rank_buffers = None
        self._is_sum = loss_reduction == "sum"
        self._samples = 0
        self._in_backward = False  # of a joint loss
        self._by_hand = False
        self._graph: RankGraph | None = None

    def step(self, call: Callable[[], Any], size: int, *, by_hand: bool) -> Any:
        """Calls a training step for this rank's samples, and returns its output.

        The joint loss takes the place of the rank's. With manual optimisation each backward in the
        step is that of a joint loss instead.
        """
        self._samples = 0 if self._world.is_idle else size
        self._by_hand = by_hand
        self._buffers.after_step()  # of a step whose backward did not run
        self._buffers.before_step()
        self._graph = self._world.graph = RankGraph(self._world, size)
        try:
            if not by_hand:
                return self._with_joint_loss(call())
            with backwards_go_to(self._backward_by_hand):
                output = call()
        finally:
            self._world.graph = None
        self._exchange(None)
        self._buffers.after_step()
        return output

    def _with_joint_loss(self, output: Any) -> Any:
        try:
            step = None if output is None else StepOutput.parse(output)
        except NoLossError:
            return output  # Lightning raises its own error
        joint = self._joint_loss(step)
        is_mapping = isinstance(output, Mapping)
        return {**output, "loss": joint} if is_mapping and joint is not None else joint

    def number(self, value: Any) -> Any:
        """What an optimizer's closure returns: the joint loss, if it is a loss."""
        is_loss = isinstance(value, Tensor) and value.numel() == 1
        joint = self._exchange(StepOutput.parse(value.detach()) if is_loss else None)
        is_joint = is_loss and joint.value is not None
        return torch.full_like(value, cast(float, joint.value)) if is_joint else value

    def _exchange(self, step: StepOutput | None) -> JointLoss:
        writes = self._buffers.has_written()
        own = OwnLoss(None, self._samples, writes=writes)
        if step is not None:
            loss = step.loss
            items = None if step.num_items is None else float(step.num_items)
            kind = (loss.requires_grad, loss.dtype)
            own = OwnLoss(float(loss.detach()), self._samples, items, *kind, writes)
        joint = join_processes(own, self._world, is_sum=self._is_sum)
        self._buffers.exchanged(joint)
        return joint

    def _joint_loss(self, step: StepOutput | None, inputs: Sequence[Tensor] = ()) -> Tensor | None:
        joint, output_device = self._exchange(step), self._engine.output_device
        if joint.value is None:
            return None
        value = torch.tensor(joint.value, dtype=joint.dtype, device=output_device)
        if step is not None:
            value = value.to(step.loss.device).reshape(step.loss.shape)
        if not joint.has_graph:
            return value
        backward = JointBackward(
            "training_step",
            Shards((self._samples,), []),
            [] if step is None else [Graph(0, step.loss, joint.share)],
            self._graph is not None and self._graph.is_used,
            self._backward,
            [*self._engine.devices, output_device],
            self._graph,
            is_last=not self._by_hand,
        )
        backward.inputs = inputs
        return backward.attach(value)

    def _backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        """Runs this rank's backward, then sums over the ranks.

        Hooks of parameters are called once, with the sums; so these parameters are summed in every
        backward, also while gradients accumulate.
        """
        reducer, parameters = self._engine.reducer, self._engine.replicas.root_parameters
        ranks: Any = reducer.ranks
        positions = hooked(parameters)
        with_hooks = [parameters[i] for i in positions]
        ranks.sum_(ranks.own_among(with_hooks))  # hooks came after an accumulating backward
        ranks.begin(parameters, positions, stay=reducer.accumulating)
        off = [(SuspendedHooks(parameter), parameter.grad) for parameter in with_hooks]
        try:
            for parameter in with_hooks:
                parameter.grad = None
            if joint.graphs:
                with replaced(self, _in_backward=True):
                    inputs = list(joint.inputs) or None
                    backward_at_once(joint.graphs, gradient, keep_graph, inputs)
        finally:
            for hooks, _ in off:
                hooks.put_back()
        ranks.sum_(with_hooks)
        for hooks, earlier in off:
            hooks.call(earlier)
        ranks.finish()
        if not self._by_hand:
            self._buffers.after_step()

    def _backward_by_hand(
        self,
        run: Callable[[], Any],
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor],
    ) -> Any:
        """Stands for `loss.backward()` or `manual_backward` in a step."""
        if self._in_backward:
            return run()
        if create_graph:
            raise ValueError(
                "Expected a backward without create_graph=True in several processes: the sums of "
                "their gradients have no graph. Take second derivatives by "
                "torch.autograd.grad(..., create_graph=True) before the backward of the loss."
            )
        if len(tensors) == 1 and tensors[0].numel() == 1:
            loss, gradient = tensors[0], gradients[0]
        else:
            loss, gradient = sum_of_losses(tensors, gradients), None
        joint = self._joint_loss(StepOutput.parse(loss), inputs)
        if joint is None or not joint.requires_grad:
            return run()  # torch says what is missing
        with replaced(self, _in_backward=True):
            return torch.autograd.backward(joint, gradient, retain_graph=keep_graph)
