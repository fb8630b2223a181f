"""The replicas' calls of one apply, and the rendezvous where they wait for each other.

[Note: the host acts once while all replicas stand still]
The thread that runs an apply, usually the main one, is the host. It waits until every replica has
ended its call or waits in a rendezvous. If all of them wait in the same one, the host calls its
`act` once, with the values that the replicas brought, and hands each replica its result. If some
have ended or wait elsewhere, all get an error: so no replica waits for one that never comes.

In threads every replica has a worker. In order the host makes the calls itself, one after another;
if one of them comes to a rendezvous, those behind it begin in their workers, and the replicas take
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
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply.thread_state import ThreadState
from lightning_dp.parallel.comm import DeviceTimer, current_stream
from lightning_dp.parallel.devices import replica_text
from lightning_dp.parallel.errors import described, is_a
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Order

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import RankGraph, World

Act: TypeAlias = Callable[["Calls", list[Any]], Sequence[Any]]
"""What the host does in a rendezvous: from the replicas' values to what each of them gets."""

NOT_BEGUN, RUNNING, ENDED = "has not begun", "is still running", "has ended"
"""The states of a replica that does not wait in a rendezvous, as errors say them."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits, because another one has failed."""


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
current_participant: Callable[[], Task | None] = PARTICIPANT.get
"""The replica whose call runs here; None outside of replicas."""


