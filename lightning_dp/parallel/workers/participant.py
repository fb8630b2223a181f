"""The participant: one replica in an apply, and what it is doing there."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from lightning_dp.parallel.workers.calls import Calls
    from lightning_dp.parallel.workers.rendezvous import Rendezvous

Act: TypeAlias = Callable[["Rendezvous", list[Any]], Sequence[Any]]
"""What a rendezvous is about: from what the replicas brought to what each of them gets."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits when another one has failed."""


@dataclass
class Task:
    """A call for one replica.

    Attributes:
        replica: the number of the replica.
        device: its device.
        call: what to run; takes nothing.
        context: asked for in an error, completes the sentence "in replica 2 on cuda:1, ...".
        seconds: how long the call worked, once it has run; waiting for others is left out.
    """

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str
    seconds: float = field(default=0.0, init=False)


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
    """A call that a replica is to make before it goes on waiting.

    Attributes:
        call: the call.
        is_part_of_step: whether it is made as the replica's, and may come to a rendezvous.
    """

    call: Callable[[], Any]
    is_part_of_step: bool


class NotBegun:
    """The replica's task has not been started."""


class Running:
    """The replica's task runs: it neither waits nor has it ended."""


class Ended:
    """The replica's task has ended: it has a result or an error."""


NOT_BEGUN, RUNNING, ENDED, NO_REPLY = NotBegun(), Running(), Ended(), Reply()
State: TypeAlias = NotBegun | Running | Ended | Arrival | Answer

PARTICIPANT: ContextVar[Participant | None] = ContextVar("participant", default=None)
"""The replica whose code runs."""


def current_participant() -> Participant | None:
    """The replica whose call this is; None outside of replicas."""
    return PARTICIPANT.get()


@contextlib.contextmanager
def participating(participant: Participant | None) -> Iterator[None]:
    """Makes the code inside that of a replica, or with None of no replica."""
    token = PARTICIPANT.set(participant)
    try:
        yield
    finally:
        PARTICIPANT.reset(token)


@dataclass(eq=False)
class Participant:
    """One replica in an apply.

    Attributes:
        calls: those of all replicas, of which this is one.
        task: what the replica does.
        state: what it is doing now.
        result: what its task returned.
        error: what its task raised.
        hosted: whether the host itself makes this replica's call.
        waited: seconds that it has spent at rendezvous.
        deliver: what the host does to let it go on from a rendezvous; None if nothing.
        reply: what it gets there, if it is hosted.
        inbox: what it gets there, if it is not.
        context: the host's context variables, for its worker.
        is_awake: whether its worker has come to it.
    """

    calls: Calls
    task: Task
    state: State = NOT_BEGUN
    result: Any = None
    error: BaseException | None = None
    hosted: bool = False
    waited: float = 0.0
    deliver: Callable[[], None] | None = None
    reply: Reply = NO_REPLY
    inbox: SimpleQueue[Reply | Errand] = field(default_factory=SimpleQueue)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    is_awake: bool = False

    @property
    def replica(self) -> int:
        """The number of the replica."""
        return self.task.replica

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.task.device

    @property
    def is_lost(self) -> bool:
        """Whether the host may have been interrupted before it had told the worker to start."""
        return self.state is RUNNING and not self.is_awake

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
            return self.calls.rendezvous.arrive(self, Arrival(what, value, act))
        finally:
            self.waited += time.perf_counter() - start

    def run_errand(self, errand: Errand) -> Answer:
        """Makes a call that the host asked for; it does not count as waiting."""
        start = time.perf_counter()
        try:
            with participating(self if errand.is_part_of_step else None):
                return Answer(errand.call())
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
