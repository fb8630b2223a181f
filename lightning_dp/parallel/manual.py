"""Manual optimisation: a step that calls backward and optimizers itself, on all replicas.

Each such call is a rendezvous. It is made once, on the host, with the root's parameters and the
sums of all replicas' gradients; then the replicas follow, and go on. So the code of a step sees
what it would see on one device: new weights after an optimizer's step, and in `.grad` the gradient
of the whole batch, of which every replica has a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards, gather
from lightning_dp.parallel.followed_gradients import FollowedGradients
from lightning_dp.parallel.gradients import (
    Graph,
    JointBackward,
    agreed_items,
    backward_at_once,
    items_of,
    join_losses,
    loss_weights,
)
from lightning_dp.parallel.links import joining_device
from lightning_dp.parallel.step import EvaluationStep

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import JointLoss, World

T = TypeVar("T")


class ManualStep(EvaluationStep):
    """A step in which the replicas act together.

    The gradients that the root has from earlier steps reach the replicas with the first call that
    the step makes.
    """

    training = True
    _gradients: FollowedGradients
    _num_losses = 0

    def begin(self, shards: Shards) -> None:
        """The replicas' gradients follow the root's from here on."""
        super().begin(shards)
        replicas, world = self.engine.replicas, self.engine.world
        self._gradients = FollowedGradients(replicas.parameters, shards.active, world)

    def leave(self, outputs: list[Any], devices: Collection[torch.device]) -> list[Any]:
        """With what losses are means over, which is told by an attribute."""
        items = [items_of(out) if isinstance(out, Tensor) else None for out in outputs]
        with torch.no_grad():
            *sent, counts = super().leave([*outputs, items], devices)
        for out, count in zip(sent, counts, strict=True):
            if count is not None:
                out.num_items = count
        return sent

    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """What the step returned, and what it has done to gradients."""
        self.engine.reducer.settle()
        self._gradients.adopt()
        with torch.no_grad():
            return self.joined(outputs)

    def end(self) -> None:
        """Gradients are the root's alone, also after an error."""
        if hasattr(self, "_gradients"):
            self._gradients.drop()

    def joined(self, outputs: Sequence[Any]) -> Any:
        """What one device would have, where the replicas have `outputs`.

        Of several processes, numbers and losses are those of all; the rest is of this one's
        replicas.
        """
        own, world = self._joined_here(outputs), self.engine.world
        return own if world is None else self._joined_across(world, own, outputs)

    def _joined_across(self, world: World, own: Any, outputs: Sequence[Any]) -> Any:
        number: Any = own.get("loss") if isinstance(own, Mapping) else own
        is_tensor = isinstance(number, Tensor)
        is_number = isinstance(number, float) or (
            is_tensor and number.is_floating_point() and not number.dim()
        )
        are_counted = isinstance(outputs[0], Tensor) and items_of(outputs[0]) is not None
        counts = self._counts(outputs) if are_counted else None
        is_sum = self.engine.loss_reduction == "sum" and isinstance(own, Tensor)
        # What is no number takes part: in another process it may be one.
        value = float(number) if is_number else None
        joint = self._across(world, value, counts, is_sum=is_sum)
        if joint.value is None or not is_number:
            return own
        of_all = torch.full_like(number, joint.value) if is_tensor else joint.value
        return {**own, "loss": of_all} if isinstance(own, Mapping) else of_all

    def _across(
        self,
        world: World,
        value: float | None,
        counts: Sequence[float] | None,
        *,
        is_sum: bool,
        has_graph: bool = False,
    ) -> JointLoss:
        """What all processes have, where this one's replicas have a value."""
        from lightning_dp.parallel.processes import OwnLoss, join_processes

        samples = 0 if world.is_idle else sum(self.shards.active_sizes)
        items = None if counts is None else sum(counts)
        return join_processes(OwnLoss(value, samples, items, has_graph), world, is_sum=is_sum)

    def _joined_here(self, outputs: Sequence[Any]) -> Any:
        engine = self.engine
        if engine.loss_reduction == "sum" and isinstance(outputs[0], Tensor):
            return gather(outputs, engine.output_device, overrides={"": "sum"})
        if isinstance(outputs[0], Tensor) and items_of(outputs[0]) is not None:
            return join_losses(self._graphs(outputs, self._counts(outputs)), engine.output_device)
        return super().gather(list(outputs), self.shards)

    def _counts(self, losses: Sequence[Tensor]) -> list[float] | None:
        return agreed_items([items_of(loss) for loss in losses])

    def _graphs(self, losses: Sequence[Tensor], counts: Sequence[float] | None) -> list[Graph]:
        engine, sizes = self.engine, self.shards.active_sizes
        weights = loss_weights(sizes, engine.loss_reduction, counts)
        graphs, means = list(map(Graph, self.shards.active, losses, weights)), engine.own_means
        key = self.name, self._num_losses
        self._num_losses += 1
        if means.rest[key]:
            means.rest[key] -= 1
        elif not (counts or engine.calls.crossed):
            means.look(key, graphs, sizes, self.traces)
        return graphs

    def once(
        self, call: Callable[[], T], *, leaves_trace: bool = True, uses_gradients: bool = False
    ) -> T:
        """Does something to the root, on the host; the replicas' weights and gradients follow.

        If it may write to gradients and leave no trace, all of them are copied again. Before it
        uses gradients, processes tell each other of those that the step's code has bound.
        """
        self._gradients.check_agreement(across=uses_gradients)
        self._gradients.adopt()
        shared = self.engine.replicas.shared_writes
        with nullcontext() if shared is None else shared.trained.by_host():
            result = call()
        if not leaves_trace:
            self._gradients.forget()
        self.follow()
        return result

    def follow(self) -> None:
        """Brings the replicas' weights and gradients up to date, in the middle of the step."""
        self.engine.replicas.refresh_parameters(self.shards.active)
        self._gradients.follow()

    def in_replicas(self, functions: Sequence[Callable[[], Any]]) -> Any:
        """Lets the replicas make a call as a part of their steps; what one device would have."""
        self.follow()
        shared = self.engine.replicas.shared_writes
        with nullcontext() if shared is None else shared.trained.by_replicas():
            results = self.engine.calls.rendezvous.call(functions, as_replicas=True)
        self._gradients.adopt()
        return self.joined(results)

    def backward(
        self, losses: Sequence[Tensor], inputs: Sequence[Any], call: Callable[[Tensor], T]
    ) -> T:
        """A backward of the losses of all replicas: of the joint loss, which `call` is given.

        Each is a mean over its samples (or their sum, as `loss_reduction` has it), or over as many
        items as its attribute `num_items` tells. Without `inputs`, all parameters get gradients.
        """
        for loss in losses:
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__qualname__
                raise ValueError(
                    f"Expected the backward of a loss of one element, got {got}. Take its mean "
                    "over the samples."
                )
        joint, graphs, has_graph = self._joint_loss(losses)
        if has_graph:
            run, crosses = self._backward, self.engine.calls.crossed
            devices = [*self.engine.devices, self.engine.output_device]
            crossings = self.engine.calls.crossings
            backward = JointBackward(
                self.name, self.shards, graphs, crosses, run, devices, crossings, is_last=False
            )
            backward.inputs = inputs
            joint = backward.attach(joint)
        return self.once(lambda: call(joint))

    def _joint_loss(self, losses: Sequence[Tensor]) -> tuple[Tensor, list[Graph], bool]:
        """Its value, the replicas' graphs, and whether a backward will give gradients."""
        engine, counts = self.engine, self._counts(losses)
        graphs = self._graphs(losses, counts)
        has_graph = any([loss.requires_grad for loss in losses])
        with torch.no_grad():
            # Nobody asks for its value on the host, which would wait for it.
            joint = join_losses(graphs, joining_device(losses, engine.output_device))
            if engine.world is None:
                return joint, graphs, has_graph
            is_sum = engine.loss_reduction == "sum"
            told = (float(joint), counts)
            of_all = self._across(engine.world, *told, is_sum=is_sum, has_graph=has_graph)
            if of_all.value is None:  # of no sample
                return joint, graphs, has_graph
            graphs = [replace(graph, weight=graph.weight * of_all.share) for graph in graphs]
            value = torch.full_like(joint, of_all.value)
            return value, graphs, of_all.has_graph

    def _backward(self, joint: JointBackward, gradient: Tensor, keep_graph: bool) -> None:
        reducer = self.engine.reducer
        reducer.before_backward(joint)
        self._gradients.put_aside()
        if joint.crosses or not self.engine.on_cpu:
            during = self.engine.meter.working([graph.replica for graph in joint.graphs])
            backward_at_once(joint.graphs, gradient, keep_graph, _all_of(joint.inputs), during)
        else:
            own_inputs = dict(zip(self.shards.active, joint.inputs, strict=True))
            calls: dict[int, Callable[[], Any]] = dict.fromkeys(self.shards.active, lambda: None)
            for graph in joint.graphs:
                options = {"retain_graph": keep_graph, "inputs": own_inputs[graph.replica]}
                backward = partial(graph.loss.backward, gradient * graph.weight, **options)
                calls[graph.replica] = backward
            self.engine.calls.rendezvous.call(list(calls.values()), as_replicas=False)
        reducer.after_backward()
        self._gradients.put_back()


def _all_of(inputs: Sequence[Any]) -> list[Tensor] | None:
    """All replicas' inputs in one list; None if they have none."""
    if all(own is None for own in inputs):
        return None
    return [x for own in inputs for x in ([own] if isinstance(own, Tensor) else own or ())]
