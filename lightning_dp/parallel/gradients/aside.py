"""Gradients and hooks of parameters, taken off for a while and put back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GradientsAside:
    """The gradients of earlier backwards, apart while another one runs.

    If that one does not end, its half-done work can be taken away from theirs.

    Args:
        parameters: their gradients are None from now on.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
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
            torch._foreach_add_(sums, terms)


class HooksOff:
    """The hooks of a parameter's gradient, taken off.

    Args:
        parameter: whose.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._on_gradient = parameter._backward_hooks
        self._on_parameter = parameter._post_accumulate_grad_hooks
        # None would not take them off: autograd goes on with the table it was last given.
        parameter._backward_hooks = OrderedDict()
        parameter._post_accumulate_grad_hooks = OrderedDict()

    def put_back(self) -> None:
        """Autograd calls them again."""
        self._parameter._backward_hooks = self._on_gradient
        self._parameter._post_accumulate_grad_hooks = self._on_parameter

    def call(self, earlier: Tensor | None) -> None:
        """Calls them with the gradient that has come in the meantime, and adds the earlier one."""
        parameter, gradient = self._parameter, self._parameter.grad
        parameter.grad = earlier
        if gradient is None:
            return
        for hook in _values(self._on_gradient):
            answer = hook(gradient)
            gradient = gradient if answer is None else answer
        parameter.grad = gradient if earlier is None else earlier + gradient
        for hook in _values(self._on_parameter):
            hook(parameter)


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Their gradients are None from now on."""
    for parameter in parameters:
        parameter.grad = None


def hooked_positions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where somebody is to be told of the gradient."""
    return [
        i
        for i, parameter in enumerate(parameters)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]


def _values(hooks: dict[int, Any] | None) -> list[Any]:
    return list((hooks or {}).values())
