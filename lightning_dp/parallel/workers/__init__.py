"""Workers: where the replicas' calls run, and how they wait for each other.

Decided here: threads or one after another (`apply`), how the host waits for the replicas and what
happens when one fails (`calls`), what of the caller's thread a worker has (`thread_state`), where
replicas meet in the middle of a call (`rendezvous`, seen from one replica as `participant`), and
what they do there together (`collectives`, `sync_batch_norm`).
"""

from lightning_dp.parallel.workers import collectives, sync_batch_norm
from lightning_dp.parallel.workers.apply import EXECUTORS, Executor, ExecutorName
from lightning_dp.parallel.workers.calls import Calls
from lightning_dp.parallel.workers.participant import Task, current_participant
from lightning_dp.parallel.workers.rendezvous import Rendezvous

__all__ = [
    "EXECUTORS",
    "Calls",
    "Executor",
    "ExecutorName",
    "Rendezvous",
    "Task",
    "collectives",
    "current_participant",
    "sync_batch_norm",
]
