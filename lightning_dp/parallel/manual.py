"""Manual optimisation: a step that calls backward and optimizers itself, on all replicas.

Each such call is a rendezvous. It is made once, on the host, with the root's parameters and the
sums of all replicas' gradients; then the replicas follow, and go on. So the code of a step sees
what it would see on one device: new weights after an optimizer's step, and in `.grad` the gradient
of the whole batch, of which every replica has a copy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Shards, gather
from lightning_dp.parallel.gradients import (
    agreed_items,
    items_of,
    join_losses,
    loss_weights,
    with_separate_backward,
)
from lightning_dp.parallel.links import gradients_on
from lightning_dp.parallel.step import StepParallel, backward_at_once
from lightning_dp.parallel.workers import Rendezvous

T = TypeVar("T")


class ManualStep:
    """One step in which the replicas act together.

    The gradients that the root has from earlier steps reach the replicas with the first call that
    the step makes.

    Args:
        engine: runs the replicas.
        shards: the step's shards.
    """

    def __init__(self, engine: StepParallel, shards: Shards) -> None:
        self._engine = engine
        self._shards = shards
        self._gradients = _FollowedGradients(engine.replicas.parameters, shards.active)

    def run(self, method: str, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and gathers what it returns."""
        engine, shards = self._engine, self._shards
        modules = engine.replicate(shards, training=True)
        call = lambda module, shard: getattr(module, method)(shard, *args)  # noqa: E731
        try:
            outputs = engine.apply(method, call, modules, shards, training=True, constants=args)
            engine.backward.settle()
            self._gradients.adopt()
        finally:
            self._gradients.drop()
        engine.meter.stop()
        engine.worked(training=True)
        with torch.no_grad():
            return self.gather(outputs)

    def gather(self, outputs: Sequence[Any]) -> Any:
        """What one device would have, where the replicas have `outputs`."""
        if self._engine.loss_reduction == "sum" and isinstance(outputs[0], Tensor):
            return gather(outputs, self._engine.output_device, overrides={"": "sum"})
        if isinstance(outputs[0], Tensor) and items_of(outputs[0]) is not None:
            return join_losses(outputs, self._weights(outputs), self._engine.output_device)
        sizes, order = self._shards.active_sizes, self._shards.active_order
        return self._engine.gather(outputs, sizes, order, self._shards.dims)

    def _weights(self, losses: Sequence[Tensor]) -> list[float]:
        counts = agreed_items([items_of(loss) for loss in losses])
        return loss_weights(self._shards.active_sizes, self._engine.loss_reduction, counts)

    def once(self, call: Callable[[], T]) -> T:
        """Does something to the root, on the host; the replicas' weights and gradients follow."""
        self._gradients.check_agreement()
        self._gradients.adopt()
        result = call()
        self.follow()
        return result

    def follow(self) -> None:
        """Brings the replicas' weights and gradients up to date, in the middle of the step."""
        self._engine.replicas.refresh_parameters(self._shards.active)
        self._gradients.follow()

    def in_replicas(self, rendezvous: Rendezvous, functions: Sequence[Callable[[], Any]]) -> Any:
        """Lets the replicas make a call as a part of their steps; what one device would have."""
        self.follow()
        results = rendezvous.call(functions, as_replicas=True)
        self._gradients.adopt()
        return self.gather(results)

    def backward(
        self,
        rendezvous: Rendezvous,
        losses: Sequence[Tensor],
        inputs: Sequence[Any],
        call: Callable[[Tensor], T],
    ) -> T:
        """A backward of the losses of all replicas.

        Args:
            rendezvous: where the replicas wait.
            losses: one for each of them, of one element; a mean over its samples (or their sum,
                as `loss_reduction` has it), or over as many items as its attribute `num_items`
                tells.
            inputs: for each, the parameters that are to get gradients; None for all.
            call: what is done with the joint loss, whose backward is theirs.
        """
        for loss in losses:
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__qualname__
                raise ValueError(
                    f"Expected the backward of a loss of one element, got {got}. Take its mean "
                    "over the samples."
                )
        weights = self._weights(losses)
        with torch.no_grad():
            joint = join_losses(losses, weights, self._engine.output_device)
        if any(loss.requires_grad for loss in losses):
            graphs = list(zip(range(len(losses)), losses, weights, strict=True))
            backward_each = partial(self._backward_each, rendezvous, graphs, inputs)
            joint = with_separate_backward(joint, backward_each)
        return self.once(lambda: call(joint))

    def _backward_each(
        self,
        rendezvous: Rendezvous,
        graphs: list[tuple[int, Tensor, float]],
        inputs: Sequence[Any],
        gradient: Tensor,
        keep_graph: bool,
    ) -> None:
        engine = self._engine
        # A weight of 0 is a mean over nothing: it may be NaN, and so would its gradient be.
        graphs = [graph for graph in graphs if graph[1].requires_grad and graph[2] != 0]
        engine.backward.before()
        self._gradients.put_aside()
        if rendezvous.crossed or not engine.on_cpu:
            backward_at_once(graphs, gradient, keep_graph, _all_of(inputs))
        else:
            calls: list[Callable[[], Any]] = [_nothing] * len(inputs)
            for i, loss, weight in graphs:
                options = {"retain_graph": keep_graph, "inputs": inputs[i]}
                calls[i] = partial(loss.backward, gradient * weight, **options)
            rendezvous.call(calls, as_replicas=False)
        engine.backward.after()
        self._gradients.put_back()


