"""Workers: where the replicas' calls run, and how they wait for each other.

Decided here: threads or one after another (`apply`, `trial`), how the host waits for the replicas
and what happens when one fails (`calls`), what becomes of one that does not end (`left_behind`), of
workers (`worker`) when the process forks or ends (`process`), what of the caller's thread a worker
has, and how many threads the caller takes beside them (`thread_state`), what becomes of memory that
they free (`freed_memory`), what of torch's is not for threads (`forward_levels`, `generators`) or
not for their first calls (`cuda`), where replicas meet in the middle of a call (`rendezvous`, seen
from one replica as `participant`) and with those of other processes (`across`), and what they do
there together (`collectives`, `sync_batch_norm`).
"""

from lightning_dp.parallel.workers import collectives as collectives
from lightning_dp.parallel.workers import left_behind as left_behind
from lightning_dp.parallel.workers import sync_batch_norm as sync_batch_norm
from lightning_dp.parallel.workers.across import as_one_replica as as_one_replica
from lightning_dp.parallel.workers.apply import EXECUTORS as EXECUTORS
from lightning_dp.parallel.workers.apply import Executor as Executor
from lightning_dp.parallel.workers.apply import ExecutorName as ExecutorName
from lightning_dp.parallel.workers.calls import Calls as Calls
from lightning_dp.parallel.workers.freed_memory import KeptMemory as KeptMemory
from lightning_dp.parallel.workers.participant import PARTICIPANT as PARTICIPANT
from lightning_dp.parallel.workers.participant import Task as Task
from lightning_dp.parallel.workers.participant import current_participant as current_participant
from lightning_dp.parallel.workers.participant import refuse_own_backward as refuse_own_backward
from lightning_dp.parallel.workers.sync_batch_norm import fewest_samples as fewest_samples
from lightning_dp.parallel.workers.thread_state import OneThread as OneThread
