"""Several processes, as Lightning has them: each rank has devices and loads its slice of a batch.

Decided here: ranks, the process group, each rank's devices, and that all ranks begin with the same
module and options (`ranks`); which samples of each batch a rank loads (`slices`). torchrun or SLURM
starts the processes and ends all of them when one fails.
"""

from lightning_dp.processes.ranks import ProcessesMixin as ProcessesMixin
from lightning_dp.processes.ranks import check_group_options as check_group_options
