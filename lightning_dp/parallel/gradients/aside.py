"""Gradients, hooks and the values of buffers: set aside for a while, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private import (
    ParameterHooks,
    add_to_each,
    copy_to_each,
    hooks_of,
    put_hooks_back,
    take_hooks_off,
)


class GradientsAside:
    """The gradients of earlier backwards, apart while another one runs.

    If that one does not end, its half-done work can be taken away from theirs.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = [parameter.grad for parameter in self._parameters]
        clear_gradients(self._parameters)

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
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
            add_to_each(sums, terms)


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
    """The values of buffers at one moment; taken again and again into the same memory."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def take(self, buffers: Sequence[Tensor | None]) -> None:
        """Copies the buffers."""
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        pairs = zip(self._buffers, self._values, strict=False)
        if len(self._buffers) != len(self._values) or not all(_are_alike(*pair) for pair in pairs):
            self._values = [buffer.clone() for buffer in self._buffers]
        elif self._values:
            copy_to_each(self._values, self._buffers)

    def drop(self) -> None:
        """There is nothing to restore any more; the memory is kept for the next one."""
        self._buffers = []

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their values back, without a trace, as batch norm writes to its own."""
        for buffer, value in zip(self._buffers, self._values, strict=False):
            if not _are_alike(buffer, value) or not torch.equal(buffer, value):
                write_without_trace(buffer, value)


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
