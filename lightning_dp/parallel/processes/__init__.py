"""Several processes: each has devices, replicas and a slice of every batch.

Decided here: how ranks exchange values, over `torch.distributed` alone (`world`); the joint loss of
all ranks and the sums of their gradients (`rank_losses`). With one process none of it is imported.
"""

from lightning_dp.parallel.processes.rank_losses import JointLoss as JointLoss
from lightning_dp.parallel.processes.rank_losses import exchange_losses as exchange_losses
from lightning_dp.parallel.processes.rank_losses import sum_gradients as sum_gradients
from lightning_dp.parallel.processes.world import ProcessesApartError as ProcessesApartError
from lightning_dp.parallel.processes.world import World as World
