"""Weights that replicas share and that a step writes to, though it does not train them.

A momentum encoder that moves in the step would move once for each replica. On one device the step
runs once: so each replica moves a copy of its own, and the root has what the first replica left.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from lightning_dp.parallel.generated import context
from lightning_dp.parallel.replicas.trained_writes import TrainedWrites
from lightning_dp.parallel.replicas.untracked_writes import LOOKS, fingerprints_of_frozen, shapes
from lightning_dp.parallel.replicas.weights import Weights
from lightning_dp.parallel.torch_private import version

COPIED_BYTES = 2**30
"""At most so much memory is taken to find out in the first step which weights are written to."""


class SharedWrites:
    """Finds weights that steps write to, and gives replicas on the root's device their own.

    In the first steps they have their own of all that is not trained, if there is room for it; from
    then on, of what was written to: at the positions in `apart`. What only later steps write to is
    found by looking; that a step did so for each replica is then told. What steps train replicas
    always share: see `trained`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], others: Sequence[Weights | None]
    ) -> None:
        self._parameters = parameters
        self._others = others  # one for each replica but the first; None elsewhere
        self._written: set[int] = set()
        self.apart: set[int] = set()
        self._steps = 0
        self.trained = TrainedWrites(parameters)

    def refresh(self) -> None:
        """Brings the replicas' own up to date with the root's."""
        self._keep_apart(self.apart)

    @context
    def noticed(
        self,
        active: Sequence[int],
        buffers: AbstractContextManager[None],
        limited: set[int],
    ) -> Iterator[None]:
        """Looks before and after a step, if it is time to. Buffers are looked at as well.

        Not at embeddings of `limited` norm: to shorten a row again changes nothing.
        """
        self._steps += 1
        is_time = self._steps <= LOOKS or not self._steps % LOOKS
        before = self._read(limited) if is_time else {}
        tried = self._tried(before)
        if tried != self.apart:
            self._keep_apart(tried)
        with buffers, self.trained.noticed(active, limited):
            yield
        leader = self._others[active[0] - 1] if active[0] else None
        if leader is not None:
            self._adopt(leader)
        if before:
            self._find(before)
        if self._steps == LOOKS:
            self._keep_apart(self._written)

    def _tried(self, before: Iterable[int]) -> set[int]:
        """What replicas are to have of their own in a step: all in the first ones."""
        trained = {i for i in self.apart if self._parameters[i].requires_grad}
        if self._steps > LOOKS:
            return self._written - trained
        sizes = [self._parameters[i].nbytes for i in before]
        has_room = sum(sizes) * sum(own is not None for own in self._others) <= COPIED_BYTES
        return set(before) if has_room else self._written - trained

    def _read(self, limited: Collection[int] = ()) -> dict[int, tuple[int, int, int]]:
        """What shows a write in place, of the weights that are not trained."""
        bits = fingerprints_of_frozen(self._parameters, limited)
        own = ((i, self._parameters[i], value) for i, value in bits.items())
        return {i: (p.data_ptr(), version(p), value) for i, p, value in own}

    def _find(self, before: Mapping[int, tuple[int, int, int]]) -> None:
        after = self._read()
        kept = ((i, before[i], after[i]) for i in before.keys() & after.keys())
        written = {i for i, old, new in kept if old != new and old[0] == new[0]}
        late = written - self.apart
        self._written |= written
        if late:
            self._keep_apart(self.apart | late)
            self._warn(late)

    @torch.no_grad()
    def _keep_apart(self, positions: set[int]) -> None:
        self.apart = positions
        for own in self._others:
            if own is not None:
                own.keep_apart(positions)

    def _adopt(self, leader: Weights) -> None:
        """Gives the root, which did not work, what the first replica has left."""
        for i in self.apart:
            self._parameters[i].data.copy_(leader.parameters[i].data)

    def _warn(self, written: set[int]) -> None:
        warnings.warn(
            f"A step writes in place to {len(written)} parameters that it does not train "
            f"({shapes(self._parameters, written)}). Replicas on one device shared them until now, "
            "and each of them has done so: that was right only where doing it again changes "
            "nothing. From now on each has its own. Do it in a hook, such as on_train_batch_end, "
            "or bind new values: p.data = 0.9 * p.data + ....",
            stacklevel=2,
        )
