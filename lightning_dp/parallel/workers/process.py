"""The process: what becomes of workers when it forks, and when it ends.

A forked child has the thread that forked and no other: it makes its own workers. The end of the
program waits for nobody for long: workers at work are interrupted, and so are their callers.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet

from lightning_dp.parallel.workers.left_behind import (
    AT_EXIT_SECONDS,
    ended,
    interrupt,
    threads_within,
)
from lightning_dp.parallel.workers.participant import PARTICIPANT
from lightning_dp.parallel.workers.worker import Worker


class HasWorkers(Protocol):
    """Whoever gives work to workers."""

    def dismiss(self) -> list[Worker]:
        """Lets its workers go, which end when their present work does."""


_owners: WeakSet[HasWorkers] = WeakSet()


def watch(owner: HasWorkers) -> None:
    """From now on its workers are let go when the process forks or ends."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in list(_owners):
        owner.dismiss()
    # Whose call has forked, if a replica's, goes on in the parent; here are no others to meet.
    PARTICIPANT.set(None)


def _at_exit() -> None:
    workers = [worker for owner in list(_owners) for worker in owner.dismiss()]
    callers = threads_within(__package__) if workers else []
    for worker in workers:
        if worker.is_at_work:
            interrupt(worker.thread, SystemExit)  # of which no thread says anything
    # A thread that comes back from torch while Python ends would abort the process.
    ended([*[worker.thread for worker in workers], *callers], AT_EXIT_SECONDS)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
