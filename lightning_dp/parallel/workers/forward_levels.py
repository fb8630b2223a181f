"""Levels of derivatives in forward mode: the whole process's, and not a thread's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad

NAME = "dp-replica-"
"""What the names of workers' threads begin with."""

_begin: Callable[[], Any] = forward_ad.enter_dual_level


def refuse_levels_in_workers() -> None:
    """From now on, a derivative in forward mode that begins in a worker raises an error.

    Replicas that run at once would end each other's level, and compute something else each time.
    """
    forward_ad.enter_dual_level = _enter_dual_level


def _enter_dual_level() -> Any:
    if threading.current_thread().name.startswith(NAME):
        raise RuntimeError(
            "Expected no derivative in forward mode (torch.func.jvp, jacfwd or hessian, "
            "torch.autograd.forward_ad) where replicas run in threads, got one, whose level is "
            'the whole process\'s. Use DataParallelStrategy(executor="inorder"), or derive in '
            "reverse mode (torch.func.vjp, jacrev)."
        )
    return _begin()
