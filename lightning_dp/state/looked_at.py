"""Which attributes of which modules are the user's, and so looked at, and what they are called."""

from __future__ import annotations

from torch import nn

from lightning_dp.parallel.torch_private import hook_tables

_OF_TORCH = frozenset(nn.Module().__dict__)
_LAYERS = ("torch.nn.",)
_OTHERS = ("torch.", "torchmetrics.")
"""Packages of which the modules have nothing that a user has put there: compiled ones, metrics."""


def is_looked_at(module: nn.Module) -> bool:
    """Whether a user may have put something on it.

    Layers of torch: a hook may keep the layer's output there. Not where a hook of torch's own (the
    older weight norm, spectral norm and pruning) binds a weight anew in every forward.
    """
    package = f"{type(module).__module__}."
    if package.startswith(_LAYERS):
        hooks = [hook for table in hook_tables(module) for hook in table.values()]
        return not any(type(hook).__module__.startswith(_LAYERS) for hook in hooks)
    return not package.startswith(_OTHERS)


def not_looked_at(module: nn.Module) -> frozenset[str]:
    """The names of the attributes that are torch's own.

    On layers of torch these are the private ones that it has already. What a step adds is a user's.

    Example:
        >>> sorted(not_looked_at(nn.ParameterDict()) - not_looked_at(nn.Identity()))
        ['_keys']
    """
    if not f"{type(module).__module__}.".startswith(_LAYERS):
        return _OF_TORCH
    return _OF_TORCH | {name for name in vars(module) if name.startswith("_")}


def names_of(root: nn.Module) -> dict[int, str]:
    """What its modules are called in messages, by their ids: a layer of torch by its place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> names_of(net)[id(net[0])]
        'Sequential.0'
    """
    return {
        id(module): f"{type(root).__qualname__}.{place}"
        for place, module in root.named_modules()
        if place and f"{type(module).__module__}.".startswith(_LAYERS)
    }
