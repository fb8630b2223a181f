"""How a private name of torch is asked for, and what is said if it is gone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch


def found(owner: Any, name: str) -> Any:
    """A private name of torch's, or an ImportError that tells the release that has it no longer."""
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ImportError(
            f"Expected torch to have {where}.{name}, got torch {torch.__version__} without it. "
            "Install torch 2.13, with which lightning_dp has been tested, or a later lightning_dp."
        )
    return getattr(owner, name)


def getter(example: Any, *names: str) -> Any:
    """A function that reads attributes, which an example must have."""
    for name in names:
        found(example, name)
    return attrgetter(*names)
