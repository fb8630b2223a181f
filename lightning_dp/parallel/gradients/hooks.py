"""Gradient hooks of parameters see the gradient of the whole batch, once, as on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_dp.parallel.gradients.reduce import reduce_gradients


class GradientHooks:
    """The hooks of the root's parameters, taken off for the time of a backward.

    Autograd would call them with the root's own share of the gradient. Instead they are called
    after the replicas' shares are summed; so parameters with hooks are reduced in every backward,
    also while gradients accumulate.

    Args:
        parameters: the parameters of each replica, root first.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        hooked = [
            i
            for i, parameter in enumerate(parameters[0])
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]
        self._parameters = [[replica[i] for i in hooked] for replica in parameters]
        self._hooked = [_Hooked(parameter) for parameter in self._parameters[0]]

    def call(self) -> None:
        """Puts the hooks back and calls them with the summed gradients."""
        reduce_gradients(self._parameters)
        for hooked in self._hooked:
            hooked.put_back()
        for hooked in self._hooked:
            hooked.call()

    def put_back(self) -> None:
        """Only puts hooks and gradients back: the backward did not end."""
        for hooked in self._hooked:
            hooked.put_back()
            hooked.forget()


class _Hooked:
    """A parameter without its hooks and without the gradient of earlier backwards."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._before = parameter.grad
        self._on_gradient = parameter._backward_hooks
        self._on_parameter = parameter._post_accumulate_grad_hooks
        parameter.grad = None
        # None would not take the hooks off: autograd goes on with the table it was last given.
        parameter._backward_hooks = OrderedDict()
        parameter._post_accumulate_grad_hooks = OrderedDict()

    def put_back(self) -> None:
        self._parameter._backward_hooks = self._on_gradient
        self._parameter._post_accumulate_grad_hooks = self._on_parameter

    def forget(self) -> None:
        self._parameter.grad = self._before

    def call(self) -> None:
        parameter, gradient = self._parameter, self._parameter.grad
        parameter.grad = self._before
        if gradient is None:
            return
        gradient = _passed_through(self._on_gradient, gradient)
        parameter.grad = gradient if self._before is None else self._before + gradient
        for hook in (self._on_parameter or {}).values():
            hook(parameter)


def _passed_through(
    hooks: dict[Any, Callable[[Tensor], Tensor | None]] | None, x: Tensor
) -> Tensor:
    for hook in (hooks or {}).values():
        answer = hook(x)
        x = x if answer is None else answer
    return x
