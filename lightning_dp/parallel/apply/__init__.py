"""Apply: makes one call per replica.

Decided here: threads or in order, by measurement, and how replicas wait for each other in a
rendezvous (`executor`); the threads, and what of the caller's state they have (`worker`); what
replicas exchange (`collectives`, `sync_batch_norm`); and the memory of replicas that share a
processor (`cpu`).
"""

from lightning_dp.parallel.apply import collectives as collectives
from lightning_dp.parallel.apply import sync_batch_norm as sync_batch_norm
from lightning_dp.parallel.apply.cpu import KeptMemory as KeptMemory
from lightning_dp.parallel.apply.executor import EXECUTORS as EXECUTORS
from lightning_dp.parallel.apply.executor import Calls as Calls
from lightning_dp.parallel.apply.executor import Executor as Executor
from lightning_dp.parallel.apply.executor import ExecutorName as ExecutorName
from lightning_dp.parallel.apply.executor import RendezvousError as RendezvousError
from lightning_dp.parallel.apply.executor import Task as Task
from lightning_dp.parallel.apply.executor import current_participant as current_participant
from lightning_dp.parallel.apply.sync_batch_norm import fewest_samples as fewest_samples
from lightning_dp.parallel.apply.sync_batch_norm import is_synced as is_synced
