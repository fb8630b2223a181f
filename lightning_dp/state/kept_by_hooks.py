"""Kept by hooks: tensors that hooks of modules keep outside of `self`, in one place for all."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dp.parallel.torch_private import hook_tables

LOOKS = 4
"""Steps of training with their backwards, and of evaluation, that are looked at."""

_NO_PLACE = (nn.Module, Tensor, ModuleType, type, str)


class _Place(NamedTuple):
    """Something that a hook may write to, and what it is to the hook."""

    module: str
    text: str
    content: dict[Any, Any] | list[Any]

    def tensors(self) -> dict[Any, Tensor]:
        """The tensors in it, by where they are."""
        return dict(_tensors(self.content))


class KeptByHooks:
    """Tells, once, when hooks keep tensors where all replicas do.

    On one device a step reads there what it has kept. Here replicas run at the same time, and it
    may be another one's. Only what is on `self` each replica has for itself.

    Args:
        root: the module, with its hooks.
        apart: the ids of containers of which each replica's hooks know a copy.
    """

    def __init__(self, root: nn.Module, apart: Container[int] = ()) -> None:
        self._root = root
        self._places = [place for place in _places(root) if id(place.content) not in apart]
        self._left = dict.fromkeys((True, False), LOOKS if self._places else 0)
        self._before: list[dict[Any, Tensor]] = []

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to look at any more."""
        return not any(self._left.values())

    def begin(self) -> None:
        """A step begins."""
        if self._left[self._root.training]:
            self._before = [place.tensors() for place in self._places]

    def end(self, active: Sequence[int]) -> None:
        """It has ended on these replicas."""
        before, self._before = self._before, []
        if not before or len(active) < 2:
            return
        self._left[self._root.training] -= 1
        for place, old in zip(self._places, before, strict=True):
            if any(old.get(key) is not tensor for key, tensor in place.tensors().items()):
                self._left = dict.fromkeys(self._left, 0)
                _warn(place)
                return


def _warn(place: _Place) -> None:
    warnings.warn(
        f"A hook of {place.module} keeps tensors in {place.text}, which is one place for all "
        "replicas. They run at the same time: what a step reads there may be another replica's. "
        "Keep them on self (self.kept['x'] = output, with self.kept = {} in __init__): there each "
        "replica has its own during a step.",
        stacklevel=2,
    )


def known_to_hooks(root: nn.Module) -> set[int]:
    """The ids of what its hooks know, and replicas' hooks can know another one of."""
    hooks = [hook for module in root.modules() for hook in _hooks(module)]
    return {id(value) for hook in hooks for value in _replaceable(hook)}


def _replaceable(hook: Any) -> Iterator[Any]:
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _replaceable(hook.func)
    elif isinstance(hook, FunctionType):
        yield from (value for _, value in _cells(hook))


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for table in hook_tables(module) for hook in table.values()]


def _places(root: nn.Module) -> Iterator[_Place]:
    for name, module in root.named_modules():
        where = f"{type(root).__qualname__}.{name}" if name else type(root).__qualname__
        for hook in _hooks(module):
            for text, value in _known(hook):
                yield from (_Place(where, text, content) for content in _contents(value))


def _known(hook: Any, depth: int = 1) -> Iterator[tuple[str, Any]]:
    """What a hook can get hold of beside its arguments, and what to call that."""
    if isinstance(hook, partial):
        for part in (*hook.args, *hook.keywords.values()):
            yield f"an argument of class {type(part).__qualname__}", part
        yield from _known(hook.func)
    elif isinstance(hook, MethodType):
        yield from _known(hook.__self__)
    elif isinstance(hook, FunctionType):
        for name, value in _variables(hook):
            yield f"its variable {name!r}", value
            if depth and isinstance(value, FunctionType):
                yield from _known(value, depth - 1)
    else:
        yield f"an object of class {type(hook).__qualname__}", hook


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield from _cells(function)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue


def _contents(value: Any) -> Iterator[dict[Any, Any] | list[Any]]:
    """A dict or list, or the attributes of an object and such among them."""
    if isinstance(value, dict | list):
        yield value
    elif not isinstance(value, (*_NO_PLACE, FunctionType, MethodType, partial)):
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield own
            yield from (v for v in list(own.values()) if isinstance(v, dict | list))


def _tensors(content: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Tensor]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, dict):
            yield from (((key, k), v) for k, v in list(value.items()) if isinstance(v, Tensor))
        elif isinstance(value, list | tuple):
            yield from (((key, i), v) for i, v in enumerate(value) if isinstance(v, Tensor))
