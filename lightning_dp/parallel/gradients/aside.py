"""Gradients and hooks of parameters, taken off for a while and put back."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_dp.parallel.torch_private import add_to_each, put_hooks_back, take_hooks_off


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
            add_to_each(sums, terms)


class HooksOff:
    """The hooks of a parameter's gradient, taken off.

    Args:
        parameter: whose.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._hooks = take_hooks_off(parameter)

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


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Their gradients are None from now on."""
    for parameter in parameters:
        parameter.grad = None
