"""The replicas' calls of one apply, and the rendezvous where they wait for each other.

[Note: the host acts once while all replicas stand still]
The thread that runs an apply, usually the main one, is the host. It waits until every replica has
ended its call or waits in a rendezvous. If all of them wait in the same one, the host calls its
`act` once, with the values that the replicas brought, and hands each replica its result. If some
have ended or wait elsewhere, all get an error: so no replica waits for one that never comes.

In threads every replica has a worker. In order the host makes the calls itself, one after another;
if the first one comes to a rendezvous, the others begin in their workers, and the replicas take
turns from one rendezvous to the next, never two at a time.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply.thread_state import ThreadState
from lightning_dp.parallel.comm import Span, current_stream, on_streams
from lightning_dp.parallel.devices import replica_text
from lightning_dp.parallel.errors import described, is_a
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Order

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import RankGraph, World

Act: TypeAlias = Callable[["Calls", list[Any]], Sequence[Any]]
"""What the host does in a rendezvous: from the replicas' values to what each of them gets."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits, because another one has failed."""


class Phase(Enum):
    """The state of a replica that does not wait in a rendezvous; the values stand in errors."""

    NOT_BEGUN = "has not begun"
    RUNNING = "is still running"
    ENDED = "has ended"


NOT_BEGUN, RUNNING, ENDED = Phase


@dataclass(frozen=True)
class Arrival:
    """The state of a replica that waits in a rendezvous."""

    what: str
    value: Any
    act: Act
    stream: torch.Stream | None  # that it computes on; None on the CPU
    since: float  # `time.perf_counter`


@dataclass(frozen=True)
class Reply:
    """What a replica gets in a rendezvous: a value, or an error to raise."""

    value: Any = None
    error: BaseException | None = None


PARTICIPANT: ContextVar[Task | None] = ContextVar("participant", default=None)


def current_participant() -> Task | None:
    """The replica whose call runs here; None outside of replicas."""
    return PARTICIPANT.get()


