"""The calls of all replicas in one apply: begun, waited for, and ended, whatever happens.

The thread that makes them happen, usually the main one, is the host. Ordinary calls never wait for
each other: the host starts them and waits until each has told its end. Only when the first one asks
for a rendezvous is one made, and the host goes on there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Any

from lightning_dp.parallel.split import Order
from lightning_dp.parallel.workers.participant import (
    ENDED,
    NO_REPLY,
    NOT_BEGUN,
    PARTICIPANT,
    RUNNING,
    Participant,
    RendezvousError,
    ReplicaStopped,
    Reply,
    State,
    Task,
)
from lightning_dp.parallel.workers.rendezvous import Rendezvous
from lightning_dp.parallel.workers.thread_state import ThreadState


class Calls:
    """The replicas' calls in one apply.

    Args:
        sizes: samples of these replicas; None if they are not known.
        order: the positions of their samples in the batch; None for the batch's own order.
        dim: the dimension along which the batch was cut.

    Attributes:
        participants: one per replica that works.
        thread_state: the host's, for the workers.
        start: lets a participant's worker do its task.
        one_by_one: whether only one replica runs at a time.
        is_open: whether the calls have not all ended.
        broken: what has ended them all, if something has.
    """

    thread_state: ThreadState
    start: Callable[[Participant], None]

    def __init__(
        self, sizes: Sequence[int] | None = None, order: Order | None = None, dim: int = 0
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.order = order
        self.dim = dim
        self.participants: list[Participant] = []
        self.one_by_one = False
        self.is_open = True
        self.broken: BaseException | None = None
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()
        # Something has come about; what, is in the participants: an interrupt must not lose it.
        self._events: SimpleQueue[None] = SimpleQueue()

    # The replicas' side

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the replicas meet; made when the first one asks for it."""
        with self._lock:
            if self._rendezvous is None:
                self._rendezvous = Rendezvous(self)
            return self._rendezvous

    def tell(self, participant: Participant, state: State) -> None:
        """Tells the host what has become of a replica."""
        participant.state = state
        self._events.put(None)

    def check(self) -> None:
        """Raises an error if the calls have been ended."""
        if self.broken is not None:
            raise self.told()

    def work(self, participant: Participant) -> None:
        """Does a task in the replica's worker, and tells the host how it ended.

        Once: the host may have told the worker twice.
        """
        if participant.is_awake:
            return
        participant.is_awake = True
        try:
            self.check()
            participant.result = participant.context.run(self._in_worker, participant)
        except BaseException as error:  # it is raised again by the thread that waits
            participant.error = error
        self.tell(participant, ENDED)

    def _in_worker(self, participant: Participant) -> Any:
        with self.thread_state.entered(participant.task.device):
            return self._do_task(participant)

    # The host's side

    @property
    def crossed(self) -> bool:
        """Whether the graph of one replica goes on in that of another."""
        return self._rendezvous is not None and self._rendezvous.crossed

    @property
    def has_failed(self) -> bool:
        """Whether a replica has failed, or all have been ended."""
        return self.broken is not None or any([p.error is not None for p in self.participants])

    def begin(self, tasks: Sequence[Task], start: Callable[[Participant], None]) -> None:
        """Makes a participant for each task; `start` gives one to its worker."""
        self.participants = [Participant(self, task) for task in tasks]
        self.start = start

    def run_in_threads(self) -> None:
        """All at once, in their workers."""
        for participant in self.participants:
            participant.state = RUNNING  # of all, before the first one can ask for a rendezvous
        for participant in self.participants:
            self.start(participant)
        self._finish()

    def run_in_order(self, *, moves: bool) -> None:
        """One after another on this thread; once one comes to a rendezvous, in their workers.

        Args:
            moves: whether some replicas' devices are not where the host is.
        """
        self.one_by_one = True
        for participant in self.participants:
            if participant.state is NOT_BEGUN:
                device = participant.task.device
                with self.thread_state.moved_to(device) if moves else nullcontext():
                    self._run_here(participant)
            if participant.error is not None or self.broken is not None:
                break
        self._finish()

    def wait(self) -> None:
        """Waits until no replica runs any more: each has ended or is at a rendezvous."""
        for participant in self.participants:
            while participant.state is RUNNING:
                self._hear()

    def advance(self, participant: Participant) -> None:
        """Lets a participant go on who can."""
        deliver, participant.deliver = participant.deliver, None
        if deliver is None:
            return
        participant.state = RUNNING
        deliver()
        while self.one_by_one and participant.state is RUNNING:
            self._hear()

    def end(self, error: BaseException) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run."""
        if self.broken is None:
            self.broken = error
        others = [p for p in self.participants if p.state is not NOT_BEGUN and not p.hosted]
        for participant in others:
            participant.deliver = None
            participant.inbox.put(Reply(error=self.told()))
            if participant.is_lost:
                self.start(participant)
        while any([participant.state is not ENDED for participant in others]):
            self._hear()

    def close(self) -> tuple[list[Any], tuple[Task | None, BaseException] | None]:
        """Lets go of everything, when all calls have ended.

        Returns:
            What the calls returned, in the order of the replicas; and the error to be raised, if
            there is one, with the task whose own it is, or None.
        """
        participants = self.participants
        if self.broken is None and any([p.state not in (NOT_BEGUN, ENDED) for p in participants]):
            self.end(KeyboardInterrupt())  # at a bad moment, since nothing else comes here
        self.is_open, self.participants = False, []
        results, failed = [], []
        for participant in participants:  # which would keep batches and graphs alive in a circle
            results.append(participant.result)
            if participant.error is not None:
                failed.append((participant.task, participant.error))
            participant.result = participant.error = participant.deliver = None
            participant.reply = NO_REPLY
        first = self.broken or (failed[0][1] if failed else None)
        self.broken = None  # which holds the frames of the calls
        if first is None:
            return results, None
        own = next((task for task, error in failed if error is first), None)
        return [], (None if isinstance(first, RendezvousError) else own, first)

    def told(self) -> BaseException:
        """What a replica is told that cannot go on because of others."""
        if isinstance(self.broken, RendezvousError):
            return self.broken
        failed = next((p for p in self.participants if p.error is self.broken), None)
        by = "the run was interrupted" if failed is None else f"replica {failed.replica} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {self.broken!r}")

    def _run_here(self, participant: Participant) -> None:
        """Does a replica's task on the host, who brings the others on while it waits for them."""
        participant.hosted, participant.deliver, participant.state = True, None, RUNNING
        try:
            participant.result = self._do_task(participant)
        except Exception as error:
            participant.error = error
        except BaseException as error:  # an interrupt
            participant.error = error
            participant.state = ENDED
            self.end(error)
            raise
        participant.state = ENDED

    def _do_task(self, participant: Participant) -> Any:
        """Does a task on this thread, as the replica's code, and times it."""
        token, start = PARTICIPANT.set(participant), time.perf_counter()
        try:
            return participant.task.call()
        finally:
            participant.task.seconds = time.perf_counter() - start - participant.waited
            PARTICIPANT.reset(token)

    def _finish(self) -> None:
        """Waits for all that have begun.

        An interrupt ends the replicas that wait, and is raised when the others have ended, too. A
        second one is raised at once.
        """
        try:
            self.wait()
            if self._rendezvous is not None:
                self._rendezvous.serve()
        except (RendezvousError, ReplicaStopped):
            return  # they have been ended, and `close` tells why
        except BaseException as error:  # an interrupt
            self.end(error)
            raise

    def _hear(self) -> None:
        """Waits until something may have come about."""
        # The timeout lets Ctrl-C through on Windows, where a lock does not.
        with contextlib.suppress(Empty):
            self._events.get(timeout=0.5)
