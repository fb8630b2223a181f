"""What `self.optimizers()` is for a replica in a step of automatic optimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def own_optimizers(
    optimizers: Callable[..., Any], module: nn.Module, twin: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """The module's optimizers, of which `zero_grad` is about the gradients of one replica.

    Each replica calls it, at the same time as others fill their gradients: with the root's it would
    take theirs away.

    Args:
        optimizers: the module's own method.
        module: the module.
        twin: its replica.
        args: what the step gives that method.
        kwargs: as `args`.
    """
    found = optimizers(*args, **kwargs)
    if not getattr(module, "automatic_optimization", False):
        return found  # there all replicas call it together, once
    if isinstance(found, list):
        return [OwnGradients(optimizer, module, twin) for optimizer in found]
    return OwnGradients(found, module, twin)


class OwnGradients:
    """An optimizer of which `zero_grad` is about a replica's gradients, and all else as it is."""

    def __init__(self, optimizer: Any, module: nn.Module, twin: nn.Module) -> None:
        self._optimizer, self._module, self._twin = optimizer, module, twin

    @property  # type: ignore[misc]  # it cannot be set
    def __class__(self) -> type[Any]:
        """The optimizer's, for whoever asks."""
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        """All else is the optimizer's."""
        return getattr(self._optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the replica's gradients of the optimizer's parameters."""
        groups = self._optimizer.param_groups
        theirs = {id(parameter) for group in groups for parameter in group["params"]}
        pairs = zip(self._module.parameters(), self._twin.parameters(), strict=True)
        for own in [own for original, own in pairs if id(original) in theirs]:
            if own.grad is None or set_to_none:
                own.grad = None
            else:
                own.grad.detach_().zero_()