@dataclass(eq=False)
class Task:
    """A call for one replica, and the replica's part in the apply that makes the call."""

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str  # continues the note "in replica 2 on cuda:1" of an error
    cause: Callable[[BaseException], str] = lambda error: ""  # ends the note
    spans: list[Span] | None = None  # of the device's work for the replica, if it is measured
    seconds: float = field(default=0.0, init=False)  # of work, without waiting in rendezvous

    calls: Calls = field(init=False)
    state: Phase | Arrival = field(default=NOT_BEGUN, init=False)
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    is_hosted: bool = field(default=False, init=False)  # the call runs on the host's thread
    is_awake: bool = field(default=False, init=False)  # its worker has begun
    resume: Callable[[], None] | None = field(default=None, init=False)  # from where it waits
    inbox: SimpleQueue[Reply] = field(default_factory=SimpleQueue, init=False)
    meeting: Any = field(default_factory=threading.Lock, init=False)  # held while it waits

    @property
    def name(self) -> str:
        """Its number and device, for errors."""
        return replica_text(self.replica, self.calls.names)

    def said(self) -> str:
        """What the replica does, for errors."""
        state = self.state
        return f"{self.name} {f'is at {state.what}' if isinstance(state, Arrival) else state.value}"

    def begin_span(self) -> None:
        """The device begins to work for the replica."""
        if self.spans is not None:
            self.spans.append(Span(self.device))

    def end_span(self) -> None:
        """What the device gets from here on is no work of the replica."""
        if self.spans:
            self.spans[-1].end()

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas have come to the rendezvous `what`; returns this one's result.

        `act(calls, values)` is called once, on the host, with the values of all replicas in their
        order, and returns one result for each. An error of `act` is raised in all of them.
        """
        if not self.meeting.acquire(blocking=False):
            raise RendezvousError(
                f"Expected one collective of a replica at a time, got {what} while another thread "
                f"of its code waits, too: {self.said()}. Let one thread make these calls, in the "
                "same order on every replica."
            )
        start = time.perf_counter()
        self.end_span()
        try:
            stream = None if self.device.type == "cpu" else current_stream(self.device)
            return self.calls.meet(self, Arrival(what, value, act, stream, start))
        finally:
            self.begin_span()
            self.seconds -= time.perf_counter() - start
            self.meeting.release()


class HasInbox(Protocol):
    """A worker, see `worker`."""

    inbox: SimpleQueue[Callable[[], None] | None]


class Calls:
    """The replicas' calls in one apply, from `begin` to `close`.

    Args:
        sizes: samples of these replicas; None if they are not known.
        order: the positions of their samples in the batch; None for the batch's own order.
        dim: the dimension along which the batch was cut.
        world: the processes that have replicas; None if this is the only one.
    """

    names: Sequence[str] = ()  # of all replicas
    timeout = 1800.0  # seconds that replicas wait in a rendezvous for one that does not come
    grace = math.inf  # seconds that replicas may run on after an interrupt or `timeout`
    one_by_one = False  # one replica runs at a time
    is_open = True  # some calls have not ended
    broken: BaseException | None = None  # the error that ends them all
    have_met = False
    drawn_in_checkpoint: torch.device | None = None  # whose generator other replicas draw from, too
    is_conducting = False  # the host acts, in a rendezvous
    crossed = False  # the graph of one replica continues in that of another
    rank_graph: RankGraph | None = None  # where graphs continue in other ranks

    def __init__(
        self,
        sizes: Sequence[int] | None = None,
        order: Order | None = None,
        dim: int = 0,
        world: World | None = None,
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.order, self.dim, self.world = order, dim, world
        self.is_idle = world is not None and world.is_idle  # the other processes get nothing
        self.participants: list[Task] = []
        # Wakes the host. What has happened, the tasks' states say: an interrupt may lose an event.
        self._events: SimpleQueue[None] = SimpleQueue()

    # In the replicas' threads

    def meet(self, task: Task, arrival: Arrival) -> Any:
        """See `Task.meet`."""
        self.check()
        self.have_met, task.state = True, arrival
        if task.is_hosted:  # this thread is the host
            for other in self.participants:
                if other.state is NOT_BEGUN:
                    other.resume = partial(self.start, other)
            self._advance()
            self._act()
            task.state = RUNNING
        else:
            self._events.put(None)
        reply = task.inbox.get()
        if reply.error is not None:
            raise reply.error
        return reply.value

    def check(self) -> None:
        """Raises an error if the calls have ended or are to end."""
        if not self.is_open or self.broken is not None:
            raise self._stopped()

    def work(self, task: Task) -> None:
        """Makes a replica's call in its worker; once, though `end` may start it again."""
        if task.is_awake:
            return
        task.is_awake = True
        state = self.thread_state
        try:
            if not self.is_open or self.broken is not None:
                raise self._stopped()
            if state.is_plain:
                with torch.set_grad_enabled(state.grad):
                    self._call(task)
            else:
                with state.entered(task.device):
                    self._call(task)
        except BaseException as error:
            task.error = error
        task.state = ENDED
        self._events.put(None)

    def _call(self, task: Task) -> None:
        token, start = PARTICIPANT.set(task), time.perf_counter()
        try:
            if task.spans is not None:
                task.begin_span()
            task.result = task.call()
        except BaseException as error:  # raised again when all have ended
            task.error = error
        finally:
            if task.spans is not None:
                task.end_span()
            task.seconds += time.perf_counter() - start
            PARTICIPANT.reset(token)

    # In the host's thread

    def begin(
        self,
        tasks: Sequence[Task],
        state: ThreadState,
        workers: Sequence[HasInbox],
        start_workers: Callable[[], None],
    ) -> None:
        """Takes the tasks, and the workers of all replicas, none before they are started."""
        self.thread_state, self.participants = state, list(tasks)
        self._workers, self._start_workers = workers, start_workers
        self._context = contextvars.copy_context()
        for task in tasks:
            task.calls = self

    def start(self, task: Task) -> None:
        """Has a replica's call made in its worker."""
        if not self._workers:
            self._start_workers()
        work = partial(self._context.copy().run, self.work, task)
        self._workers[task.replica].inbox.put(work)

    def run_in_threads(self) -> None:
        """Makes all calls at once, in the workers."""
        for task in self.participants:  # all of them, before one can meet
            task.state = RUNNING
        for task in self.participants:
            self.start(task)
        self._serve()

    def run_in_order(self) -> None:
        """Makes the calls on this thread, one after another, until one fails."""
        self.one_by_one = True
        for task in self.participants:
            if task.state is NOT_BEGUN:  # else a rendezvous has begun it in its worker
                task.is_hosted, task.state, task.resume = True, RUNNING, None
                on_cpu = task.device.type == "cpu"
                with nullcontext() if on_cpu else self.thread_state.moved_to(task.device):
                    self._call(task)
                task.state = ENDED
            if task.error is not None or self.broken is not None:
                break
        if self.have_met:
            self._serve()

    def _serve(self) -> None:
        """Acts in one rendezvous after another until all calls have ended."""
        while True:
            if not any([t.error is not None for t in self.participants]):
                self._advance()
            if self.broken is None and any([t.error is not None for t in self.participants]):
                self.end(self._first_error())
            if self.broken is not None:
                return
            if all([t.state is ENDED for t in self.participants]):
                return
            self._act()

    def _advance(self) -> None:
        """Lets every replica run until it waits or ends; in order, one at a time."""
        for task in self.participants:
            resume, task.resume = task.resume, None
            if resume is not None and self.broken is None:
                task.state = RUNNING
                resume()
                if self.one_by_one:
                    self._wait_for(task)
        for task in self.participants:
            self._wait_for(task)

    def _wait_for(self, task: Task) -> None:
        while task.state is RUNNING and self.broken is None:
            if not self._hear(self.timeout):
                since = [t.state.since for t in self.participants if isinstance(t.state, Arrival)]
                if since and time.perf_counter() - min(since) > self.timeout:
                    self.end(self._mismatch(f" within {self.timeout:g} seconds"), self.grace)

    def _act(self) -> None:
        """All replicas stand still: acts for them and hands out the results."""
        arrivals = [t.state for t in self.participants if isinstance(t.state, Arrival)]
        if (
            len(arrivals) < len(self.participants)
            or len({arrival.what for arrival in arrivals}) > 1
        ):
            self.end(self._first_error())
            replies = [Reply(error=self._stopped())] * len(self.participants)
        else:
            replies = self._replies(arrivals)
        for task, reply in zip(self.participants, replies, strict=True):
            if task.is_hosted:
                task.inbox.put(reply)
            else:
                task.resume = partial(task.inbox.put, reply)

    def _replies(self, arrivals: list[Arrival]) -> list[Reply]:
        token, self.is_conducting = PARTICIPANT.set(None), True
        try:
            with on_streams(self.thread_state.streams):  # a thread of the replica's code may act
                # A replica may compute on another stream than is current here on its device.
                pairs = [(a.stream, current_stream(a.stream.device)) for a in arrivals if a.stream]
                crossing = [(theirs, ours) for theirs, ours in pairs if theirs != ours]
                for theirs, ours in crossing:
                    ours.wait_stream(theirs)
                results = arrivals[0].act(self, [arrival.value for arrival in arrivals])
                for theirs, ours in crossing:
                    theirs.wait_stream(ours)
        except BaseException as error:
            return [Reply(error=error)] * len(arrivals)
        finally:
            PARTICIPANT.reset(token)
            self.is_conducting = False
        for arrival, result in zip(arrivals, results, strict=True) if crossing else ():
            for leaf in tree.leaves(result):
                if isinstance(leaf, Tensor) and arrival.stream and leaf.device.type != "cpu":
                    leaf.record_stream(arrival.stream)  # it was allocated on ours
        return list(map(Reply, results))

    def end(self, error: BaseException, seconds: float | None = None) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run.

        After an interrupt it waits for `grace` seconds.
        """
        self.broken = self.broken or error
        if seconds is None:
            seconds = math.inf if is_a(error, Exception) else self.grace
        deadline = time.perf_counter() + seconds
        for task in self.unended:
            task.resume = None
            task.inbox.put(Reply(error=self._stopped()))
            if task.state is RUNNING and not task.is_awake:
                self.start(task)  # an interrupt may have kept the worker from getting it
        while self.unended and (left := deadline - time.perf_counter()) > 0:
            self._hear(left)

    @property
    def unended(self) -> list[Task]:
        """The tasks that run or wait in workers."""
        found = []
        for task in self.participants:  # one Python frame in every step
            if not (task.is_hosted or task.state is NOT_BEGUN or task.state is ENDED):
                found.append(task)
        return found

    def close(self) -> tuple[list[Any], Task | None, BaseException | None]:
        """Ends the apply; returns the replicas' results, and the task and the error that failed."""
        tasks, error, own = self.participants, self.broken, None
        results = []
        for task in tasks:
            results.append(task.result)
            if own is None and task.error is not None and (error is None or error is task.error):
                error, own = task.error, task
        if self.have_met:
            for task in tasks:  # a thread that the replica has started may still wait
                task.inbox.put(Reply(error=self._stopped()))
        self.is_open, self.participants, self.broken = False, [], None
        for task in tasks:  # results and errors refer to batches and graphs, in reference cycles
            task.result = task.error = task.resume = None
        return results, None if is_a(error, RendezvousError) else own, error

    def _stopped(self) -> BaseException:
        """The error for a replica that cannot run on because of others."""
        error = self.broken
        if error is None:
            return ReplicaStopped("Expected all replicas to meet, but the step has ended.")
        if is_a(error, RendezvousError):
            return error
        failed = next((task for task in self.participants if task.error is error), None)
        by = "the run was interrupted" if failed is None else f"{failed.name} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {described(error)}")

    def _first_error(self) -> BaseException:
        """The first replica's own error, or that they did not all come to the same rendezvous."""
        errors = [task.error for task in self.participants if task.error is not None]
        return self.broken or (errors[0] if errors else self._mismatch())

    def _mismatch(self, within: str = "") -> RendezvousError:
        names = [task.state.what for task in self.participants if isinstance(task.state, Arrival)]
        return RendezvousError(
            f"Expected all replicas at {names[0]}{within}, got: "
            f"{', '.join(task.said() for task in self.participants)}. Make the same calls in the "
            "same order on every replica: they must not depend on what is in its shard."
        )

    def _hear(self, seconds: float) -> bool:
        """Waits for the next event, at most half a second; whether there was one."""
        try:
            self._events.get(timeout=min(seconds, 0.5))  # on Windows Ctrl-C ends no longer wait
        except Empty:
            return False
        return True


def refuse_backward(running: Callable[[], Calls | None], through: str) -> None:
    """Refuses a replica's own backward through a graph that it shares with other replicas."""
    calls = running()
    if calls is not None and calls.is_open and not calls.is_conducting:
        raise RuntimeError(
            f"Expected no backward and no torch.autograd.grad through {through} inside of "
            "training_step: other replicas are part of this graph, and their losses are not there "
            'yet. Return the loss, or use DataParallelStrategy(mode="forward").'
        )
