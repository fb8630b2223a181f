"""Checks of options, and the error that Hydra prints in one line."""

import pydoc
import types
import typing
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

_NUMBERS = {int, float, bool, types.NoneType, Tensor}


class OptionError(CompactHydraException, ValueError):
    """An option that cannot be used; Hydra prints the message without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")


def check_numbers(node: Any, key: str) -> None:
    """Refuses text below a node where its `_target_` takes numbers only: `max_epochs=abc`.

    An optimizer is built late, when data and model are there, and Lightning compares numbers before
    it checks them: either would fail in the middle of a library.
    """
    if not isinstance(node, DictConfig):
        return
    numbers = _number_parameters(node.get("_target_"))
    for name in map(str, node):
        if OmegaConf.is_missing(node, name):
            continue
        if name in numbers and isinstance(node[name], str | ListConfig):
            raise OptionError(
                f"{key}.{name}: expected {numbers[name]} for {node['_target_']}, got "
                f"{node[name]!r}. Write such a number, or leave it out."
            )
        check_numbers(node[name], f"{key}.{name}")


def _number_parameters(target: str | None) -> dict[str, str]:
    """The parameters of a function or class that take numbers only, and in words what they take."""
    try:
        make: Any = pydoc.locate(target) if target else None
        function = getattr(make, "__init__", make) if isinstance(make, type) else make
        hints = typing.get_type_hints(function)
    except Exception:  # an import may fail in any way; Hydra says how when it builds the object
        return {}
    found = {}
    for name, hint in hints.items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = {*typing.get_args(hint)} if is_union else {hint}
        if kinds <= _NUMBERS and kinds & {int, float}:
            words = "a number" if float in kinds else "a whole number"
            found[name] = f"{words} or null" if types.NoneType in kinds else words
    return found
