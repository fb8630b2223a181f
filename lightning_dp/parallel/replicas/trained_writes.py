"""Weights that steps train and write to in place as well: of that replicas on one device are told.

They share these weights, so each of them writes, where one device would do it once.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lightning_dp.parallel.generated import context
from lightning_dp.parallel.replicas.fingerprints import fingerprints
from lightning_dp.parallel.replicas.untracked_writes import LOOKS, shapes
from lightning_dp.parallel.torch_private import version

READS = 2
"""In so many steps the weights themselves are read: a write through `.data` counts nowhere."""


class Seen(NamedTuple):
    """What shows a write in place; another address, that new values were bound."""

    address: int
    version: int
    bits: int | None


class TrainedWrites:
    """Looks at trained weights before and after the first steps.

    What is done once for all replicas may write, as an optimizer's step with manual optimisation:
    that is `by_host`. In its midst replicas may go on, in a closure: `by_replicas`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.is_looking = True  # at the next step
        self._left, self._reads = LOOKS, READS
        self._positions: list[int] = []
        self._before: Mapping[int, Seen] = {}

    @context
    def noticed(self, active: Sequence[int], limited: Collection[int]) -> Iterator[None]:
        """Looks at one step, but not at embeddings of limited norm."""
        if not self.is_looking or len(active) < 2:
            yield
            return
        trained = (i for i, p in enumerate(self._parameters) if p.requires_grad)
        self._positions = [i for i in trained if i not in limited]
        self._before = self._seen()
        yield
        self._look()
        self._before, self._left, self._reads = {}, self._left - 1, self._reads - 1
        self.is_looking = self.is_looking and self._left > 0

    @context
    def by_host(self) -> Iterator[None]:
        """What is written meanwhile is written once."""
        self._look()
        yield
        self._note()

    @context
    def by_replicas(self) -> Iterator[None]:
        """In the midst of that, what is written meanwhile is written by each of them."""
        self._note()
        yield
        self._look()

    def _note(self) -> None:
        if self._before:
            self._before = self._seen()

    def _seen(self) -> dict[int, Seen]:
        own = [(i, self._parameters[i]) for i in self._positions]
        bits = fingerprints((i, p.data) for i, p in own) if self._reads > 0 else {}
        return {i: Seen(p.data_ptr(), version(p), bits.get(i)) for i, p in own}

    def _look(self) -> None:
        now = self._seen() if self._before else {}
        written = {
            i for i, old in self._before.items() if now[i] != old and now[i].address == old.address
        }
        if written:
            self.is_looking, self._before = False, {}
            warnings.warn(
                f"A step writes in place to {len(written)} parameters that it trains "
                f"({shapes(self._parameters, written)}). Replicas on one device share them, and "
                "each of them has done so: that is right only where doing it again changes "
                "nothing. Do it in a hook, such as on_train_batch_end, or bind new values: "
                "p.data = 0.9 * p.data.",
                stacklevel=2,
            )
