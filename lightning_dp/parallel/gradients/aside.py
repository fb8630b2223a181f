"""Gradients, hooks and the values of buffers: set aside for a while, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.parallel.gradients.slices import add_each
from lightning_dp.parallel.links import can_be_packed
from lightning_dp.parallel.torch_private import (
    ParameterHooks,
    flattened,
    hooks_of,
    put_hooks_back,
    take_hooks_off,
)

_GRAD = attrgetter("grad")
_KIND = attrgetter("dtype", "device")
_ALL = slice(None)


class GradientsAside:
    """The gradients of earlier backwards, apart while another one runs.

    If that one does not end, its half-done work can be taken away from theirs. Nearly never it
    `has_any`: optimizers clear them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = list(map(_GRAD, self._parameters))
        self.has_any = any(map(is_not, self._earlier, repeat(None)))
        if self.has_any:
            clear_gradients(self._parameters)

    def put_back(self, of: slice = _ALL) -> None:
        """Only the earlier gradients remain, of parameters at these positions."""
        for parameter, earlier in zip(self._parameters[of], self._earlier[of], strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        if not self.has_any:
            return
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is None:
                continue
            if parameter.grad is not None:
                sums.append(earlier)
                terms.append(parameter.grad)
            parameter.grad = earlier
        if sums:
            add_each(sums, terms)


class HooksOff:
    """The hooks of a parameter's gradient, to be taken off.

    They are known before they are: whoever notes this first can always put them back.
    """

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


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Their gradients are None from now on."""
    for parameter in parameters:
        parameter.grad = None


class Snapshot:
    """The values of buffers at one moment.

    Those of one dtype are copied together: on their own they would be a kernel each.
    """

    def __init__(self) -> None:
        self._present: list[Tensor] = []
        self._kinds: list[Any] = []
        self._groups: list[list[Tensor]] = []
        self._copies: list[_Copy] = []

    @torch.no_grad()
    def take(self, buffers: Sequence[Tensor | None]) -> None:
        """Copies the buffers."""
        self._copies = []  # first: this memory serves for the next ones
        present = [buffer for buffer in buffers if buffer is not None]
        kinds = list(map(_KIND, present))
        if kinds != self._kinds or any(map(is_not, present, self._present)):
            self._present, self._kinds, self._groups = present, kinds, _grouped(present)
        self._copies = list(map(_Copy.of, self._groups))

    def drop(self) -> None:
        """There is nothing to restore any more."""
        self._copies = []

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back, without a trace, as batch norm writes to its own."""
        for group, copy in zip(self._groups, self._copies, strict=False):
            for buffer, value in zip(group, copy.values(), strict=True):
                if not _are_alike(buffer, value) or not torch.equal(buffer, value):
                    write_without_trace(buffer, value)


class _Copy(NamedTuple):
    """What a group of buffers had: their shapes, and all elements in a row; or one as it is."""

    shapes: list[torch.Size]
    flat: Tensor

    @classmethod
    def of(cls, group: Sequence[Tensor]) -> _Copy:
        """Of these, as they are now."""
        shapes = list(map(Tensor.size, group))
        # Of one alone `flattened` may be a view.
        return cls(shapes, flattened(group) if len(group) > 1 else group[0].clone())

    def values(self) -> list[Tensor]:
        """One for each."""
        if len(self.shapes) == 1:
            return [self.flat]
        parts = torch.split_with_sizes(self.flat, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _grouped(buffers: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one dtype together; each alone that is more than rows of elements."""
    groups: dict[Any, list[Tensor]] = {}
    for i, buffer in enumerate(buffers):
        is_plain = can_be_packed(buffer) and buffer.is_contiguous()
        groups.setdefault((buffer.dtype, buffer.device) if is_plain else i, []).append(buffer)
    return list(groups.values())


def write_without_trace(buffer: Tensor, value: Tensor) -> None:
    """Gives a buffer a value, if need be with its shape and dtype, so that no version counts it."""
    if buffer is value:
        return
    are_alike = _are_alike(buffer, value)
    is_expanded = buffer.layout is torch.strided and 0 in buffer.stride()
    if are_alike and not is_expanded:
        buffer.data.copy_(value)
    elif not are_alike or not torch.equal(buffer, value):
        buffer.data = value.clone()


def _are_alike(buffer: Tensor, value: Tensor) -> bool:
    return (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device)
