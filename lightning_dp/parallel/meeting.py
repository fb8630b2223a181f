"""The meeting: where replicas wait for each other in the middle of a call.

The thread that makes the replicas' calls happen, usually the main one, is the host. It hears of
every replica that it has come to a meeting or that its call has ended, so nobody waits for one that
never comes; and what a meeting is about happens once, on the host, while all replicas stand still.

Where replicas run in order, the host itself makes the first one's call. When that comes to a
meeting, the others begin in their workers, and the replicas take turns from one meeting to the
next: always the same turns, and never two at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch

from lightning_dp.parallel.split import Order

Act: TypeAlias = Callable[["Meeting", list[Any]], Sequence[Any]]
"""What a meeting is about: from what the replicas brought to what each of them gets."""


class MeetingError(RuntimeError):
    """The replicas did not all come to the same meeting."""


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits when another one has failed."""


@dataclass(frozen=True)
class _Arrival:
    what: str
    value: Any
    act: Act


@dataclass(frozen=True)
class _Answer:
    """What a replica's call that the host asked for returned."""

    value: Any


@dataclass(frozen=True)
class Ended:
    """How a replica's task ended."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _Reply:
    value: Any = None
    error: BaseException | None = None

    def take(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class _Order:
    """A call that a replica is to make before it goes on waiting."""

    call: Callable[[], Any]
    seated: bool


class _NotBegun:
    """The replica's task has not been started."""


class _Running:
    """The replica's task runs: it neither waits nor has it ended."""


_NOT_BEGUN, _RUNNING = _NotBegun(), _Running()
_State: TypeAlias = _NotBegun | _Running | _Arrival | _Answer | Ended

_SEAT: ContextVar[Seat | None] = ContextVar("seat", default=None)


def current_seat() -> Seat | None:
    """The place of the replica whose call this is; None outside of replicas."""
    return _SEAT.get()


@contextlib.contextmanager
def seated(seat: Seat | None) -> Iterator[None]:
    """Makes the code inside that of a replica, or with None of no replica."""
    token = _SEAT.set(seat)
    try:
        yield
    finally:
        _SEAT.reset(token)


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
        self.state: _State = _NOT_BEGUN
        self.deliver: Callable[[], None] | None = None
        self.hosted = False
        self.start: Callable[[], None] = _nothing
        self.waited = 0.0
        self.reply = _Reply()
        self._is_awake = False
        self.inbox: SimpleQueue[_Reply | _Order] = SimpleQueue()

    @property
    def has_begun(self) -> bool:
        """Whether the replica's task has been started."""
        return self.state is not _NOT_BEGUN

    @property
    def has_ended(self) -> bool:
        """Whether the replica's task is over."""
        return isinstance(self.state, Ended)

    @property
    def is_lost(self) -> bool:
        """Whether the host may have been interrupted before it had told the worker to start."""
        return self.state is _RUNNING and not self._is_awake

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
            return self.meeting.arrive(self, _Arrival(what, value, act))
        finally:
            self.waited += time.perf_counter() - start

    def do(self, order: _Order) -> _Answer:
        """Makes a call that the host asked for; it does not count as waiting."""
        start = time.perf_counter()
        try:
            with seated(self if order.seated else None):
                return _Answer(order.call())
        finally:
            self.waited -= time.perf_counter() - start

    def said(self) -> str:
        """What the replica is doing, for people."""
        doing = {
            _NotBegun: "has not begun",
            _Running: "is still running",
            _Answer: "has ended its closure",
            Ended: "has ended",
        }
        state = self.state
        what = f"is at {state.what}" if isinstance(state, _Arrival) else doing[type(state)]
        return f"replica {self.replica} on {self.device} {what}"


