"""What `self.optimizers()` gives a replica's step: `zero_grad` empties that replica's gradients."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from lightning_dp.parallel.contexts import ObjectProxy


class OwnOptimizers:
    """Stands in for `optimizers` of a replica whose step runs a backward of its own.

    All replicas call it at the same time: the optimizer's own `zero_grad` would empty the root's
    gradients, which replica 0 fills meanwhile, and leave the replica's.

    Args:
        module: the user's module, on the root.
        replica: its replica, which keeps this object; a reference to it would be a cycle.
    """

    def __init__(self, module: Any, replica: nn.Module) -> None:
        self._module, self._replica = module, weakref.ref(replica)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's optimizers."""
        found, replica = self._module.optimizers(*args, **kwargs), self._replica()
        if replica is None:
            return found
        if isinstance(found, list):
            return [_OwnGradients(optimizer, self._module, replica) for optimizer in found]
        return _OwnGradients(found, self._module, replica)


class _OwnGradients(ObjectProxy):
    """An optimizer of which `zero_grad` is about a replica's gradients, and all else as it is."""

    def __init__(self, optimizer: Any, module: nn.Module, replica: nn.Module) -> None:
        super().__init__(optimizer)
        self._module, self._replica = module, replica

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the replica's gradients of the optimizer's parameters."""
        groups = self._original.param_groups
        theirs = {id(parameter) for group in groups for parameter in group["params"]}
        pairs = zip(self._module.parameters(), self._replica.parameters(), strict=True)
        for own in [own for original, own in pairs if id(original) in theirs]:
            if own.grad is None or set_to_none:
                own.grad = None
            else:
                own.grad.detach_().zero_()
