"""Gradients of the root, of which replicas have copies while a step runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dp.parallel.gradients import GradientsAside, clear_gradients
from lightning_dp.parallel.links import gradients_on
from lightning_dp.parallel.torch_private import norm_of_each, version

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class FollowedGradients:
    """Gradients of the root, of which the replicas that work have copies.

    The first of these leads: what its code does to its gradients is done to the root's.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        active: Sequence[int],
        world: World | None = None,
    ) -> None:
        self._world = world
        self._root = parameters[0]
        self._leader = parameters[active[0]]
        self._others = [parameters[k] for k in active if k > 0]
        self._seen: list[tuple[Tensor | None, int]] | None = None
        # One process with one replica has no other to compare with.
        self._leaders = [] if world is None else _marks(self._leader)
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

    def check_agreement(self, *, across: bool = False) -> None:
        """Raises an error if the replicas' code has bound different gradients.

        Those are of the shards, and only the leader's would count. What is computed from the
        batch's gradient is the same everywhere. Norms are compared: one copy from each device; and
        those of all processes, if they are to be compared `across` them.
        """
        bound, world = self._bound_anew(), self._world if across else None
        if world is None and not (bound and self._others):
            return
        replicas = (self._leader, *self._others) if bound else ()
        norms = [_norms([replica[i].grad for i in bound]) for replica in replicas]
        rows = [dict(zip(bound, own, strict=True)) for own in norms]
        if world is not None:
            rows = list(chain.from_iterable(world.gather(rows)))
        for i in sorted(set(chain.from_iterable(rows))):
            values = [own.get(i, -1.0) for own in rows]
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
        if self._seen is None and self._others:  # which have none when a step begins
            columns = zip(*self._others, strict=True)
            return [i for i, own in enumerate(columns) if any(p.grad is not None for p in own)]
        pairs = enumerate(zip(self._leader, self._leaders, strict=self._seen is not None))
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
