"""The replicas' calls in one apply, and the rendezvous where they wait for each other.

[Note: the main thread acts once while all replicas stand still]
"Main thread" means the one that runs an apply. It waits until every replica has ended its call or
waits in a rendezvous. If all of them wait in the same one, it calls the rendezvous's `act` once,
with the values of all replicas, and hands each replica its result. If some have ended or wait
elsewhere, all get an error: so no replica waits for one that never comes.

In threads every replica has a worker. In order the main thread makes the calls itself, one after
another; if one of them comes to a rendezvous, those behind it begin in their workers, and the
replicas take turns from one rendezvous to the next, never two at a time.

An interrupt may end the main thread's code at any line, so what has happened is read from the
tasks' states alone, each of which has one writer at a time. `_events` only wakes the main thread.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply.thread_state import ThreadState
from lightning_dp.parallel.comm import DeviceTimer, current_stream
from lightning_dp.parallel.devices import replica_text
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Order

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Act: TypeAlias = Callable[["Calls", list[Any]], Sequence[Any]]
"""What the main thread does in a rendezvous: from the replicas' values to what each one gets."""

Reply: TypeAlias = tuple[Any, BaseException | None]
"""What a replica gets in a rendezvous: a value, or an error to raise."""

Submit: TypeAlias = Callable[[int, Callable[[], None]], None]
"""Has a function called in the worker of a replica, given the replica's number."""

NOT_BEGUN, BEGINNING = "has not begun", "is about to begin"
RUNNING, ENDED = "is still running", "has ended"
"""The states of a replica that does not wait in a rendezvous, as errors say them."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits, because another one has failed."""


class Arrival(NamedTuple):
    """The state of a replica that waits in a rendezvous."""

    what: str
    value: Any
    act: Act
    is_grad_enabled: bool
    is_inference: bool
    stream: torch.Stream | None  # that it computes on; None on the CPU
    since: float  # `time.perf_counter`


PARTICIPANT: ContextVar[Task | None] = ContextVar("participant", default=None)
current_participant: Callable[[], Task | None] = PARTICIPANT.get
"""The replica whose call runs here; None outside of replicas."""
if hasattr(os, "register_at_fork"):  # a replica that has forked is alone in the child
    os.register_at_fork(after_in_child=partial(PARTICIPANT.set, None))


