"""Several processes of one program: one run folder, one log, one table.

torchrun and SLURM start the program several times, on one machine or on many. Hydra would give each
process a folder of its own, named by the time.
"""

import os
import sys
from datetime import datetime, timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_C10D: Any = torch.distributed  # whose names differ from build to build

STARTED = "LIGHTNING_DP_STARTED"
"""The variable by which conf/hydra/default.yaml names a run folder, in place of the time."""

_NO_LOGS = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
_MACHINES_START_WITHIN = timedelta(minutes=10)


def agree_on_run_folder() -> None:
    """Lets all processes of a job use one run folder; the first one alone writes the log there."""
    env = os.environ
    if int(env.get("WORLD_SIZE", 1)) > 1 and "TORCHELASTIC_RUN_ID" in env:
        env[STARTED] = _torchrun_start()
    elif int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_JOB_ID" in env:
        env[STARTED] = f"slurm_{env['SLURM_JOB_ID']}_{env.get('SLURM_STEP_ID', '0')}"
    else:
        return
    if _rank() > 0:
        given = {argument.partition("=")[0] for argument in sys.argv}
        sys.argv += [option for option in _NO_LOGS if option.partition("=")[0] not in given]


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


def _torchrun_start() -> str:
    """The time at which the first process started, the same after a restart."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return env["TORCHELASTIC_RUN_ID"]  # a static rendezvous has no store yet
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = _C10D.TCPStore(address, port, is_master=False, timeout=_MACHINES_START_WITHIN)
    key = f"lightning_dp/started/{env['TORCHELASTIC_RUN_ID']}"
    if _rank() == 0:
        store.compare_set(key, "", f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    return str(store.get(key).decode())


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
