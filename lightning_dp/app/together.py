"""Several processes of one program: one run folder, one log, one table.

torchrun and SLURM start the program several times. The first process alone writes a run folder and
a log; the others' part reaches it over torch.distributed.
"""

import os
import sys
from typing import TypeVar

import torch

T = TypeVar("T")

_OF_OTHERS = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
_FOLDERS = ("hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=.")


def quiet_other_processes() -> None:
    """Lets Hydra make no folder and no log in a process that is not the first one."""
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) > 0:
        given = {argument.partition("=")[0] for argument in sys.argv}
        options = [*_OF_OTHERS, *_FOLDERS]
        sys.argv += [option for option in options if option.partition("=")[0] not in given]


def of_all(value: T) -> list[T]:
    """Every process's value, in the order of their ranks; all of them have to ask."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return [value]
    values: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
