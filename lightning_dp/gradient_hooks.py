"""Gradient hooks: whether the user's code looks at gradients between micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_MADE_FOR_IT = "on_after_backward"
_MAY_LOOK = ("backward", "on_before_backward", "on_train_batch_start", "on_train_batch_end")
"""Hooks that run between two micro-batches. Most have nothing to do with gradients."""

_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_dp.")
_LIBRARIES = (*_LIGHTNING, "torch.")
_NAMES = ("grad_norm", "clip_grad")  # and what follows, beside `.grad`


def sees_gradients(trainer: Any) -> bool:
    """Whether the module or a callback that is the user's has a hook that looks at gradients.

    Of hooks that are for other things their code is asked, with that of the functions and methods
    that they call: whether it names gradients.
    """
    for owner in (trainer.lightning_module, *trainer.callbacks):
        if _users(owner, _MADE_FOR_IT) is not None:
            return True
        seen: set[CodeType] = set()
        if any(_names_gradients(_users(owner, hook), owner, seen) for hook in _MAY_LOOK):
            return True
    return False


def _users(owner: Any, hook: str) -> Any:
    """A hook that the user has written, or bound to the instance; else None."""
    own = getattr(owner, "__dict__", {})
    if hook in own:
        return own[hook]
    cls = next((cls for cls in type(owner).__mro__ if hook in vars(cls)), None)
    return None if cls is None or cls.__module__.startswith(_LIGHTNING) else vars(cls)[hook]


def _names_gradients(function: Any, owner: Any, seen: set[CodeType]) -> bool:
    function = _plain(function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen or f"{function.__module__}.".startswith(_LIBRARIES):
        return False
    seen.add(code)
    names = set(_names(code))
    if any(name == "grad" or name.startswith(_NAMES) for name in names):
        return True
    known = (getattr(type(owner), name, function.__globals__.get(name)) for name in names)
    return any(_names_gradients(value, owner, seen) for value in known)


def _plain(function: Any) -> Any:
    """A Python function without what is around it; None for what is none."""
    if isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    return inspect.unwrap(function) if isinstance(function, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Those of attributes and globals, also in functions and comprehensions inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
