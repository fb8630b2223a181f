"""Layers where nobody finds them: in plain lists, tuples and dicts on a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def check_nothing_hidden(root: nn.Module, is_apart: Callable[[nn.Module], bool]) -> None:
    """Refuses layers with weights or buffers that a module keeps in a plain container only.

    They are neither moved to a device nor trained nor saved, and they cannot be replicated, but for
    those that are apart (see `ReplicaRules`): a replica would compute with the root's, on another
    device. Lightning's hyperparameters, which may be layers, are in a dict of its own class, which
    is not looked into.
    """
    modules = list(root.modules())
    known = set(map(id, modules))
    for module in modules:
        for name, value in module.__dict__.items():
            for path, hidden in layers_in(value, name):
                if id(hidden) in known or is_apart(hidden):
                    continue
                if [*hidden.parameters(), *hidden.buffers()]:
                    raise ValueError(
                        f"{type(module).__qualname__}.{path}: expected layers to be registered, "
                        f"got {type(hidden).__qualname__} in a plain container: replicas cannot "
                        "have their own. Put it into an nn.ModuleList or an nn.ModuleDict, or use "
                        'DataParallelStrategy(mode="forward") and call it outside of forward.'
                    )


def layers_in(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules in containers, and how one would write where they are."""
    pairs: Any = ()
    if type(value) in (list, tuple):
        pairs = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    for key, item in pairs:
        place = f"{path}[{key!r}]"
        if isinstance(item, nn.Module):
            yield place, item
        elif type(item) in (list, tuple, dict):
            yield from layers_in(item, place)