class _FollowedGradients:
    """Gradients of the root, of which the replicas that work have copies.

    Args:
        parameters: the parameters of each replica, root first.
        active: the replicas that work. The first of them leads: what its code does to its
            gradients is done to the root's.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]], active: Sequence[int]) -> None:
        self._root = parameters[0]
        self._leader = parameters[active[0]]
        self._others = [parameters[k] for k in active if k > 0]
        self._seen: list[tuple[Tensor | None, int]] | None = None
        self._leaders: list[tuple[Tensor | None, int]] = []
        self._aside: list[list[Tensor | None]] = []

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
        self._aside = [[parameter.grad for parameter in replica] for replica in self._others]
        self._forget()

    def put_back(self) -> None:
        """After the backward, whose gradients are on the root, the others have theirs again."""
        for replica, gradients in zip(self._others, self._aside, strict=True):
            for parameter, gradient in zip(replica, gradients, strict=True):
                parameter.grad = gradient
        self._aside = []

    def drop(self) -> None:
        """Ends the step: gradients are the root's alone."""
        self._forget()
        self._seen, self._leaders, self._aside = None, [], []

    def _forget(self) -> None:
        for replica in self._others:
            for parameter in replica:
                parameter.grad = None


def _marks(parameters: Sequence[nn.Parameter]) -> list[tuple[Tensor | None, int]]:
    """The gradients and how often they have been written to."""
    gradients = [parameter.grad for parameter in parameters]
    return [(g, -1 if g is None else g._version) for g in gradients]


def _differ(before: tuple[Tensor | None, int], now: tuple[Tensor | None, int]) -> bool:
    return before[0] is not now[0] or before[1] != now[1]


def _copies(gradients: list[Tensor | None], of: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Copies of gradients on the device of other parameters."""
    if not of:
        return []
    moved = gradients_on(of[0].device, gradients)
    pairs = zip(moved, gradients, strict=True)
    return [g.detach().clone() if g is not None and g is old else g for g, old in pairs]


def _norms(gradients: Sequence[Tensor | None]) -> list[float]:
    """Where there is no gradient, -1."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
    norms: Sequence[Tensor] = torch._foreach_norm(dense)
    values = iter(torch.stack([norm.double() for norm in norms]).tolist() if dense else ())
    return [-1.0 if g is None else next(values) for g in gradients]


def _all_of(inputs: Sequence[Any]) -> list[Tensor] | None:
    """All replicas' inputs in one list; None if they have none."""
    if all(own is None for own in inputs):
        return None
    return [x for own in inputs for x in ([own] if isinstance(own, Tensor) else own or ())]


def _nothing() -> None:
    return None
