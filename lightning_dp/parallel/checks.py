"""Checks of what users give: options that several share, and the module."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, cast

from torch import nn
from torch.optim import Optimizer

P = ParamSpec("P")

_MOST_DIMS = 64  # of a torch tensor
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = 16


def short_repr(value: object) -> str:
    """A value in one line of an error, however long it is, and whatever its `repr` does.

    Example:
        >>> short_repr([1, 10**400])[:20]
        '[1, 1000000000000000'
    """
    try:
        return " ".join(_SHORT.repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        return f"a huge {type(value).__qualname__}"


def expected(key: str, wanted: str, got: object, hint: str) -> ValueError:
    """The error about what a user has given as `key`.

    Example:
        >>> str(expected("dim", "an integer", "x", "Write a number."))
        "dim: expected an integer, got 'x'. Write a number."
    """
    return ValueError(f"{key}: expected {wanted}, got {short_repr(got)}. {hint}".rstrip())


def check_choice(key: str, value: object, choices: Sequence[object]) -> None:
    """Raises a ValueError unless the value of an option is one of its choices.

    Example:
        >>> check_choice("mode", "foward", ("step", "forward"))
        Traceback (most recent call last):
        ...
        ValueError: mode: expected one of ['step', 'forward'], got 'foward'. Write one of these.
    """
    if not is_choice(value, choices):
        raise expected(key, f"one of {list(choices)}", value, "Write one of these.")


def is_choice(value: object, choices: Sequence[object]) -> bool:
    """Whether a value is one of the choices, and of its type: 1 is not True."""
    return any(isinstance(value, type(choice)) and value == choice for choice in choices)


def check_dim(dim: Any) -> None:
    """Raises a ValueError unless it can be a dimension of a tensor."""
    is_int = isinstance(dim, int) and not isinstance(dim, bool)
    if not is_int or not -_MOST_DIMS <= dim < _MOST_DIMS:
        wanted = f"an integer from {-_MOST_DIMS} to {_MOST_DIMS - 1}"
        raise expected("dim", wanted, dim, "Write the dimension that counts the samples.")


def check_module(module: Any) -> None:
    """Raises a TypeError unless it is a module."""
    if isinstance(module, Optimizer):
        raise TypeError(
            "DataParallel: expected a module, got an optimizer. Optimizers need no wrapping: make "
            f"{type(module).__qualname__}(net.parameters(), ...) of the wrapped module's "
            "parameters and call its step() as always; gradients are summed there."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"DataParallel: expected a torch.nn.Module, got {type(module).__qualname__}. "
            "Wrap the module that computes the outputs."
        )


def check_names(key: str, names: object) -> None:
    """Raises a ValueError unless it is a list of names."""
    listed = list(names) if isinstance(names, Sequence) else [None]
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        one = f"[{names!r}]" if isinstance(names, str) else "['generator', 'discriminator']"
        raise expected(key, "a list of names", names, f"Write {one}.")


def named_options(init: Callable[P, None]) -> Callable[P, None]:
    """Makes an `__init__` refuse unknown options, in the name of the object's class.

    Options that differ from their defaults are kept in `given_options`, as text.
    """
    parameters = list(inspect.signature(init).parameters.values())[1:]
    defaults = {parameter.name: short_repr(parameter.default) for parameter in parameters}

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        this, *unnamed = cast(tuple[Any, ...], args)
        owner = type(this).__qualname__
        if unnamed:
            raise TypeError(
                f"{owner}: expected options by name, got {short_repr(unnamed[0])} without one. "
                f"Write {next(iter(defaults))}={short_repr(unnamed[0])}, or the name that you mean."
            )
        for name in options.keys() - defaults.keys():
            close = difflib.get_close_matches(name.lower(), defaults, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"They are {[*defaults]}."
            raise TypeError(f"{owner}: expected one of its options, got {name!r}. {hint}")
        # By what they look like: a comparison of arrays is no answer.
        texts = {name: short_repr(value) for name, value in options.items()}
        this.given_options = {n: text for n, text in texts.items() if text != defaults[n]}
        init(*args, **options)

    return checked
