"""Manual optimisation: a step that calls backward and optimizers itself, on all replicas.

Each such call is a rendezvous. It is made once, on the host, with the root's parameters and the
sums of all replicas' gradients; then the replicas follow, and go on. So the code of a step sees
what it would see on one device: new weights after an optimizer's step, and in `.grad` the gradient
of the whole batch, of which every replica has a copy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards, gather
from lightning_dp.parallel.gradients import (
    GradientsAside,
    Graph,
    JointBackward,
    agreed_items,
    backward_at_once,
    clear_gradients,
    items_of,
    join_losses,
    loss_weights,
)
from lightning_dp.parallel.links import gradients_on, joining_device
from lightning_dp.parallel.step import EvaluationStep
from lightning_dp.parallel.torch_private import norm_of_each, version

T = TypeVar("T")


class ManualStep(EvaluationStep):
    """A step in which the replicas act together.

    The gradients that the root has from earlier steps reach the replicas with the first call that
    the step makes.
    """

    training = True
    _gradients: _FollowedGradients

    def begin(self, shards: Shards) -> None:
        """The replicas' gradients follow the root's from here on."""
        super().begin(shards)
        self._gradients = _FollowedGradients(self.engine.replicas.parameters, shards.active)

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
        """What one device would have, where the replicas have `outputs`."""
        engine = self.engine
        if engine.loss_reduction == "sum" and isinstance(outputs[0], Tensor):
            return gather(outputs, engine.output_device, overrides={"": "sum"})
        if isinstance(outputs[0], Tensor) and items_of(outputs[0]) is not None:
            return join_losses(self._graphs(outputs), engine.output_device)
        return super().gather(list(outputs), self.shards)

    def _graphs(self, losses: Sequence[Tensor]) -> list[Graph]:
        counts = agreed_items([items_of(loss) for loss in losses])
        reduction = self.engine.loss_reduction
        weights = loss_weights(self.shards.active_sizes, reduction, counts)
        return list(map(Graph, self.shards.active, losses, weights))

    def once(self, call: Callable[[], T], *, leaves_trace: bool = True) -> T:
        """Does something to the root, on the host; the replicas' weights and gradients follow.

        If it may write to gradients and leave no trace, all of them are copied again.
        """
        self._gradients.check_agreement()
        self._gradients.adopt()
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
        graphs = self._graphs(losses)
        with torch.no_grad():
            # Nobody asks for its value on the host, which would wait for it.
            joint = join_losses(graphs, joining_device(losses, self.engine.output_device))
        if any([loss.requires_grad for loss in losses]):
            run, crosses = self._backward, self.engine.calls.crossed
            devices = [*self.engine.devices, self.engine.output_device]
            backward = JointBackward(self.name, self.shards, graphs, crosses, run, devices)
            backward.inputs = inputs
            joint = backward.attach(joint)
        return self.once(lambda: call(joint))

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


class _FollowedGradients:
    """Gradients of the root, of which the replicas that work have copies.

    The first of these leads: what its code does to its gradients is done to the root's.
    """

    def __init__(self, parameters: Sequence[Sequence[Tensor]], active: Sequence[int]) -> None:
        self._root = parameters[0]
        self._leader = parameters[active[0]]
        self._others = [parameters[k] for k in active if k > 0]
        self._seen: list[tuple[Tensor | None, int]] | None = None
        self._leaders: list[tuple[Tensor | None, int]] = []
        self._aside = GradientsAside(())

    def follow(self) -> None:
        """Gives the replicas copies of those gradients that are not as when they last followed."""
        now = _marks(self._root)
        before = self._seen or [(None, -1)] * len(now)
        changed = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if _differ(a, b)]
        for replica in self._others:
            gradients = [self._root[i].grad for i in changed]
            for i, copy in zip(changed, _copies(gradients, replica), strict=True):
                replica[i].grad = copy
        self._seen, self._leaders = now, _marks(self._leader)

    def forget(self) -> None:
        """Makes the replicas follow all gradients anew."""
        self._seen = None

    def check_agreement(self) -> None:
        """Raises an error if the replicas' code has bound different gradients.

        Those are of the shards, and only the leader's would count. What is computed from the
        batch's gradient is the same everywhere. Norms are compared: one copy from each device.
        """
        bound = self._bound_anew()
        if not bound or not self._others:
            return
        norms = [
            _norms([replica[i].grad for i in bound]) for replica in (self._leader, *self._others)
        ]
        for i, *values in zip(bound, *norms, strict=True):
            are_alike = all(math.isclose(value, values[0], rel_tol=1e-3) for value in values)
            if not are_alike and not all(map(math.isnan, values)):
                raise RuntimeError(
                    "Expected p.grad = ... to be the same on every replica, got gradients with "
                    f"norms {[round(value, 6) for value in values]} for a parameter of shape "
                    f"{tuple(self._root[i].shape)}: each is of a replica's own samples. Use "
                    "self.manual_backward(loss), after which p.grad is that of the whole batch, "
                    'or DataParallelStrategy(mode="forward").'
                )

    def _bound_anew(self) -> list[int]:
        """Positions of the gradients that the replicas' code has bound since they followed."""
        if self._seen is None:  # the others have none when a step begins
            columns = zip(*self._others, strict=True)
            return [i for i, own in enumerate(columns) if any(p.grad is not None for p in own)]
        pairs = enumerate(zip(self._leader, self._leaders, strict=True))
        return [i for i, (p, (seen, _)) in pairs if p.grad is not None and p.grad is not seen]

    def adopt(self) -> None:
        """Gives the root what the leader's code did to its gradients, if the root is idle."""
        if self._leader is self._root or self._seen is None:
            return
        pairs = zip(self._leaders, _marks(self._leader), strict=True)
        changed = [i for i, (before, now) in enumerate(pairs) if _differ(before, now)]
        gradients = [self._leader[i].grad for i in changed]
        for i, copy in zip(changed, _copies(gradients, self._root), strict=True):
            self._root[i].grad = copy

    def put_aside(self) -> None:
        """Lets a backward begin with no gradients but on the root."""
        self._aside = GradientsAside(chain.from_iterable(self._others))

    def put_back(self) -> None:
        """After the backward, whose gradients are on the root, the others have theirs again."""
        self._aside.put_back()

    def drop(self) -> None:
        """Ends the step: gradients are the root's alone."""
        clear_gradients(chain.from_iterable(self._others))
        self._aside = GradientsAside(())
        self._seen, self._leaders = None, []


