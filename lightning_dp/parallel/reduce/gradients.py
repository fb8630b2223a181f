"""Sums of gradients: the replicas' on the root, at the end of a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.comm import (
    Packing,
    are_accelerators,
    can_be_packed,
    gradients_on,
    wait_for_copies,
)
from lightning_dp.parallel.torch_private import add_to_each

Gradients: TypeAlias = list[Tensor | None]

GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def reduce_gradients(
    parameters: Sequence[Sequence[Tensor]], packing: Packing | None = None
) -> None:
    """Adds the replicas' gradients to the root's, in place, and clears theirs.

    A parameter without a gradient on any replica keeps None. Between accelerators, buckets that are
    complete go by the chain; all else is copied to the root and added there.

    Args:
        parameters: of each replica, the root's first.
        packing: the buckets of the parameters.
    """
    root, others = parameters[0], parameters[1:]
    if not root or not others:
        return
    sums, rows = list(map(GRAD, root)), [list(map(GRAD, replica)) for replica in others]
    before, devices = list(sums), [replica[0].device for replica in parameters]
    if len({*devices}) > 1 and packing is not None:
        _add_by_chain(sums, rows, packing, list(dict.fromkeys(devices)))
    for row, device in zip(rows, devices[1:], strict=True):
        add_gradients(sums, row if device == devices[0] else gradients_on(devices[0], row))
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old and total is not None:
            parameter.grad = as_accumulated(total, parameter)
    clear_gradients(chain.from_iterable(others))


def _add_by_chain(
    sums: Gradients, rows: list[Gradients], packing: Packing, devices: list[torch.device]
) -> None:
    """Adds the buckets of which each replica has all or nothing; in the rows they are None then."""
    if not are_accelerators(devices):
        return
    try:
        for j, bucket in enumerate(packing.buckets):
            total, parts = bucket.of(sums), [bucket.of(row) for row in rows]
            terms = [part for part in parts if any(g is not None for g in part)]
            if terms and all(bucket.is_whole(row) for row in (total, *terms)):
                packing.add_up(j, [total, *terms])
                for row, i in product(rows, bucket.order):
                    row[i] = None
    finally:
        wait_for_copies(devices)


def add_gradients(sums: Gradients, row: Gradients) -> None:
    """Adds gradients to the sums; where there is no sum yet, the gradient becomes it."""
    pairs = []
    for i, gradient in enumerate(row):
        total = sums[i]
        if total is None:
            sums[i] = gradient
        elif gradient is not None:
            pairs.append((total, gradient))
    # foreach refuses tensors that are computed when they are read.
    if any([t.is_conj() or t.is_neg() for t in chain.from_iterable(pairs)]):
        for total, gradient in pairs:
            total.add_(gradient)
    elif pairs:
        add_to_each([total for total, _ in pairs], [gradient for _, gradient in pairs])


def as_accumulated(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the strides that autograd gives it; fused optimizers rely on them.

    They are the parameter's, where its memory is dense; else those of contiguous rows.
    """
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return gradient
    if not (can_be_packed(parameter) and can_be_packed(gradient)):
        return gradient
    like = torch.empty_like(parameter, dtype=gradient.dtype)
    if like.stride() != parameter.stride():
        return gradient.contiguous()
    return like.copy_(gradient)


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Sets gradients to None."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """While it lasts, torch uses no team of OpenMP threads: they would spin beside the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
