"""Outside: what somebody does to the root's gradients while replicas have parts of the same sums.

That is between two micro-batches. What the user sees there is the root's part.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from torch import Tensor

from lightning_dp.parallel.gradients.aside import clear_gradients
from lightning_dp.parallel.gradients.slices import reduce_gradients
from lightning_dp.parallel.torch_private import version

Rows: TypeAlias = Sequence[Sequence[Tensor]]
"""The parameters of every replica, the root's first."""

_GRAD = attrgetter("grad")


class Outside:
    """Lets the replicas' parts follow what happens to the root's.

    Where these are emptied, the replicas' are dropped. All else would need their values.
    """

    def __init__(self) -> None:
        self.has_written = False  # from then on no part is to stay on a replica
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by the root's parameters

    def note(self, rows: Rows) -> None:
        """Remembers the root's gradients as they are."""
        root = rows[0]
        left = _left(rows)
        lone = [i for i in left if root[i].grad is None]
        if lone:  # where there is nothing, nobody can be seen to empty it
            reduce_gradients([[row[i] for i in lone] for row in rows])
        gradients = [(root[i], root[i].grad) for i in left]
        self._seen = {id(p): (g, version(g)) for p, g in gradients if g is not None}

    def follow(self, rows: Rows) -> None:
        """Drops what the replicas have of sums that were emptied; tells of other changes, once."""
        changed = [i for i in _left(rows) if self._has_changed(rows[0][i])]
        emptied = [i for i in changed if _is_empty(rows[0][i].grad)]
        for row in rows[1:]:
            clear_gradients([row[i] for i in emptied])
        if len(emptied) < len(changed) and not self.has_written:
            self.has_written = True
            _tell(len(changed) - len(emptied))

    def _has_changed(self, parameter: Tensor) -> bool:
        seen, now = self._seen.get(id(parameter)), parameter.grad
        return seen is not None and (now is not seen[0] or version(now) != seen[1])


def _left(rows: Rows) -> list[int]:
    """The positions of which replicas have gradients beside the root's."""
    columns = zip(*(map(_GRAD, row) for row in rows[1:]), strict=True)
    return [i for i, own in enumerate(columns) if any([g is not None for g in own])]


def _is_empty(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())


def _tell(count: int) -> None:
    warnings.warn(
        f"Expected gradients that stay as they are between two micro-batches, but {count} of them "
        "were written to there, where they were the first replica's part of them: this step of "
        "the optimizer is not one device's. From now on they are complete after every "
        "micro-batch. Change gradients in on_after_backward or on_before_optimizer_step, and "
        "they are complete there from the beginning.",
        stacklevel=2,
    )
