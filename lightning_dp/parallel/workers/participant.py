"""The participant: a replica's place at a rendezvous, and what can be said of the replica there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from lightning_dp.parallel.workers.rendezvous import Rendezvous

Act: TypeAlias = Callable[["Rendezvous", list[Any]], Sequence[Any]]
"""What a rendezvous is about: from what the replicas brought to what each of them gets."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits when another one has failed."""


@dataclass(frozen=True)
class Arrival:
    """The replica waits at a rendezvous.

    Attributes:
        what: the name of the rendezvous.
        value: what the replica brings.
        act: what the rendezvous is about.
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
    participating: bool


class NotBegun:
    """The replica's task has not been started."""


class Running:
    """The replica's task runs: it neither waits nor has it ended."""


NOT_BEGUN, RUNNING = NotBegun(), Running()
State: TypeAlias = NotBegun | Running | Arrival | Answer | Ended

_PARTICIPANT: ContextVar[Participant | None] = ContextVar("participant", default=None)


def current_participant() -> Participant | None:
    """The place of the replica whose call this is; None outside of replicas."""
    return _PARTICIPANT.get()


class participating:
    """Makes the code inside that of a replica, or with None of no replica.

    Entered in every call of a replica, where a generator would take several times as long.
    """

    __slots__ = ("_participant", "_token")

    def __init__(self, participant: Participant | None) -> None:
        self._participant = participant

    def __enter__(self) -> None:
        """From here on it is the replica's code."""
        self._token = _PARTICIPANT.set(self._participant)

    def __exit__(self, *_: object) -> None:
        """From here on it is whose it was before."""
        _PARTICIPANT.reset(self._token)


class Participant:
    """A replica's place at a rendezvous.

    Attributes:
        rendezvous: the rendezvous.
        replica: the number of the replica.
        device: its device.
        state: what it is doing.
        deliver: what the host does to let it go on; None if it has nothing for it.
        hosted: whether the host itself makes this replica's call.
        start: lets its worker make its call, which it makes once, however often it is told to.
        waited: seconds that it has spent in rendezvous.
    """

    def __init__(self, rendezvous: Rendezvous, replica: int, device: torch.device) -> None:
        self.rendezvous = rendezvous
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
            self.rendezvous.check()
            result = call()
        except BaseException as error:  # it is raised again by the thread that waits
            self.rendezvous.tell(self, Ended(error=error))
        else:
            self.rendezvous.tell(self, Ended(result))

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas are at the same rendezvous.

        Args:
            what: the name of the rendezvous, for people; the same on all replicas.
            value: what this replica brings.
            act: called once, on the host, with the rendezvous and all values in the order of the
                replicas; returns one entry per replica.

        Returns:
            This replica's entry.

        Raises:
            RendezvousError: another replica has ended, or is at another rendezvous.
            ReplicaStopped: another replica has failed.
            Exception: what `act` raised, in all replicas.
        """
        start = time.perf_counter()
        try:
            return self.rendezvous.arrive(self, Arrival(what, value, act))
        finally:
            self.waited += time.perf_counter() - start

    def do(self, order: Errand) -> Answer:
        """Makes a call that the host asked for; it does not count as waiting."""
        start = time.perf_counter()
        try:
            with participating(self if order.participating else None):
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


def error_of(participant: Participant) -> BaseException | None:
    """The error with which a replica's task ended, if one did."""
    return participant.state.error if isinstance(participant.state, Ended) else None
