"""Attempts: one after another, the processes that whoever started them has started again.

torchrun keeps its store while it starts processes again, so that what an earlier attempt has
written there, such as addresses, would mislead the next one: each attempt has names of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeAlias, cast
from uuid import uuid4

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

TIMEOUT = timedelta(minutes=30)  # torch's own for gloo

Store: TypeAlias = Any
_dist: Any = dist  # its types do not say that it exports stores

_A_WHILE = timedelta(seconds=0.2)


def open_store(environment: ClusterEnvironment, timeout: timedelta) -> Store:
    """The store of this attempt, which all its processes share and no other one."""
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    rank, size = environment.global_rank(), environment.world_size()
    store, _, _ = next(_dist.rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    attempt = _agreed(prefixed("lightning_dp/join", store), rank, size, timeout)
    return prefixed(f"lightning_dp/{attempt}", store)


def prefixed(prefix: str, store: Store) -> Store:
    """A store whose names all begin with a prefix in another one."""
    return _dist.PrefixStore(prefix, store)


def survives_processes() -> bool:
    """Whether the store is kept by whoever has started the processes, not by the first of them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agreed(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the first process gives to all that are there now.

    The counts of restarts that torchrun tells are no such name: with several machines they differ,
    and they may come again.
    """
    own = uuid4().hex
    if rank == 0:
        for other in range(1, size):
            _answer(store, other, own, timeout)
        return own
    store.set(f"asks/{rank}", own)
    attempt = cast(bytes, store.get(f"answer/{own}")).decode()
    store.set(f"heard/{attempt}/{rank}", "")
    return attempt


def _answer(store: Store, other: int, attempt: str, timeout: timedelta) -> None:
    """Until the process has heard it: the one that asked may be of an earlier attempt."""
    for _ in range(max(1, int(timeout / _A_WHILE))):
        try:
            store.wait([f"asks/{other}"], timeout)
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"Expected process {other} to join, got nothing from it in {timeout}."
            ) from error
        asking = cast(bytes, store.get(f"asks/{other}")).decode()
        store.set(f"answer/{asking}", attempt)
        try:
            store.wait([f"heard/{attempt}/{other}"], _A_WHILE)
        except dist.DistStoreError:
            continue
        return
    raise TimeoutError(f"Expected process {other} to join, got nothing from it in {timeout}.")
