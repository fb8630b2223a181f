"""The participant: one replica in an apply, and what it is doing there."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_dp.parallel.links import Span

if TYPE_CHECKING:
    from lightning_dp.parallel.workers.calls import Calls

Act: TypeAlias = Callable[["Calls", list[Any]], Sequence[Any]]
"""What a rendezvous is about: from what the replicas brought to what each of them gets."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits when another one has failed."""


@dataclass
class Task:
    """A call for one replica."""

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str  # for errors: what goes on after "in replica 2 on cuda:1"
    cause: Callable[[BaseException], str] = lambda error: ""  # and after that
    seconds: float = field(default=0.0, init=False)  # of work, without waiting for others
    spans: list[Span] | None = None  # of the device's work, likewise; None if nobody asks

    def begin(self) -> None:
        """The device goes to work."""
        if self.spans is not None:
            self.spans.append(Span(self.device))

    def end(self) -> None:
        """What the device has to do from here on is none of the replica's work."""
        if self.spans:
            self.spans[-1].end()


@dataclass(frozen=True)
class Arrival:
    """The replica waits at a rendezvous, and brings a value."""

    what: str
    value: Any
    act: Act


@dataclass(frozen=True)
class Answer:
    """What a replica's call that the host asked for returned."""

    value: Any


@dataclass(frozen=True)
class Reply:
    """What a replica gets that waits: a value, or an error to be raised there."""

    value: Any = None
    error: BaseException | None = None

    def take(self) -> Any:
        """The value; or raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Errand:
    """A call that a replica is to make before it goes on waiting."""

    call: Callable[[], Any]
    is_part_of_step: bool  # made as the replica's: it may come to a rendezvous


class Phase(Enum):
    """Of a replica's task, where it does not wait for others; in words for people."""

    NOT_BEGUN = "has not begun"
    RUNNING = "is still running"
    ENDED = "has ended"


NOT_BEGUN, RUNNING, ENDED = Phase
NO_REPLY = Reply()
State: TypeAlias = Phase | Arrival | Answer

PARTICIPANT: ContextVar[Participant | None] = ContextVar("participant", default=None)
"""The replica whose code runs."""


def current_participant() -> Participant | None:
    """The replica whose call this is; None outside of replicas.

    An interrupt may leave the host with one whose calls have all ended: it is none.
    """
    participant = PARTICIPANT.get()
    if participant is None or participant.calls.is_open:
        return participant
    return None if participant.calls.host == threading.get_ident() else participant


class participating:
    """Makes the code inside that of a replica, or with None of no replica.

    No generator: that would write to an error that passes, which may not let itself be written to.
    """

    def __init__(self, participant: Participant | None) -> None:
        self._participant = participant

    def __enter__(self) -> None:
        """From here on it is that of this one."""
        self._token = PARTICIPANT.set(self._participant)

    def __exit__(self, *error: object) -> None:
        """From here on it is that of the one before."""
        PARTICIPANT.reset(self._token)


@dataclass(eq=False)
class Participant:
    """One replica in an apply."""

    calls: Calls
    task: Task
    state: State = NOT_BEGUN
    result: Any = None
    error: BaseException | None = None
    hosted: bool = False  # the host itself makes this replica's call
    waited: float = 0.0  # seconds, at rendezvous
    deliver: Callable[[], None] | None = None  # what the host does to let it go on from there
    reply: Reply = NO_REPLY  # what it gets there, if it is hosted
    inbox: SimpleQueue[Reply | Errand] = field(default_factory=SimpleQueue)  # if it is not
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # the host's
    is_awake: bool = False  # its worker has come to it
    place: threading.RLock = field(default_factory=threading.RLock)  # of the thread that meets

    @property
    def replica(self) -> int:
        """Its number."""
        return self.task.replica

    @property
    def device(self) -> torch.device:
        """That of the replica."""
        return self.task.device

    @property
    def name(self) -> str:
        """Which one it is, for people."""
        return self.calls.who(self.replica)

    @property
    def is_lost(self) -> bool:
        """Whether the host may have been interrupted before it had told the worker to start."""
        return self.state is RUNNING and not self.is_awake

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas are at the same rendezvous; what this one gets there.

        People know the rendezvous as `what`. `act` is called once, on the host, with the values of
        all replicas, in their order, and returns one entry for each. What it raises, it raises in
        all of them.
        """
        self._take_place(what)
        start = time.perf_counter()
        self.task.end()
        try:
            return self.calls.rendezvous.arrive(self, Arrival(what, value, act))
        finally:
            self.task.begin()
            self.waited += time.perf_counter() - start
            self.place.release()

    def _take_place(self, what: str) -> None:
        """A replica meets the others in one thread at a time: which meets which is then known."""
        if not self.place.acquire(blocking=False):
            raise RendezvousError(
                f"Expected one collective of a replica at a time, got {what} while another thread "
                f"of its code waits, too: {self.said()}. Let one thread make these calls, in the "
                "same order on every replica."
            )
        if self.state is ENDED:
            self.place.release()
            raise RendezvousError(
                f"Expected {what} before the replica's call has ended, got it afterwards, from a "
                "thread that the call has started. Wait for that thread in the step."
            )

    def run_errand(self, errand: Errand) -> Answer:
        """Makes a call that the host asked for; it does not count as waiting."""
        start = time.perf_counter()
        self.task.begin()
        try:
            with participating(self if errand.is_part_of_step else None):
                return Answer(errand.call())
        finally:
            self.task.end()
            self.waited -= time.perf_counter() - start

    def said(self) -> str:
        """What the replica is doing, for people."""
        match self.state:
            case Arrival(what=what):
                doing = f"is at {what}"
            case Answer():
                doing = "has ended its closure"
            case phase:
                doing = phase.value
        return f"{self.name} {doing}"


def refuse_own_backward(calls: Callable[[], Calls | None], buffers: list[str]) -> None:
    """Refuses a replica's own backward through the graph of buffers, which all replicas share."""
    running = calls()
    if running is not None and running.is_open and not running.is_conducting:
        raise RuntimeError(
            "Expected no backward and no torch.autograd.grad inside of training_step through the "
            f"buffers {buffers}, which were computed outside of it: all replicas share their "
            "graph. Compute them in training_step, where each replica has its own, or use "
            'DataParallelStrategy(mode="forward").'
        )
