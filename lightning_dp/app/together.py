"""Several processes of one program: one run folder, one log, one table.

torchrun starts the program several times, on one machine or on many. Hydra would give each process
a folder of its own, named by the time.
"""

import os
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_C10D: Any = torch.distributed  # whose names differ from build to build

STARTED = "LIGHTNING_DP_STARTED"
"""The variable by which a run folder is named; without it Hydra takes the time."""

_PATIENCE = timedelta(minutes=10)  # machines do not start at the same time
_LOGS = ("hydra/job_logging", "hydra/hydra_logging", "hydra.output_subdir")


def agree_on_run_folder() -> None:
    """Lets all processes that torchrun or SLURM has started for a program use one run folder.

    The first one names it, and it alone writes the log and the options there. After a restart by
    torchrun the folder is the same. Nothing happens where there is one process.
    """
    started = _started(os.environ)
    if started is None:
        return
    os.environ[STARTED] = started
    if _rank(os.environ) > 0:
        given = {argument.partition("=")[0] for argument in sys.argv[1:]}
        sys.argv += [f"{key}={_nothing(key)}" for key in _LOGS if key not in given]


def has_restarted() -> bool:
    """Whether torchrun has started this program again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def of_all(value: T) -> list[T]:
    """Every process's value, in the order of their ranks; all of them have to ask."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return [value]
    values: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _started(environ: Mapping[str, str]) -> str | None:
    """What the first process names the folder; None if there is one process."""
    if int(environ.get("WORLD_SIZE", 1)) > 1 and "TORCHELASTIC_RUN_ID" in environ:
        return _told_by_first(environ)
    if int(environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_JOB_ID" in environ:
        return f"slurm_{environ['SLURM_JOB_ID']}_{environ.get('SLURM_STEP_ID', '0')}"
    return None


def _told_by_first(environ: Mapping[str, str]) -> str | None:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return environ["TORCHELASTIC_RUN_ID"]  # static rendezvous: nobody has a store yet
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = _C10D.TCPStore(address, port, is_master=False, timeout=_PATIENCE)
    key = f"lightning_dp/started/{environ['TORCHELASTIC_RUN_ID']}"
    if _rank(environ) == 0:
        now = f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
        store.compare_set(key, "", now)  # a restart finds the first one's
    return str(store.get(key).decode())


def _rank(environ: Mapping[str, str]) -> int:
    return int(environ.get("RANK", environ.get("SLURM_PROCID", 0)))


def _nothing(key: str) -> str:
    return "null" if key.startswith("hydra.") else "none"