@dataclass(eq=False)
class Task:
    """A call for one replica, and where the replica stands in the apply that makes the call."""

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str  # continues the note "in replica 2 on cuda:1" of an error
    cause: Callable[[BaseException], str] = lambda error: ""  # ends the note
    spans: list[DeviceTimer] | None = (
        None  # of the device's work for the replica, if it is measured
    )
    seconds: float = field(default=0.0, init=False)  # of work, without waiting in rendezvous

    calls: Calls = field(init=False)
    state: str | Arrival = field(default=NOT_BEGUN, init=False)
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    is_hosted: bool = field(default=False, init=False)  # the call runs on the host's thread
    is_awake: bool = field(default=False, init=False)  # its worker has begun
    thread: int = field(default=0, init=False)  # that runs the call
    reply: Reply | None = field(default=None, init=False)  # that it gets at its next turn
    inbox: SimpleQueue[Reply] = field(default_factory=SimpleQueue, init=False)

    @property
    def name(self) -> str:
        """Its number and device, for errors."""
        return replica_text(self.replica, self.calls.names)

    def describe(self) -> str:
        """What the replica does, for errors."""
        state = self.state
        return f"{self.name} {state if isinstance(state, str) else f'is at {state.what}'}"

    def run(self) -> None:
        """Makes the call on this thread; an error is raised again when all replicas have ended."""
        token, self.thread = PARTICIPANT.set(self), threading.get_ident()
        start = time.perf_counter()
        try:
            if self.spans is not None:
                self.spans.append(DeviceTimer([self.device]))
            self.result = self.call()
        except BaseException as error:
            self.error = error
        finally:
            if self.spans:
                self.spans[-1].end()
            self.seconds += time.perf_counter() - start
            PARTICIPANT.reset(token)

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas have come to the rendezvous `what`; returns this one's result.

        `act(calls, values)` is called once, on the host, with the values of all replicas in their
        order, and returns one result for each. An error of `act` is raised in all of them.
        """
        calls, start = self.calls, time.perf_counter()
        calls.check()
        if threading.get_ident() != self.thread:
            raise RendezvousError(
                f"Expected {what} in the thread that runs {self.name}, got it in another thread "
                "that its code has started. Call collectives in the step itself."
            )
        if self.spans:
            self.spans[-1].end()
        stream = None if self.device.type == "cpu" else current_stream(self.device)
        try:
            self.state = Arrival(what, value, act, stream, start)
            reply = calls.exchange(self)
        finally:
            if self.spans is not None:
                self.spans.append(DeviceTimer([self.device]))
            self.seconds -= time.perf_counter() - start
        if reply.error is not None:
            raise reply.error
        return reply.value


class HasInbox(Protocol):
    """A worker, see `worker`."""

    inbox: SimpleQueue[Callable[[], None] | None]


class Calls:
    """The replicas' calls in one apply, see the note above; `run` once, then `close`.

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
        # Wakes the host, which waits half a second at most: on Windows Ctrl-C ends no longer wait.
        # What has happened, the tasks' states say: an interrupt may lose an event.
        self._events: SimpleQueue[None] = SimpleQueue()

    # In the replicas' threads

    def check(self) -> None:
        """Raises an error if the calls have ended or are to end."""
        if not self.is_open or self.broken is not None:
            raise self._stopped()

    def exchange(self, task: Task) -> Reply:
        """Waits, for a replica that has arrived, until the host has acted."""
        self.have_met = True
        if not task.is_hosted:
            self._events.put(None)
        elif self._settle():  # this thread is the host
            self._act()
        if task.is_hosted:
            self.check()
        return task.inbox.get()

    def _work(self, task: Task) -> None:
        """Makes a replica's call in its worker; once, though `end` may submit it again."""
        if task.is_awake:
            return
        task.is_awake = True
        state = self._thread_state
        try:
            if self.broken is not None or not self.is_open:
                raise self._stopped()
            if state.is_plain:
                with torch.set_grad_enabled(state.grad):
                    task.run()
            else:
                with state.entered(task.device):
                    task.run()
        except BaseException as error:  # the thread's state could not be entered
            task.error = task.error or error
        task.state = ENDED
        self._events.put(None)

    # In the host's thread

    def run(
        self,
        tasks: Sequence[Task],
        state: ThreadState,
        workers: Sequence[HasInbox],
        start_workers: Callable[[], None],
        *,
        in_threads: bool,
    ) -> None:
        """Makes all calls at once in the workers, or one after another here until one fails.

        `workers` are those of all replicas, none before they are started.
        """
        self._thread_state, self.participants = state, list(tasks)
        self._workers, self._start_workers = workers, start_workers
        self._context = contextvars.copy_context()
        for task in tasks:
            task.calls = self
        if in_threads:
            self._serve()
            return
        self.one_by_one = True
        for task in tasks:
            if task.state is NOT_BEGUN:  # else a rendezvous has begun it in its worker
                task.is_hosted, task.state = True, RUNNING
                on_cpu = task.device.type == "cpu"
                with nullcontext() if on_cpu else state.moved_to(task.device):
                    task.run()
                task.state = ENDED
            if task.error is not None or self.broken is not None:
                break
        if self.have_met:
            self._serve()

    def _serve(self) -> None:
        """Acts in one rendezvous after another until all calls have ended."""
        while self._first_error() is None and self._settle():
            self._act()
        if self.broken is None and (error := self._first_error()) is not None:
            self.end(error)

    def _start(self, task: Task) -> None:
        """Has a replica's call made in its worker."""
        if not self._workers:
            self._start_workers()
        work = partial(self._context.copy().run, self._work, task)
        self._workers[task.replica].inbox.put(work)

    def _settle(self) -> bool:
        """Lets every replica run until it waits or ends; returns whether one waits."""
        for task in self.participants:
            if task.state is NOT_BEGUN:
                task.state = RUNNING
                self._start(task)
            elif task.reply is not None:
                reply, task.reply = task.reply, None
                task.state = RUNNING
                task.inbox.put(reply)
            if self.one_by_one:
                self._wait_for([task])
        self._wait_for(self.participants)
        return self.broken is None and any([t.state is not ENDED for t in self.participants])

    def _wait_for(self, tasks: Sequence[Task]) -> None:
        """Waits until none of the tasks runs; an arrival that waits too long ends all calls."""
        for task in tasks:
            while task.state is RUNNING and self.broken is None:
                try:
                    self._events.get(timeout=min(self.timeout, 0.5))
                except Empty:
                    since = [t.state.since for t in self.participants if type(t.state) is Arrival]
                    if since and time.perf_counter() - min(since) > self.timeout:
                        self.end(self._mismatch(f" within {self.timeout:g} seconds"), self.grace)

    def _act(self) -> None:
        """All replicas stand still: acts for them and hands out the results."""
        arrivals = [t.state for t in self.participants if isinstance(t.state, Arrival)]
        is_one = len({arrival.what for arrival in arrivals}) == 1
        if len(arrivals) < len(self.participants) or not is_one:
            self.end(self._first_error() or self._mismatch())
            return
        for task, reply in zip(self.participants, self._replies(arrivals), strict=True):
            if self.one_by_one and not task.is_hosted:
                task.reply = reply
            else:
                task.state = RUNNING
                task.inbox.put(reply)

    def _replies(self, arrivals: list[Arrival]) -> list[Reply]:
        token = PARTICIPANT.set(None)
        try:
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
        for task in self.unended():
            task.reply = None
            task.inbox.put(Reply(error=self._stopped()))
            if task.state is RUNNING and not task.is_awake:
                self._start(task)  # an interrupt may have kept the worker from getting it
        while self.unended() and (left := deadline - time.perf_counter()) > 0:
            try:
                self._events.get(timeout=min(left, 0.5))
            except Empty:
                continue

    def unended(self) -> list[Task]:
        """The tasks that run or wait in workers."""
        states = (NOT_BEGUN, ENDED)
        return [t for t in self.participants if not (t.is_hosted or t.state in states)]

    def close(self) -> tuple[list[Any], Task | None, BaseException | None]:
        """Ends the apply; returns the replicas' results, and the task and the error that failed."""
        tasks, error = self.participants, self.broken
        own: Task | None = None
        results: list[Any] = []
        for task in tasks:
            results.append(task.result)
            if own is None and task.error is not None and (error is None or error is task.error):
                error, own = task.error, task
        self.is_open, self.participants, self.broken = False, [], None
        for task in tasks:  # results and errors refer to batches and graphs, in reference cycles
            task.result = task.error = task.reply = None
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

    def _first_error(self) -> BaseException | None:
        """The error that ends all calls, or the first replica's own."""
        for task in self.participants if self.broken is None else ():
            if task.error is not None:
                return task.error
        return self.broken

    def _mismatch(self, within: str = "") -> RendezvousError:
        names = [task.state.what for task in self.participants if isinstance(task.state, Arrival)]
        return RendezvousError(
            f"Expected all replicas at {names[0]}{within}, got: "
            f"{', '.join(task.describe() for task in self.participants)}. Make the same calls in "
            "the same order on every replica: they must not depend on what is in its shard."
        )


def refuse_backward(running: Callable[[], Calls | None], through: str) -> None:
    """Refuses a replica's own backward through a graph that it shares with other replicas."""
    calls = running()
    if calls is not None and calls.is_open:
        raise RuntimeError(
            f"Expected no backward and no torch.autograd.grad through {through} inside of "
            "training_step: other replicas are part of this graph, and their losses are not there "
            'yet. Return the loss, or use DataParallelStrategy(mode="forward").'
        )
