"""Processes: each has devices and replicas of its own, and a part of every batch.

Decided here: what processes tell each other, and when (`world`), in how many bytes (`codec`) and
round trips (`exchange`), that all begin with the same module (`alike`), what each one's loss weighs
in the joint loss (`shares`), how their gradients become one sum (`sums`, in `buckets`, of which
several are `on_the_way`), where they meet in the middle of a step (`rendezvous`, all of them at the
same: `together`), and how the graph of one goes on in the others (`crossings`).
`torch.distributed` moves the bytes; nothing of this is made where there is one process.
"""

from lightning_dp.parallel.processes.alike import make_alike as make_alike
from lightning_dp.parallel.processes.crossings import Crossings as Crossings
from lightning_dp.parallel.processes.crossings import one_graph as one_graph
from lightning_dp.parallel.processes.crossings import open_graph as open_graph
from lightning_dp.parallel.processes.on_the_way import Room as Room
from lightning_dp.parallel.processes.rendezvous import meet_processes as meet_processes
from lightning_dp.parallel.processes.shares import JointLoss as JointLoss
from lightning_dp.parallel.processes.shares import Losses as Losses
from lightning_dp.parallel.processes.shares import OwnLoss as OwnLoss
from lightning_dp.parallel.processes.shares import join_processes as join_processes
from lightning_dp.parallel.processes.sums import Sums as Sums
from lightning_dp.parallel.processes.together import ProcessesApartError as ProcessesApartError
from lightning_dp.parallel.processes.together import check_together as check_together
from lightning_dp.parallel.processes.world import World as World
