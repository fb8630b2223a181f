"""Checks of what users give: options that several share, and the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


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