class Meeting:
    """Where the replicas of one apply meet, as often as they like.

    Args:
        sizes: samples of these replicas; None if they are not known.
        order: the positions of their samples in the batch; None for the batch's own order.
        dim: the dimension along which the batch was cut.

    Attributes:
        seats: one per replica that works.
        crossed: whether the graph of one replica goes on in that of another.
        is_open: whether the replicas' calls have not all ended.
        is_conducting: whether all stand still, and the host acts.
    """

    def __init__(
        self, sizes: Sequence[int] | None = None, order: Order | None = None, dim: int = 0
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.order = order
        self.dim = dim
        self.seats: list[Seat] = []
        self.crossed = False
        self.is_open = True
        self.is_conducting = False
        self._one_by_one = False
        self._broken: BaseException | None = None
        # Something has come about; what, is in the seats: an interrupt must not lose it.
        self._events: SimpleQueue[None] = SimpleQueue()

    @property
    def has_failed(self) -> bool:
        """Whether a replica has failed, or the meeting was broken up."""
        return self._broken is not None or any(_error_of(seat) is not None for seat in self.seats)

    # The replicas' side

    def arrive(self, seat: Seat, arrival: _Arrival) -> Any:
        """See `Seat.meet`."""
        self.check()
        if seat.hosted:
            seat.state = arrival
            if not any(other.has_ended for other in self.seats):
                self._advance()
            self._round()
            return seat.reply.take()
        self.tell(seat, arrival)
        while isinstance(reply := seat.inbox.get(), _Order):
            self.tell(seat, seat.do(reply))
        return reply.take()

    def tell(self, seat: Seat, state: _State) -> None:
        """Tells the host what has become of a replica."""
        seat.state = state
        self._events.put(None)

    def check(self) -> None:
        """Raises an error if the meeting was broken up."""
        if self._broken is not None:
            raise self._told()

    # The host's side

    def begin(self, replicas: Sequence[tuple[int, torch.device]], *, one_by_one: bool) -> None:
        """Makes a seat for each replica, told as number and device."""
        self.seats = [Seat(self, replica, device) for replica, device in replicas]
        self._one_by_one = one_by_one

    def can_start(self, seat: Seat, start: Callable[[], None]) -> None:
        """Tells how a replica's worker is started, once it is its turn."""
        seat.start = seat.deliver = start

    def run_here(self, seat: Seat, call: Callable[[], Any]) -> None:
        """Makes a replica's call on the host, who brings the others on while it waits for them."""
        seat.hosted, seat.deliver, seat.state = True, None, _RUNNING
        try:
            with seated(seat):
                seat.state = Ended(call())
        except Exception as error:
            seat.state = Ended(error=error)
        except BaseException as error:  # an interrupt
            seat.state = Ended(error=error)
            self._break(error)
            raise

    def serve(self) -> None:
        """Lets the replicas that have begun, or can, go on from meeting to meeting until they end.

        An interrupt ends the replicas that wait, and is raised when the others have ended, too. A
        second one is raised at once.
        """
        try:
            while not self.has_failed:
                self._advance()
                if all(seat.has_ended for seat in self.seats):
                    return
                self._round()
            if self._broken is None:
                self._break(next(filter(None, map(_error_of, self.seats))))
        except (MeetingError, ReplicaStopped):
            return  # it has been broken up, and `close` tells why
        except BaseException as error:  # an interrupt
            self._break(error)
            raise

    def close(self) -> tuple[list[Any], tuple[int | None, BaseException] | None]:
        """Ends the meeting, when all calls have ended.

        Returns:
            What the calls returned, in the order of the replicas; and the error to be raised, if
            there is one, with the position of the replica whose own it is, or None.
        """
        if self._broken is None and any(s.has_begun and not s.has_ended for s in self.seats):
            self._break(KeyboardInterrupt())  # at a bad moment, since nothing else comes here
        self.is_open = False
        seats, self.seats = self.seats, []
        for seat in seats:  # which would keep batches and graphs alive in a circle
            seat.start, seat.deliver, seat.reply = _nothing, None, _Reply()
        errors = [_error_of(seat) for seat in seats]
        failed = [error for error in errors if error is not None]
        if self._broken is not None:
            failed.insert(0, self._broken)
        if all(seat.has_ended for seat in seats):
            self._broken = None  # which holds the frames of the calls
        if not failed:
            return [seat.state.result for seat in seats if isinstance(seat.state, Ended)], None
        is_own = failed[0] in errors and not isinstance(failed[0], MeetingError)
        return [], (errors.index(failed[0]) if is_own else None, failed[0])

    def call(self, functions: Sequence[Callable[[], Any]], *, as_replicas: bool) -> list[Any]:
        """Lets every replica make a call while it waits, in its own thread.

        Only for an act. The calls may meet in their turn.

        Args:
            functions: one per replica.
            as_replicas: whether the calls are part of the replicas' steps, and may meet.
        """
        orders = [_Order(function, as_replicas) for function in functions]
        for seat, order in zip(self.seats, orders, strict=True):
            if not seat.hosted:
                seat.deliver = partial(seat.inbox.put, order)
        for seat, order in zip(self.seats, orders, strict=True):
            if seat.hosted:
                seat.state = _RUNNING
                seat.state = seat.do(order)
        while True:
            self._advance()
            states = [seat.state for seat in self.seats]
            answers = [state.value for state in states if isinstance(state, _Answer)]
            if len(answers) == len(states):
                return answers
            self._round()

    def _advance(self) -> None:
        """Lets everybody go on who can, until nobody runs any more."""
        for seat in self.seats:
            if seat.deliver is not None:
                deliver, seat.deliver = seat.deliver, None
                seat.state = _RUNNING
                deliver()
                while self._one_by_one and seat.state is _RUNNING:
                    self._hear()
        while any(seat.state is _RUNNING for seat in self.seats):
            self._hear()

    def _hear(self) -> None:
        """Waits until something may have come about."""
        # The timeout lets Ctrl-C through on Windows, where a lock does not.
        with contextlib.suppress(Empty):
            self._events.get(timeout=0.5)

    def _round(self) -> None:
        """All stand still: holds the meeting that they have come to."""
        arrivals = [seat.state for seat in self.seats if isinstance(seat.state, _Arrival)]
        if len(arrivals) < len(self.seats) or len({arrival.what for arrival in arrivals}) > 1:
            failed = next(filter(None, map(_error_of, self.seats)), None)
            self._break(self._mismatch() if failed is None else failed)
            raise self._told()
        replies = self._conduct(arrivals[0].act, [arrival.value for arrival in arrivals])
        for seat, reply in zip(self.seats, replies, strict=True):
            if seat.hosted:
                seat.state, seat.reply = _RUNNING, reply
            else:
                seat.deliver = partial(seat.inbox.put, reply)

    def _conduct(self, act: Act, values: list[Any]) -> list[_Reply]:
        before, self.is_conducting = self.is_conducting, True
        try:
            with seated(None):
                return [_Reply(value) for value in act(self, values)]
        except Exception as error:
            if self._broken is not None:
                raise
            return [_Reply(error=error)] * len(values)
        finally:
            self.is_conducting = before

    def _mismatch(self) -> MeetingError:
        names = [seat.state.what for seat in self.seats if isinstance(seat.state, _Arrival)]
        return MeetingError(
            f"Expected all replicas at {(names or ['the end of their closures'])[0]}, got: "
            f"{', '.join(seat.said() for seat in self.seats)}. Make the same calls in the same "
            "order on every replica: they must not depend on what is in its shard."
        )

    def _break(self, error: BaseException) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run."""
        if self._broken is None:
            self._broken = error
        others = [seat for seat in self.seats if seat.has_begun and not seat.hosted]
        for seat in others:
            seat.deliver = None
            seat.inbox.put(_Reply(error=self._told()))
            if seat.is_lost:
                seat.start()
        while not all(seat.has_ended for seat in others):
            self._hear()

    def _told(self) -> BaseException:
        """What a replica is told that cannot go on because of others."""
        if isinstance(self._broken, MeetingError):
            return self._broken
        failed = next((s for s in self.seats if _error_of(s) is self._broken), None)
        by = "the run was interrupted" if failed is None else f"replica {failed.replica} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {self._broken!r}")


def _nothing() -> None:
    return None


def _error_of(seat: Seat) -> BaseException | None:
    return seat.state.error if isinstance(seat.state, Ended) else None