@dataclass(eq=False)
class Task:
    """A call for one replica, and where the replica stands in the apply that makes the call."""

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str  # continues the note "in replica 2 on cuda:1" of an error
    spans: list[DeviceTimer] | None = None  # gets the times of the device's work, if measured

    seconds: float = field(default=0.0, init=False)  # of work, without waiting in rendezvous
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    calls: Calls = field(init=False)
    state: str | Arrival = field(default=NOT_BEGUN, init=False)
    on_main_thread: bool = field(default=False, init=False)  # the call runs on the main thread
    thread: int = field(default=0, init=False)  # that runs the call
    reply: Reply | None = field(default=None, init=False)  # that it gets at its next turn
    inbox: SimpleQueue[Reply] = field(default_factory=SimpleQueue, init=False)

    @property
    def name(self) -> str:
        """Its number and device, for errors."""
        return replica_text(self.replica, self.calls.names)

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

        `act(calls, values)` is called once, on the main thread, with the values of all replicas in
        their order, and returns one result for each. It runs in the grad and inference mode of this
        call. An error of `act` is raised in all of them.
        """
        start = time.perf_counter()
        self.calls.check()
        if threading.get_ident() != self.thread:
            raise RendezvousError(
                f"Expected {what} in the thread that runs {self.name}, got it in another thread "
                "that its code has started. Call collectives in the step itself."
            )
        if self.spans:
            self.spans[-1].end()
        stream = None if self.device.type == "cpu" else current_stream(self.device)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        try:
            self.state = Arrival(what, value, act, *modes, stream, start)
            result, error = self.calls.exchange(self)
        finally:
            if self.spans is not None:
                self.spans.append(DeviceTimer([self.device]))
            self.seconds -= time.perf_counter() - start
        if error is not None:
            raise error
        return result


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

    def __init__(
        self,
        sizes: Sequence[int] | None = None,
        order: Order | None = None,
        dim: int = 0,
        world: World | None = None,
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.order, self.dim, self.world = order, dim, world
        self.participants: list[Task] = []
        self._events: SimpleQueue[None] = SimpleQueue()

    # In the replicas' threads

    def check(self) -> None:
        """Raises an error if the calls have ended or are to end."""
        if not self.is_open or self.broken is not None:
            raise self._stopped()

    def exchange(self, task: Task) -> Reply:
        """Waits, for a replica that has arrived, until the main thread has acted."""
        self.have_met = True
        if not task.on_main_thread:
            self._events.put(None)
        else:  # this is the main thread
            if self._settle():
                self._act()
            self.check()
        return task.inbox.get()

    def _work(self, task: Task) -> None:
        """Makes a replica's call in its worker."""
        task.state = RUNNING  # first: `end` looks at it after it has set `broken`
        try:
            if self.broken is not None or not self.is_open:
                raise self._stopped()
            if self._state is None:
                with torch.set_grad_enabled(self._grad):
                    task.run()
            else:
                with self._state.entered(task.device):
                    task.run()
        except BaseException as error:  # also where the thread's state could not be entered
            task.error = task.error or error
        task.state = ENDED
        self._events.put(None)

    # In the main thread

    def run(
        self,
        tasks: Sequence[Task],
        state: ThreadState | None,
        submit: Submit,
        *,
        in_threads: bool,
    ) -> None:
        """Makes all calls at once in the workers, or one after another here until one fails.

        `state` is the main thread's; None if it differs from a new thread's by the grad mode alone.
        """
        self._state, self._submit, self.one_by_one = state, submit, not in_threads
        self._grad, self._context = torch.is_grad_enabled(), contextvars.copy_context()
        self.participants = list(tasks)
        for task in tasks:
            task.calls = self
        for task in () if in_threads else tasks:
            if task.state is NOT_BEGUN:  # else a rendezvous has begun it in its worker
                task.on_main_thread, task.state = True, RUNNING
                stays = task.device.type == "cpu"
                with nullcontext() if state is None or stays else state.moved_to(task.device):
                    task.run()
                task.state = ENDED
            if task.error is not None or self.broken is not None:
                break
        if in_threads or self.have_met:
            while self._first_error() is None and self._settle():
                self._act()
            if self.broken is None and (error := self._first_error()) is not None:
                self.end(error)

    def _settle(self) -> bool:
        """Lets every replica run until it waits or ends; returns whether one waits."""
        for task in self.participants:
            if task.state is NOT_BEGUN:
                task.state = BEGINNING
                self._submit(task.replica, partial(self._context.copy().run, self._work, task))
            elif task.reply is not None:
                self._resume(task, task.reply)
            if self.one_by_one:
                self._wait_for([task])
        self._wait_for(self.participants)
        return self.broken is None and any([t.state is not ENDED for t in self.participants])

    def _resume(self, task: Task, reply: Reply) -> None:
        task.reply, task.state = None, RUNNING
        task.inbox.put(reply)

    def _wait_for(self, tasks: Sequence[Task]) -> None:
        """Waits until none of the tasks runs; an arrival that waits too long ends all calls."""
        for task in tasks:
            while task.state in (BEGINNING, RUNNING) and self.broken is None:
                try:  # half a second at a time: on Windows, Ctrl-C cannot interrupt a longer wait
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
            if self.one_by_one and not task.on_main_thread:
                task.reply = reply
            else:
                self._resume(task, reply)

    def _replies(self, arrivals: list[Arrival]) -> list[Reply]:
        first, token = arrivals[0], PARTICIPANT.set(None)
        try:
            # A replica may compute on another stream than is current here on its device.
            pairs = [(a.stream, current_stream(a.stream.device)) for a in arrivals if a.stream]
            crossing = [(theirs, ours) for theirs, ours in pairs if theirs != ours]
            for theirs, ours in crossing:
                ours.wait_stream(theirs)
            with (
                torch.inference_mode(first.is_inference),
                torch.set_grad_enabled(first.is_grad_enabled),
            ):
                results = first.act(self, [arrival.value for arrival in arrivals])
            for theirs, ours in crossing:
                theirs.wait_stream(ours)
        except BaseException as error:
            return [(None, error)] * len(arrivals)
        finally:
            PARTICIPANT.reset(token)
        for arrival, result in zip(arrivals, results, strict=True) if crossing else ():
            for leaf in tree.leaves(result):
                if isinstance(leaf, Tensor) and arrival.stream and leaf.device.type != "cpu":
                    leaf.record_stream(arrival.stream)  # it was allocated on ours
        return [(result, None) for result in results]

    def end(self, error: BaseException, seconds: float | None = None) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run.

        After an interrupt it waits for `grace` seconds.
        """
        if self.broken is None:
            self.broken = error
        if seconds is None:
            seconds = math.inf if isinstance(error, Exception) else self.grace
        deadline = time.perf_counter() + seconds
        for task in self.unended():
            task.reply = None
            task.inbox.put((None, self._stopped()))
        while self.unended() and (left := deadline - time.perf_counter()) > 0:
            try:
                self._events.get(timeout=min(left, 0.5))
            except Empty:
                continue

    def unended(self) -> list[Task]:
        """The tasks that run or wait in workers; one that is only beginning will end at once."""
        states = (NOT_BEGUN, BEGINNING, ENDED)
        return [t for t in self.participants if not (t.on_main_thread or t.state in states)]

    def close(self) -> tuple[list[Any], Task | None, BaseException | None]:
        """Ends the apply; returns the replicas' results, and the task and the error that failed."""
        tasks, error = self.participants, self._first_error()
        results: list[Any] = []
        failed: Task | None = None
        self.is_open, self.participants, self.broken = False, [], None
        for task in tasks:
            results.append(task.result)
            if failed is None and error is not None and task.error is error:
                failed = task
            # They refer to batches and graphs, in reference cycles.
            task.result = task.error = task.reply = None
        return results, None if isinstance(error, RendezvousError) else failed, error

    def _first_error(self) -> BaseException | None:
        """The error that ends all calls, or the first replica's own."""
        for task in self.participants if self.broken is None else ():
            if task.error is not None:
                return task.error
        return self.broken

    def _stopped(self) -> BaseException:
        """The error for a replica that cannot run on because of others."""
        if self.broken is not None and isinstance(self.broken, RendezvousError):
            return self.broken
        return ReplicaStopped(
            "Expected all replicas to meet, but one of them has failed, the run was interrupted, "
            "or the step has ended."
        )

    def _mismatch(self, within: str = "") -> RendezvousError:
        states = [(task.name, task.state) for task in self.participants]
        what = next(state.what for _, state in states if isinstance(state, Arrival))
        got = [f"{name} {s if isinstance(s, str) else f'is at {s.what}'}" for name, s in states]
        return RendezvousError(
            f"Expected all replicas at {what}{within}, got: {', '.join(got)}. Make the same calls "
            "in the same order on every replica: they must not depend on its samples."
        )
