"""Gradients: the replicas' are added to the root's; some are set aside for a while, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, product
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.comm import (
    Packing,
    add_each,
    can_be_packed,
    gradients_on,
    wait_for_copies,
)
from lightning_dp.parallel.torch_private import (
    ParameterHooks,
    hooks_of,
    put_hooks_back,
    take_hooks_off,
)

Spread: TypeAlias = Callable[[Sequence[Callable[[], None]]], object]
"""Makes calls at the same time, one in each worker, and returns when all have ended."""

Gradients: TypeAlias = list[Tensor | None]

_GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")

SPREAD_ELEMENTS = 2**20
"""Fewer elements are added on the calling thread sooner than workers are woken."""


def reduce_gradients(
    parameters: Sequence[Sequence[Tensor]],
    packing: Packing | None = None,
    spread: Spread | None = None,
) -> None:
    """Adds the replicas' gradients to the root's, in place, and clears theirs.

    A parameter without a gradient on any replica keeps None. Between accelerators, buckets that are
    complete go by the chain; all else is copied to the root and added there.

    Args:
        parameters: of each replica, the root's first.
        packing: the buckets of the parameters.
        spread: runs calls in the workers, which then share the sums on the CPU. On the calling
            thread torch would use a team of OpenMP threads, whose idle members spin beside the
            workers.
    """
    root, others = parameters[0], parameters[1:]
    if not root or not others:
        return
    sums, rows = list(map(_GRAD, root)), [list(map(_GRAD, replica)) for replica in others]
    devices = [replica[0].device for replica in parameters]
    if packing is not None and len({*devices}) > 1:
        _add_by_chain(sums, rows, packing, list(dict.fromkeys(devices)))
    before, device = list(sums), devices[0]
    if {*devices} == {device}:
        _add_rows(sums, rows, spread)
    for row, there in zip(rows, devices[1:], strict=True) if len({*devices}) > 1 else ():
        try:
            parts = [row if there == device else gradients_on(device, row)]
        except torch.OutOfMemoryError:  # there is room for one at a time
            parts = [[g if i == k else None for k, g in enumerate(row)] for i in range(len(row))]
        for part in parts:
            _add_rows(sums, [gradients_on(device, part)], None)
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old and total is not None:
            parameter.grad = as_accumulated(total, parameter)
    clear_gradients(chain.from_iterable(others))


def _add_by_chain(
    sums: Gradients, rows: list[Gradients], packing: Packing, devices: list[torch.device]
) -> None:
    """Adds the buckets of which each replica has all or nothing; in the rows they are None then."""
    if not packing.sums.prepare(devices):
        return
    try:
        for j, bucket in enumerate(packing.buckets):
            total, own = bucket.of(sums), [bucket.of(row) for row in rows]
            there = [row for row in own if any(g is not None for g in row)]
            if there and all(packing.sums.is_whole(row, j) for row in (total, *there)):
                packing.sums.send(j, [total, *there])
                for row, i in product(rows, bucket.order):
                    row[i] = None
    finally:
        wait_for_copies(devices)


def _add_rows(sums: Gradients, rows: Sequence[Gradients], spread: Spread | None) -> None:
    """Adds rows to the sums, in their order; where there is no sum yet, a gradient becomes it."""
    for i, total in enumerate(sums):
        for row in rows if total is None else ():
            if row[i] is not None:
                sums[i], row[i] = row[i], None
                break
    sizes = [0 if total is None else total.numel() for total in sums]
    if spread is None or sum(sizes) < SPREAD_ELEMENTS:
        _add_here(sums, rows)
        return
    parts = [slice(own.start, own.stop) for own in shares(sizes, 1 + len(rows))]
    spread([partial(_add_here, sums[own], [row[own] for row in rows]) for own in parts])


def _add_here(sums: Gradients, rows: Sequence[Gradients]) -> None:
    for row in rows:
        pairs = [(s, g) for s, g in zip(sums, row, strict=True) if s is not None and g is not None]
        if pairs:
            add_each([total for total, _ in pairs], [gradient for _, gradient in pairs])


def shares(sizes: Sequence[int], n: int) -> list[range]:
    """Cuts positions into at most n ranges whose sizes sum to about the same.

    Example:
        >>> shares([4, 1, 1, 2], 2), shares([9], 3)
        ([range(0, 1), range(1, 4)], [range(0, 1)])
    """
    found, total, done = [range(0, 0)], sum(sizes), 0
    for i, size in enumerate(sizes):
        if done * n >= total * len(found) and len(found) < n:
            found.append(range(i, i))
        done += size
        found[-1] = range(found[-1].start, i + 1)
    return found


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


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Sets gradients to None."""
    for parameter in parameters:
        parameter.grad = None


class GradientsAside:
    """The gradients of earlier backwards, set aside while another backward fills `.grad`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = list(map(_GRAD, self._parameters))
        self.has_any = any(gradient is not None for gradient in self._earlier)
        if self.has_any:
            clear_gradients(self._parameters)

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        if not self.has_any:
            return
        new = list(map(_GRAD, self._parameters))
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier
        _add_here(self._earlier, [new])


class HooksOff:
    """The hooks of a parameter's gradient, which `take` takes off it for a while."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._hooks = ParameterHooks(*hooks_of(parameter))

    def take(self) -> None:
        """Autograd calls no hook of the parameter until they are put back."""
        take_hooks_off(self._parameter)

    def put_back(self) -> None:
        """Autograd calls them again."""
        put_hooks_back(self._parameter, self._hooks)

    def call(self, earlier: Tensor | None) -> None:
        """Calls them with the gradient that has come in the meantime, and adds the earlier one."""
        parameter, gradient = self._parameter, self._parameter.grad
        parameter.grad = earlier
        if gradient is None:
            return
        for hook in (self._hooks.on_gradient or {}).values():
            answer = hook(gradient)
            gradient = gradient if answer is None else answer
        parameter.grad = gradient if earlier is None else earlier + gradient
        for hook in (self._hooks.on_parameter or {}).values():
            hook(parameter)
