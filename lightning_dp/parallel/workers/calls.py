"""The calls of all replicas in one apply: begun, waited for, and ended, whatever happens.

The thread that makes them happen, usually the main one, is the host. Ordinary calls never wait for
each other: the host starts them and waits until each has told its end. Only when the first one asks
for a rendezvous is one made, and the host goes on there.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from lightning_dp.parallel.devices import replica_text
from lightning_dp.parallel.errors import described, is_a
from lightning_dp.parallel.split import Order
from lightning_dp.parallel.workers import left_behind
from lightning_dp.parallel.workers.cuda import InTurns
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

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import Crossings, World


class Calls:
    """The replicas' calls in one apply.

    Args:
        sizes: samples of these replicas; None if they are not known.
        order: the positions of their samples in the batch; None for the batch's own order.
        dim: the dimension along which the batch was cut.
        world: the processes that have replicas; None if this is the only one.
    """

    thread_state: ThreadState  # the host's, for the workers
    start: Callable[[Participant], None]  # lets a participant's worker do its task
    names: Sequence[str] = ()  # of all replicas, those without a call too
    turns: InTurns | None = None  # of those that compute one by one, not on the CPU alone

    def __init__(
        self,
        sizes: Sequence[int] | None = None,
        order: Order | None = None,
        dim: int = 0,
        world: World | None = None,
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.order = order
        self.dim = dim
        self.world = world
        self.participants: list[Participant] = []
        self.redrawn: set[torch.device] = set()  # whose random numbers checkpoints draw again
        self.one_by_one = False  # only one replica runs at a time
        self.is_open = True  # the calls have not all ended
        self.broken: BaseException | None = None  # what has ended them all
        self.crossed = False  # the graph of one replica goes on in that of another
        self.is_conducting = False  # all stand still, and the host acts
        self.is_idle = world is not None and world.is_idle  # others get nothing from here
        self.crossings: Crossings | None = None  # where the graph goes on in other processes
        self._rendezvous: Rendezvous | None = None
        self._lock = threading.Lock()
        # Something has come about; what, is in the participants: an interrupt must not lose it.
        self._events: SimpleQueue[None] = SimpleQueue()

    def who(self, replica: int) -> str:
        """Which replica it is, for people."""
        return replica_text(replica, self.names)

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
        if not self.is_open:
            raise ReplicaStopped("Expected all replicas to meet, but the run has ended without.")
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
            if self.broken is not None or not self.is_open:
                self.check()
            call, device = self.thread_state.call, participant.task.device
            participant.context.run(call, device, self._do_task, participant)
        except BaseException as error:  # it is raised again by the thread that waits
            participant.error = error
        participant.state = ENDED
        self._events.put(None)
        if not participant.place.acquire(blocking=False):  # a thread that the call has started
            participant.inbox.put(Reply(error=ReplicaStopped("Its replica's call has ended.")))

    # The host's side

    @property
    def have_met(self) -> bool:
        """Whether a replica has asked for a rendezvous."""
        return self._rendezvous is not None

    @property
    def has_failed(self) -> bool:
        """Whether a replica has failed, or all have been ended."""
        return self.broken is not None or any([p.error is not None for p in self.participants])

    def begin(
        self, tasks: Sequence[Task], state: ThreadState, start: Callable[[Participant], None]
    ) -> None:
        """Makes a participant for each task; `start` gives one to its worker."""
        self.thread_state, self.start, self.host = state, start, threading.get_ident()
        self.participants = list(map(partial(Participant, self), tasks))

    def run_in_threads(self) -> None:
        """All at once, in their workers; Python collects garbage before and after, not meanwhile.

        Torch takes the lock of a random generator and then makes an object of Python's. Should that
        begin a collection, which lets other threads go on when it frees a tensor, another replica
        may wait for the lock and keep this one from going on, for ever.
        """
        collects = gc.isenabled()
        try:
            gc.disable()
            for participant in self.participants:
                participant.state = RUNNING  # of all, before the first can ask for a rendezvous
            for participant in self.participants:
                self.start(participant)
            self.wait()
            if self._rendezvous is not None:
                self._rendezvous.serve()
        finally:
            if collects:
                gc.enable()

    def run_in_order(self, *, moves: bool) -> None:
        """One after another on this thread; once one comes to a rendezvous, in their workers.

        The host, who does the first one's task, brings the others on while it waits for them. It
        moves from device to device, unless all are the CPU.
        """
        self.one_by_one = True
        self.turns = turns = InTurns(self.thread_state) if moves else None
        with turns or nullcontext():
            for participant in self.participants:
                if participant.state is NOT_BEGUN:
                    participant.hosted, participant.deliver, participant.state = True, None, RUNNING
                    with turns.moved_to(participant.task.device) if turns else nullcontext():
                        self._do_task(participant)
                    with participant.place:  # a thread that the call has started may host them now
                        participant.state = ENDED
                if participant.error is not None or self.broken is not None:
                    break
            if self._rendezvous is not None:
                self._rendezvous.serve()

    def begin_late(self, participant: Participant) -> None:
        """Has a worker do a task, while the tasks before it wait."""
        if self.turns is not None:
            self.turns.next(participant.task.device)
        self.start(participant)

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
        """Ends the replicas that wait, now and later, and waits for those that run.

        After an interrupt not for good: see `unended`.
        """
        if self.broken is None:
            self.broken = error
        seconds = math.inf if is_a(error, Exception) else left_behind.GRACE_SECONDS
        end = time.monotonic() + seconds
        for participant in self.unended:
            participant.deliver = None
            participant.inbox.put(Reply(error=self.told()))
            if participant.is_lost:
                self.start(participant)
        while self.unended and (left := end - time.monotonic()) > 0:
            self._hear(left)

    @property
    def unended(self) -> list[Participant]:
        """The replicas with a worker that have begun and not ended."""
        found = []
        for participant in self.participants:
            if participant.state not in (NOT_BEGUN, ENDED) and not participant.hosted:
                found.append(participant)  # one frame in every step
        return found

    def close(self) -> tuple[list[Any], tuple[Task | None, BaseException] | None]:
        """Lets go of everything, when all calls have ended.

        Returns what they returned, in the order of the replicas; and the error to be raised, if
        there is one, with the task whose own it is.
        """
        participants, first = self.participants, self.broken
        self.is_open, self.participants, self.broken = False, [], None
        results, failed = [], []
        for participant in participants:  # which would keep batches and graphs alive in a circle
            results.append(participant.result)
            if participant.error is not None:
                failed.append((participant.task, participant.error))
            participant.result = participant.error = participant.deliver = None
            participant.reply = NO_REPLY
        if first is None and failed:
            first = failed[0][1]
        if first is None:
            return results, None
        own = next((task for task, error in failed if error is first), None)
        return [], (None if is_a(first, RendezvousError) else own, first)

    def told(self) -> BaseException:
        """What a replica is told that cannot go on because of others."""
        broken = self.broken
        if broken is None:
            return ReplicaStopped("Expected a rendezvous during a step, got one after its end.")
        if is_a(broken, RendezvousError):
            return broken
        failed = next((p for p in self.participants if p.error is broken), None)
        by = "the run was interrupted" if failed is None else f"{failed.name} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {described(broken)}")

    def _do_task(self, participant: Participant) -> None:
        """Does a task on this thread, as the replica's code, and times it."""
        task = participant.task
        token, start = PARTICIPANT.set(participant), time.perf_counter()
        try:
            if task.spans is not None:
                task.begin()
            participant.result = task.call()
        except BaseException as error:  # it is raised again when all have ended
            participant.error = error
        finally:
            if task.spans is not None:
                task.end()
            task.seconds = time.perf_counter() - start - participant.waited
            PARTICIPANT.reset(token)

    def _hear(self, seconds: float = math.inf) -> None:
        """Waits until something may have come about, so long at most."""
        # The timeout lets Ctrl-C through on Windows, where a lock does not.
        with contextlib.suppress(Empty):
            self._events.get(timeout=min(seconds, 0.5))
