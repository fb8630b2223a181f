"""Checks that several options share."""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(key: str, value: object, choices: Sequence[object]) -> None:
    """Raises a ValueError unless the value of an option is one of its choices.

    Example:
        >>> check_choice("mode", "foward", ("step", "forward"))
        Traceback (most recent call last):
        ...
        ValueError: mode: expected one of ['step', 'forward'], got 'foward'. Write one of these.
    """
    if value not in choices:
        raise ValueError(
            f"{key}: expected one of {list(choices)}, got {value!r}. Write one of these."
        )


def check_dim(dim: object) -> None:
    """Raises a ValueError unless it is an integer."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(
            f"dim: expected an integer, got {dim!r}. Write the dimension that counts the samples."
        )
