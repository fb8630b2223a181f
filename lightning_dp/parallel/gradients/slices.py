"""Sums on the CPU in slices: each worker adds up its share of all gradients.

On the calling thread alone the sums would wait for memory, or wake a team of OpenMP's threads,
which gets in the way of the workers' own. The bits are the same: each element is still added in the
order of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.parallel.links import can_be_packed
from lightning_dp.parallel.torch_private import add_to_each

Spread: TypeAlias = Callable[[Sequence[Callable[[], None]]], object]
"""Makes calls at the same time, one in each worker, and returns when all have ended."""

_IS_THERE: Any = partial(is_not, None)

SLICED = 2**20
"""Fewer elements are added up sooner than the workers are told of them."""

ALONE = 2**15
"""So many elements of a tensor one thread adds up; for more torch wakes a team of threads."""


def are_large(tensors: Sequence[Tensor]) -> bool:
    """Whether torch would take several threads for one of them, or these pay for all."""
    sizes = list(map(Tensor.numel, tensors))
    return max(sizes) > ALONE or sum(sizes) >= SLICED


def add_in_slices(
    sums: Sequence[Tensor | None], terms: Sequence[Sequence[Tensor | None]], spread: Spread
) -> bool:
    """Adds the terms of each replica to sums, in place; False if that is not possible.

    Each sum has to be a plain tensor in memory of its own, and its terms alike.
    What the workers would not be told of, the calling thread adds up itself, without others' help.
    """
    columns = [list(filter(_IS_THERE, column)) for column in zip(sums, *terms, strict=True)]
    if sum(map(_IS_THERE, sums)) < sum(map(bool, columns)):
        return False
    columns = [column for column in columns if len(column) > 1 and column[0].numel()]
    tensors = list(chain.from_iterable(columns))
    if not all(map(can_be_packed, tensors)):
        return False
    if len(set(map(Tensor.data_ptr, tensors))) < len(tensors):
        return False
    if not all([tensor.shape == column[0].shape for column in columns for tensor in column]):
        return False
    size = sum([column[0].numel() for column in columns])
    if size and size >= SLICED:
        spread([partial(_add_up, share) for share in shares(columns, 1 + len(terms))])
        return True
    for share in shares(columns, -(-2 * size // ALONE)) if size else ():  # half of it, and a row
        _add_up(share)
    return True


def shares(columns: Sequence[Sequence[Tensor]], n: int) -> list[list[Sequence[Tensor]]]:
    """Columns of tensors of one shape, cut along their rows into n shares of about one size.

    Example:
        >>> import torch
        >>> columns = [[torch.zeros(3, 2)], [torch.zeros(2)]]
        >>> [[len(rows[0]) for rows in share] for share in shares(columns, 2)]
        [[2], [1, 2]]
    """
    size = -(-sum([column[0].numel() for column in columns]) // n)
    found: list[list[Sequence[Tensor]]] = [[]]
    room = size
    for column in columns:
        first, rows = column[0], len(column[0]) if column[0].dim() else 1
        each = max(1, first.numel() // max(1, rows))
        start = 0
        while start < rows:
            if room <= 0 and len(found) < n:
                found.append([])
                room = size
            fitting = -(-room // each) if len(found) < n else rows
            taken = min(rows - start, fitting)
            is_cut = taken < rows
            found[-1].append([t.narrow(0, start, taken) for t in column] if is_cut else column)
            start, room = start + taken, room - taken * each
    return found


def _add_up(share: Sequence[Sequence[Tensor]]) -> None:
    """Adds to the first tensor of each column the others, in their order.

    One column after another, not one replica after another: a sum then stays in the cache.
    """
    sums = [total for total, *terms in share for _ in terms]
    add_to_each(sums, [term for _, *terms in share for term in terms])
