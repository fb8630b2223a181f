"""Made in steps: parameters and buffers that were not there when a step began."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import buffer_table
from lightning_dp.state.containers import agree

LOOKS = 4
"""Steps of training and backwards that are looked at: what is made on demand is made early."""


class MadeInSteps:
    """Tells when a step makes parameters, or buffers that differ: each replica makes its own.

    The root's, and their first gradients, are the first replica's. In all later steps the replicas
    follow the root.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._root, self._submodules = replicas.modules[0], replicas.submodules
        self._left = LOOKS
        self._parameters: set[int] = set()
        self._buffers: list[set[str]] = []

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to look at any more."""
        return not self._left

    def begin(self) -> None:
        """A step begins."""
        if self._root.training:
            self._parameters = set(map(id, self._root.parameters()))
            self._buffers = [set(buffer_table(module)) for module in self._submodules[0]]

    def end(self, active: Sequence[int]) -> None:
        """It has ended on these replicas."""
        if not self._root.training or len(active) < 2:
            return
        self._left -= 1
        made = [n for n, p in self._root.named_parameters() if id(p) not in self._parameters]
        made += self._differing_buffers(active)
        if made:
            self._left = 0
            _warn([f"{type(self._root).__qualname__}.{name}" for name in made])

    def _differing_buffers(self, active: Sequence[int]) -> Iterator[str]:
        names = {id(module): name for name, module in self._root.named_modules()}
        replicas = [self._submodules[k] for k in active]
        for before, *own in zip(self._buffers, *replicas, strict=True):
            first, *others = map(buffer_table, own)
            for name in first.keys() - before:
                if not all(agree(first[name], other.get(name)) for other in others):
                    yield ".".join(filter(None, (names.get(id(own[0])), name)))


def _warn(names: Sequence[str]) -> None:
    warnings.warn(
        f"A step makes {', '.join(names)}: every replica makes its own, and the root's has the "
        "first one's values and gradients of this step. Make them in __init__, in setup or in "
        "configure_model.",
        stacklevel=2,
    )
