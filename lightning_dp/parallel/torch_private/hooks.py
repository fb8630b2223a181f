"""Hooks of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_dp.parallel.torch_private.found import getter


class ParameterHooks(NamedTuple):
    """Those of `register_hook` and `register_post_accumulate_grad_hook`; None before the first."""

    on_gradient: Mapping[int, Callable[[Tensor], Tensor | None]] | None
    on_parameter: Mapping[int, Callable[[Tensor], Any]] | None


hooks_of = getter(Tensor, "_backward_hooks", "_post_accumulate_grad_hooks")
"""Those of a parameter, of which `ParameterHooks` can be made."""


def hooked(parameters: Sequence[Tensor]) -> list[int]:
    """Positions of the parameters that have hooks of either kind."""
    return [i for i, (a, b) in enumerate(map(hooks_of, parameters)) if a or b]


gradient_hooks: Callable[[Tensor], Mapping[int, Any] | None] = getter(Tensor, "_backward_hooks")
"""Those that autograd calls with the gradient, and with None where there is none."""

accumulation_hooks: Callable[[Tensor], Mapping[int, Any] | None] = getter(
    Tensor, "_post_accumulate_grad_hooks"
)
"""Those that autograd calls when it has added the gradient to what was there."""


def take_hooks_off(parameter: Tensor) -> ParameterHooks:
    """Autograd calls no hook of the parameter until they are put back."""
    hooks = ParameterHooks(*hooks_of(parameter))
    # None would not take them off: autograd goes on with the table it was last given.
    put_hooks_back(parameter, ParameterHooks(OrderedDict(), OrderedDict()))
    return hooks


def put_hooks_back(parameter: Any, hooks: ParameterHooks) -> None:
    """The parameter has these hooks, and no others."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
