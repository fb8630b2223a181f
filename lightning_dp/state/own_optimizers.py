"""What `self.optimizers()` is for a replica in a step of automatic optimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_dp.state.passes import Passes


def own_optimizers(
    module: Any, twin: Callable[[], nn.Module | None], *args: Any, **kwargs: Any
) -> Any:
    """The module's optimizers, of which `zero_grad` is about the gradients of one replica.

    Each replica calls it, at the same time as others fill their gradients: with the root's it would
    take theirs away.

    Args:
        module: the module, which has that method.
        twin: what leads to its replica, which refers to this: a cycle would keep it alive.
        args: what the step gives the method.
        kwargs: as `args`.
    """
    found, own = module.optimizers(*args, **kwargs), twin()
    if own is None:
        return found
    if isinstance(found, list):
        return [OwnGradients(optimizer, module, own) for optimizer in found]
    return OwnGradients(found, module, own)


class OwnGradients(Passes):
    """An optimizer of which `zero_grad` is about a replica's gradients, and all else as it is."""

    def __init__(self, optimizer: Any, module: nn.Module, twin: nn.Module) -> None:
        super().__init__(optimizer)
        self._module, self._twin = module, twin

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the replica's gradients of the optimizer's parameters."""
        groups = self._original.param_groups
        theirs = {id(parameter) for group in groups for parameter in group["params"]}
        pairs = zip(self._module.parameters(), self._twin.parameters(), strict=True)
        for own in [own for original, own in pairs if id(original) in theirs]:
            if own.grad is None or set_to_none:
                own.grad = None
            else:
                own.grad.detach_().zero_()
