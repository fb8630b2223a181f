"""The process group of torch, through which processes tell each other things."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_dp.lightning_private import join_process_group
from lightning_dp.parallel.checks import told
from lightning_dp.processes.attempts import TIMEOUT, open_store


def check_group_options(backend: str | None, timeout: timedelta | float | None) -> timedelta | None:
    """Raises a ValueError where these options are wrong; returns the timeout, as torch has it."""
    if backend is not None and not _is_backend(backend):
        raise ValueError(
            f"process_group_backend: expected a name such as 'gloo', 'nccl' or "
            f"'cpu:gloo,cuda:nccl', or None, got {told(backend)}. Leave it out to have it chosen."
        )
    if timeout is None:
        return None
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (is_number or isinstance(timeout, timedelta)) or not 0 < seconds < math.inf:
        raise ValueError(
            "timeout: expected more than 0 seconds, as a number or a datetime.timedelta, or None, "
            f"got {told(timeout)}. Leave it out for torch's own, half an hour with gloo."
        )
    try:
        return timedelta(seconds=seconds)
    except OverflowError as error:
        raise ValueError(
            f"timeout: expected fewer seconds, got {told(timeout)}. Write an hour as 3600."
        ) from error


def chosen_backend(asked: str | None, roots: Sequence[torch.device]) -> str:
    """What a process group is to be made of.

    Args:
        asked: what the user wants, if anything.
        roots: the root devices of this machine's processes, which add up gradients.

    Raises:
        ValueError: what the user wants does not serve the devices.
    """
    kind = roots[0].type
    if asked is not None:
        _check_served(asked.lower(), kind)
        return asked.lower()
    # Not run on a GPU yet. NCCL takes a GPU from one process alone.
    return "cpu:gloo,cuda:nccl" if kind == "cuda" and len(set(roots)) == len(roots) else "gloo"


_store: Any = None  # of the group that was made here


def join_group(environment: ClusterEnvironment, backend: str, **options: Any) -> Any:
    """Makes the process group, which ends with the program, or takes the one that is there.

    Returns the store that its processes share; None if somebody else has made the group.

    Args:
        environment: says who is who.
        backend: as `chosen_backend` says.
        options: those of `torch.distributed.init_process_group`.

    Raises:
        ValueError: there is one already, of other processes.
    """
    import torch.distributed as dist

    size, rank = environment.world_size(), environment.global_rank()
    if not dist.is_initialized():
        global _store
        _store = open_store(environment, options.get("timeout", TIMEOUT))
        join_process_group(environment, backend, store=_store, **options)
        atexit.register(_leave)
        return _store
    if (dist.get_world_size(), dist.get_rank()) != (size, rank):
        raise ValueError(
            "Expected torch's process group, which is there already, to be of the processes that "
            f"train: process {rank} of {size}, got process {dist.get_rank()} of "
            f"{dist.get_world_size()}. Leave it to the strategy, or make it of all processes."
        )
    return _store


def _is_backend(backend: object) -> bool:
    """Whether it is one that torch knows, or a list of types of devices with theirs."""
    import torch.distributed as dist

    if not isinstance(backend, str) or not dist.is_available():
        return False
    pairs = [entry.split(":") for entry in backend.lower().split(",")]
    if len(pairs) > 1 and any(len(pair) == 1 for pair in pairs):
        return False
    known = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    return all(len(pair) <= 2 and all(pair) and pair[-1] in known for pair in pairs)


def _check_served(backend: str, kind: str) -> None:
    """Where it is known that a backend serves GPUs alone, and sums are elsewhere."""
    if backend in ("nccl", "cuda:nccl") and kind != "cuda":
        raise ValueError(
            f"process_group_backend: expected one for {kind} devices, got {backend!r}, which "
            "serves GPUs of NVIDIA and AMD alone. Use 'gloo', or leave it out."
        )


def _leave() -> None:
    import torch.distributed as dist

    global _store
    _store = None
    if dist.is_initialized():
        dist.destroy_process_group()