def _marks(parameters: Sequence[Tensor]) -> list[tuple[Tensor | None, int]]:
    """The gradients and how often they have been written to."""
    gradients = [parameter.grad for parameter in parameters]
    return [(g, -1 if g is None else version(g)) for g in gradients]


def _differ(before: tuple[Tensor | None, int], now: tuple[Tensor | None, int]) -> bool:
    return before[0] is not now[0] or before[1] != now[1]


def _copies(gradients: list[Tensor | None], of: Sequence[Tensor]) -> list[Tensor | None]:
    """Copies of gradients on the device of other parameters."""
    if not of:
        return []
    moved = gradients_on(of[0].device, gradients)
    pairs = zip(moved, gradients, strict=True)
    return [g.detach().clone() if g is not None and g is old else g for g, old in pairs]


def _norms(gradients: Sequence[Tensor | None]) -> list[float]:
    """Where there is no gradient, -1."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
    norms: Sequence[Tensor] = norm_of_each(dense)
    values = iter(torch.stack([norm.double() for norm in norms]).tolist() if dense else ())
    return [-1.0 if g is None else next(values) for g in gradients]


def _all_of(inputs: Sequence[Any]) -> list[Tensor] | None:
    """All replicas' inputs in one list; None if they have none."""
    if all(own is None for own in inputs):
        return None
    return [x for own in inputs for x in ([own] if isinstance(own, Tensor) else own or ())]
