"""Checks of what users give: errors that say what was expected, what came, and what to write."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

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


def expected(key: str, wanted: str, got: object, hint: str = "") -> ValueError:
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
    if type(dim) is not int or not -_MOST_DIMS <= dim < _MOST_DIMS:
        wanted = f"an integer from {-_MOST_DIMS} to {_MOST_DIMS - 1}"
        raise expected("dim", wanted, dim, "Write the dimension that counts the samples.")


def check_names(key: str, names: object) -> None:
    """Raises a ValueError unless it is a list of names."""
    listed = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else [None]
    if not all(isinstance(name, str) for name in listed):
        hint = "Write a list such as ['generator', 'discriminator']."
        raise expected(key, "a list of names", names, hint)
