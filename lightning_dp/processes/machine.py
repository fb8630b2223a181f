"""A machine: how many processes it has, and which of its devices are whose."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment

from lightning_dp.parallel.split import even


def number_processes(environment: ClusterEnvironment, num_nodes: int) -> None:
    """Tells Lightning's own environment how many processes there are, and which one this is.

    Others know it from whoever has started the processes. Where nobody has, somebody starts one
    process on each machine, and tells it which one it is.

    Raises:
        ValueError: nobody has started other processes, or the environment does not say enough.
    """
    if environment.world_size() > 1:
        return
    by_hand = _is_by_hand(environment)
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if by_hand and "LOCAL_RANK" in os.environ else 1
    if num_nodes * n == 1:
        return
    missing = [name for name in _needed(num_nodes, n) if name not in os.environ]
    if not by_hand or missing == _needed(num_nodes, n):
        raise ValueError(
            f"num_nodes: expected 1, as nobody has started processes on other machines, got "
            f"{num_nodes}. Start the script on each machine by torchrun or SLURM; or by hand, with "
            "NODE_RANK, MASTER_ADDR and MASTER_PORT set."
        )
    if missing:
        raise ValueError(
            f"num_nodes={num_nodes}: expected the variables {', '.join(_needed(num_nodes, n))} to "
            f"be set on each machine, got nothing for {', '.join(missing)}. NODE_RANK counts the "
            "machines from 0; the others are address and a free port of the first one."
        )
    _check_rank("NODE_RANK", environment.node_rank(), num_nodes, "num_nodes")
    _check_rank("LOCAL_RANK", environment.local_rank(), n, "LOCAL_WORLD_SIZE")
    environment.set_world_size(num_nodes * n)
    environment.set_global_rank(environment.node_rank() * n + environment.local_rank())


def local_size(environment: ClusterEnvironment, num_nodes: int) -> int:
    """How many processes this machine has.

    Raises:
        ValueError: there are more or fewer machines than the Trainer was told.
    """
    size, machines = environment.world_size(), _told_machines(environment)
    name = "SLURM_NTASKS_PER_NODE" if _is_slurm(environment) else "LOCAL_WORLD_SIZE"
    own = int(os.environ.get(name, max(1, size // num_nodes)))
    if machines is None:  # then each has as many processes
        machines = size // own if size % own == 0 else None
    if machines != num_nodes:
        told = f"{size} processes were started, {own} on this machine"
        expected = f"{machines}, as" if machines else "as many as there are machines:"
        raise ValueError(
            f"num_nodes: expected {expected} {told}, got {num_nodes}. Say Trainer(num_nodes=...) "
            "how many machines there are."
        )
    if environment.local_rank() >= own:
        _check_rank("The local rank", environment.local_rank(), own, name)
    return own


def share(count: int, processes: int, rank: int) -> slice:
    """Which of a machine's devices are those of one of its processes: neighbours, in order.

    Example:
        >>> [share(3, 2, rank) for rank in range(2)]
        [slice(0, 2, None), slice(2, 3, None)]
    """
    if count < processes:
        raise ValueError(
            f"devices: expected at least {processes}, one for each of this machine's processes, "
            f"got {count}. Trainer(devices=...) says how many a machine has; its processes share "
            "them out."
        )
    sizes = even(count, processes)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def _needed(num_nodes: int, n: int) -> list[str]:
    where = ["NODE_RANK"] if num_nodes > 1 else []
    return [*where, "MASTER_ADDR", "MASTER_PORT"]


def _check_rank(name: str, rank: int, size: int, of: str) -> None:
    if not 0 <= rank < size:
        raise ValueError(
            f"{name}: expected a number from 0 to {size - 1}, as {of} is {size}, got {rank}. Count "
            "from 0, and give each its own number."
        )


def _told_machines(environment: ClusterEnvironment) -> int | None:
    """How many machines there are, if whoever has started the processes says so."""
    name = "SLURM_NNODES" if _is_slurm(environment) else "GROUP_WORLD_SIZE"
    return int(os.environ[name]) if name in os.environ else None


def _is_slurm(environment: Any) -> bool:
    # Both of Lightning's packages have such a class.
    return any(cls.__name__ == "SLURMEnvironment" for cls in type(environment).__mro__)


def _is_by_hand(environment: Any) -> bool:
    return any(cls.__name__ == "LightningEnvironment" for cls in type(environment).__mro__)
