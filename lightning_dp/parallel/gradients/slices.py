"""Sums: the replicas' gradients are added to the root's; on the CPU in slices, by all workers.

On the calling thread alone the sums would wait for memory, or wake a team of OpenMP's threads,
which gets in the way of the workers' own. The bits are the same: each element is still added in the
order of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from lightning_dp.parallel.links import Packing, can_be_packed, gradients_on
from lightning_dp.parallel.torch_private import add_as_read, add_to_each

Spread: TypeAlias = Callable[[Sequence[Callable[[], None]]], object]
"""Makes calls at the same time, one in each worker, and returns when all have ended."""

_GRAD = attrgetter("grad")
_IS_NONE = partial(is_, None)
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
    add_each(sums, [term for _, *terms in share for term in terms])


def add_each(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Adds a term to each tensor, in place."""
    try:
        add_to_each(sums, terms)
    except RuntimeError as error:
        add_as_read(sums, terms, error)


def reduce_gradients(
    parameters: Sequence[Sequence[Tensor]],
    packing: Packing | None = None,
    spread: Spread | None = None,
) -> None:
    """Adds the replicas' gradients to the root's and clears theirs.

    A parameter without a gradient on any replica keeps None.

    Of the kinds that `packing` is for, they travel in buckets where these are complete. Where
    nothing has to travel, the workers add them up, if there is a way to `spread` calls.
    """
    root, others = parameters[0], parameters[1:]
    if not root or not others:
        return
    device = root[0].device
    sums = list(map(_GRAD, root))
    terms = [list(map(_GRAD, replica)) for replica in others]
    is_elsewhere = any([replica[0].device != device for replica in others])
    if is_elsewhere or not (spread and are_large(root) and add_in_slices(sums, terms, spread)):
        done = packing.sums.add(sums, terms) if packing and is_elsewhere else set()
        if len(done) < len(root):
            _add_rest(root, sums, terms, done)
    for parameter in chain.from_iterable(others):
        parameter.grad = None


def _add_rest(
    root: Sequence[Tensor],
    sums: list[Tensor | None],
    terms: Sequence[list[Tensor | None]],
    done: set[int],
) -> None:
    """Adds those gradients that did not travel in buckets."""
    before = list(sums)
    for gradients in terms:
        for i in done:
            gradients[i] = None
        if any(map(is_not, gradients, repeat(None))):
            _add(sums, gradients_on(root[0].device, gradients))
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old and total is not None:
            parameter.grad = as_accumulated(total, parameter)


def as_accumulated(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the strides that autograd gives it; fused optimizers rely on them.

    They are the parameter's, where its memory is dense; else those of contiguous rows.
    """
    are_plain = can_be_packed(parameter) and can_be_packed(gradient)
    if not are_plain or gradient.stride() == parameter.stride():
        return gradient
    like = torch.empty_like(parameter, dtype=gradient.dtype)
    if like.stride() != parameter.stride():
        return gradient.contiguous()
    return like.copy_(gradient)


def _add(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Adds gradients to sums, in place; where there is no sum yet, the gradient becomes it."""
    targets, terms = sums, gradients
    # Nearly always all are there, and this look is much shorter than the loop.
    if any(map(_IS_NONE, chain(sums, gradients))):
        targets, terms = [], []
        for i, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            if total is None:
                sums[i] = gradient
            elif gradient is not None:
                targets.append(total)
                terms.append(gradient)
    if targets:
        add_each(cast(list[Tensor], targets), cast(list[Tensor], terms))
