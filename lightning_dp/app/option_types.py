"""Options of what the configuration builds, checked before anything is built.

A partial, such as an optimizer, is called late, when data and model are there: what is wrong with
its options would come as a traceback out of the middle of a library.
"""

import difflib
import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

hydra_log = logging.getLogger("hydra.utils")

_GROUPS = ("trainer", "data", "model", "callbacks", "logger")
_CHECKS_ITSELF = ("trainer.strategy",)
_NUMBERS = {int, float, bool, complex, types.NoneType, Tensor}


def check_options(cfg: DictConfig) -> None:
    """Raises a ValueError for an option that its target does not have, or that is no number there.

    Targets that cannot be imported or looked into are left to those that build them.
    """
    for group in _GROUPS:
        for key, node in targets(cfg.get(group), group):
            make = _callable(node["_target_"])
            parameters = make and _parameters(make)
            if make is not None and parameters:
                _check(key, node, make, parameters)


def targets(node: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """All below a node that have a `_target_`, with their keys."""
    if not isinstance(node, DictConfig) or key in _CHECKS_ITSELF:
        return
    if isinstance(node.get("_target_"), str):
        yield key, node
    for name in node:
        if not OmegaConf.is_missing(node, name):
            yield from targets(node[name], f"{key}.{name!s}")


def _check(
    key: str, node: DictConfig, make: Callable[..., Any], parameters: dict[str, inspect.Parameter]
) -> None:
    target = node["_target_"]
    for name in node:
        if not isinstance(name, str) or name.startswith("_") or OmegaConf.is_missing(node, name):
            continue
        value = node[name]
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, 1)
            hint = f"Did you mean {key}.{close[0]}?" if close else "Leave it out."
            raise ValueError(f"{key}.{name}: expected an option of {target}, got {name!r}. {hint}")
        kinds = _kinds(make, parameters[name])
        # What an interpolation leaves out may not be needed, as the epochs of a test.
        is_needless = value is None and OmegaConf.is_interpolation(node, name)
        if kinds and not is_needless and not _is_of(value, kinds):
            default = parameters[name].default
            shown = "null" if default is None else default
            hint = "" if default is inspect.Parameter.empty else f" Left out, it is {shown}."
            raise ValueError(
                f"{key}.{name}: expected {_told(kinds)} for {target}, got {_plain(value)!r}.{hint}"
            )


def _callable(target: str) -> Callable[..., Any] | None:
    hydra_log.disabled = True  # it would log the error
    try:
        found = get_object(target)
    except Exception:  # an import may fail in any way; whoever builds it says how
        return None
    finally:
        hydra_log.disabled = False
    return found if callable(found) else None


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """By their names; None where they are not known, or any name is taken."""
    try:
        found = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return None
    taken = any(p.kind is p.VAR_KEYWORD for p in found.values())
    return None if taken else dict(found)


def _kinds(make: Callable[..., Any], parameter: inspect.Parameter) -> set[Any]:
    """The kinds of numbers that a parameter takes; empty if it takes anything else, too."""
    function = getattr(make, "__init__", make) if isinstance(make, type) else make
    try:
        hint = typing.get_type_hints(function).get(parameter.name)
    except Exception:  # annotations may name what is not there at run time
        hint = None
    if hint is None:
        number = type(parameter.default)
        return {number, types.NoneType} if number in (int, float, bool) else set()
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(hint)) if is_union else {hint}
    kinds |= {types.NoneType} if parameter.default is None else set()
    return kinds if kinds <= _NUMBERS and kinds & {int, float, bool} else set()


def _is_of(value: Any, kinds: set[Any]) -> bool:
    """Whether it is of one of the kinds; objects that are still to be built may be."""
    if isinstance(value, DictConfig):
        return "_target_" in value
    if isinstance(value, float) and not value.is_integer():
        return float in kinds
    if value is None:
        return types.NoneType in kinds
    return not isinstance(value, str | ListConfig)


def _told(kinds: set[Any]) -> str:
    kind = "a number" if float in kinds else "a whole number" if int in kinds else "true or false"
    return f"{kind} or null" if types.NoneType in kinds else kind


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
