"""The seat: a replica's place at a meeting, and what can be said of the replica there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from lightning_dp.parallel.meeting import Meeting

Act: TypeAlias = Callable[["Meeting", list[Any]], Sequence[Any]]
"""What a meeting is about: from what the replicas brought to what each of them gets."""


class MeetingError(RuntimeError):
    """The replicas did not all come to the same meeting."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits when another one has failed."""


@dataclass(frozen=True)
class Arrival:
    """The replica waits at a meeting.

    Attributes:
        what: the name of the meeting.
        value: what the replica brings.
        act: what the meeting is about.
    """

    what: str
    value: Any
    act: Act


@dataclass(frozen=True)
class Answer:
    """What a replica's call that the host asked for returned."""

    value: Any


@dataclass(frozen=True)
class Ended:
    """How a replica's task ended."""

    result: Any = None
    error: BaseException | None = None


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
    seated: bool


class NotBegun:
    """The replica's task has not been started."""


class Running:
    """The replica's task runs: it neither waits nor has it ended."""


NOT_BEGUN, RUNNING = NotBegun(), Running()
State: TypeAlias = NotBegun | Running | Arrival | Answer | Ended

_SEAT: ContextVar[Seat | None] = ContextVar("seat", default=None)


def current_seat() -> Seat | None:
    """The place of the replica whose call this is; None outside of replicas."""
    return _SEAT.get()


class seated:
    """Makes the code inside that of a replica, or with None of no replica.

    Entered in every call of a replica, where a generator would take several times as long.
    """

    __slots__ = ("_seat", "_token")

    def __init__(self, seat: Seat | None) -> None:
        self._seat = seat

    def __enter__(self) -> None:
        """From here on it is the replica's code."""
        self._token = _SEAT.set(self._seat)

    def __exit__(self, *_: object) -> None:
        """From here on it is whose it was before."""
        _SEAT.reset(self._token)


class Seat:
    """A replica's place at a meeting.

    Attributes:
        meeting: the meeting.
        replica: the number of the replica.
        device: its device.
        state: what it is doing.
        deliver: what the host does to let it go on; None if it has nothing for it.
        hosted: whether the host itself makes this replica's call.
        start: lets its worker make its call, which it makes once, however often it is told to.
        waited: seconds that it has spent in meetings.
    """

    def __init__(self, meeting: Meeting, replica: int, device: torch.device) -> None:
        self.meeting = meeting
        self.replica = replica
        self.device = device
        self.state: State = NOT_BEGUN
        self.deliver: Callable[[], None] | None = None
        self.hosted = False
        self.start: Callable[[], None] = nothing
        self.waited = 0.0
        self.reply = Reply()
        self._is_awake = False
        self.inbox: SimpleQueue[Reply | Errand] = SimpleQueue()

    @property
    def has_begun(self) -> bool:
        """Whether the replica's task has been started."""
        return self.state is not NOT_BEGUN

    @property
    def has_ended(self) -> bool:
        """Whether the replica's task is over."""
        return isinstance(self.state, Ended)

    @property
    def is_lost(self) -> bool:
        """Whether the host may have been interrupted before it had told the worker to start."""
        return self.state is RUNNING and not self._is_awake

    def run(self, call: Callable[[], Any]) -> None:
        """Makes the replica's call, in its worker, and tells the host how it ended."""
        if self._is_awake:
            return
        self._is_awake = True
        try:
            self.meeting.check()
            result = call()
        except BaseException as error:  # it is raised again by the thread that waits
            self.meeting.tell(self, Ended(error=error))
        else:
            self.meeting.tell(self, Ended(result))

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas are at the same meeting.

        Args:
            what: the name of the meeting, for people; the same on all replicas.
            value: what this replica brings.
            act: called once, on the host, with the meeting and all values in the order of the
                replicas; returns one entry per replica.

        Returns:
            This replica's entry.

        Raises:
            MeetingError: another replica has ended, or is at another meeting.
            ReplicaStopped: another replica has failed.
            Exception: what `act` raised, in all replicas.
        """
        start = time.perf_counter()
        try:
            return self.meeting.arrive(self, Arrival(what, value, act))
        finally:
            self.waited += time.perf_counter() - start

    def do(self, order: Errand) -> Answer:
        """Makes a call that the host asked for; it does not count as waiting."""
        start = time.perf_counter()
        try:
            with seated(self if order.seated else None):
                return Answer(order.call())
        finally:
            self.waited -= time.perf_counter() - start

    def said(self) -> str:
        """What the replica is doing, for people."""
        doing = {
            NotBegun: "has not begun",
            Running: "is still running",
            Answer: "has ended its closure",
            Ended: "has ended",
        }
        state = self.state
        what = f"is at {state.what}" if isinstance(state, Arrival) else doing[type(state)]
        return f"replica {self.replica} on {self.device} {what}"


def nothing() -> None:
    """Does nothing."""
    return None


def error_of(seat: Seat) -> BaseException | None:
    """The error with which a replica's task ended, if one did."""
    return seat.state.error if isinstance(seat.state, Ended) else None
