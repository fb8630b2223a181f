"""Several processes: each has devices, replicas and a slice of every batch.

Decided here: how ranks exchange values, over `torch.distributed` alone (`world`); the joint loss of
all ranks and the sums of their gradients (`step`); how the autograd graph of a step continues in
other ranks (`graph`). With one process none of it is imported.
"""

from lightning_dp.parallel.processes.graph import RankGraph as RankGraph
from lightning_dp.parallel.processes.step import JointLoss as JointLoss
from lightning_dp.parallel.processes.step import exchange_losses as exchange_losses
from lightning_dp.parallel.processes.step import sum_gradients as sum_gradients
from lightning_dp.parallel.processes.world import ProcessesApartError as ProcessesApartError
from lightning_dp.parallel.processes.world import World as World
