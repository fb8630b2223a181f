"""Activation checkpoints that compute again with the random numbers of before.

Not `lightning_dp.checkpointing`, which is about files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint

from lightning_dp.parallel.torch_private.found import found

Watch: TypeAlias = Callable[[], Callable[[], None] | None]
"""Is called where what is checkpointed begins; what it returns, where it has ended."""

_MODULE: Any = checkpoint
_begin: Callable[..., Any] = found(checkpoint, "_checkpoint_without_reentrant_generator")
_forward: Callable[..., Any] = checkpoint.CheckpointFunction.forward
_watches: list[Watch] = []  # the one that hears, if there is one


def watch_checkpoints(watch: Watch) -> None:
    """From now on, `watch` hears of checkpoints that keep where the random numbers stand.

    Those are all but the ones of `preserve_rng_state=False`. Another call replaces `watch`.
    """
    if not _watches:
        _MODULE._checkpoint_without_reentrant_generator = _heard_begin
        _MODULE.CheckpointFunction.forward = staticmethod(_heard_forward)
    _watches[:] = [watch]


def _heard_forward(ctx: Any, function: Any, preserve: bool, *args: Any) -> Any:
    ended = _watches[0]() if preserve else None
    try:
        return _forward(ctx, function, preserve, *args)
    finally:
        if ended is not None:
            ended()


def _heard_begin(function: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
    way = _begin(function, preserve, *args, **kwargs)
    is_kept = preserve and torch.is_grad_enabled()  # else nothing is computed again
    ended = _watches[0]() if is_kept else None
    return way if ended is None else _until(ended, way)


def _until(ended: Callable[[], None], way: Generator[None, None, None]) -> Any:
    try:
        yield from way
    finally:
        ended()
