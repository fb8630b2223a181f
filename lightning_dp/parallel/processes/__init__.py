"""Several processes: each has devices, replicas and a slice of every batch.

Decided here: how ranks exchange values, over `torch.distributed` alone (`world`); how gradients and
buffers become those of all ranks (`gradients`); what each rank's loss weighs in the joint loss, and
how the autograd graph of a step continues in other ranks (`graph`). With one process none of it is
imported.
"""

from lightning_dp.parallel.processes.gradients import RankBuffers as RankBuffers
from lightning_dp.parallel.processes.gradients import RankReducer as RankReducer
from lightning_dp.parallel.processes.graph import JointLoss as JointLoss
from lightning_dp.parallel.processes.graph import Losses as Losses
from lightning_dp.parallel.processes.graph import OwnLoss as OwnLoss
from lightning_dp.parallel.processes.graph import RankGraph as RankGraph
from lightning_dp.parallel.processes.graph import join_processes as join_processes
from lightning_dp.parallel.processes.world import ProcessesApartError as ProcessesApartError
from lightning_dp.parallel.processes.world import World as World
from lightning_dp.parallel.processes.world import check_together as check_together
