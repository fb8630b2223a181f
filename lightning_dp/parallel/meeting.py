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
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from lightning_dp.parallel.seat import (
    RUNNING,
    Act,
    Answer,
    Arrival,
    Ended,
    Errand,
    MeetingError,
    ReplicaStopped,
    Reply,
    Seat,
    State,
    error_of,
    nothing,
    seated,
)
from lightning_dp.parallel.split import Order


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
        return self._broken is not None or any(error_of(seat) is not None for seat in self.seats)

    # The replicas' side

    def arrive(self, seat: Seat, arrival: Arrival) -> Any:
        """See `Seat.meet`."""
        self.check()
        if seat.hosted:
            seat.state = arrival
            if not any(other.has_ended for other in self.seats):
                self._advance()
            self._round()
            return seat.reply.take()
        self.tell(seat, arrival)
        while isinstance(reply := seat.inbox.get(), Errand):
            self.tell(seat, seat.do(reply))
        return reply.take()

    def tell(self, seat: Seat, state: State) -> None:
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
        seat.hosted, seat.deliver, seat.state = True, None, RUNNING
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
                self._break(next(filter(None, map(error_of, self.seats))))
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
            seat.start, seat.deliver, seat.reply = nothing, None, Reply()
        errors = [error_of(seat) for seat in seats]
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
        orders = [Errand(function, as_replicas) for function in functions]
        for seat, order in zip(self.seats, orders, strict=True):
            if not seat.hosted:
                seat.deliver = partial(seat.inbox.put, order)
        for seat, order in zip(self.seats, orders, strict=True):
            if seat.hosted:
                seat.state = RUNNING
                seat.state = seat.do(order)
        while True:
            self._advance()
            states = [seat.state for seat in self.seats]
            answers = [state.value for state in states if isinstance(state, Answer)]
            if len(answers) == len(states):
                return answers
            self._round()

    def _advance(self) -> None:
        """Lets everybody go on who can, until nobody runs any more."""
        for seat in self.seats:
            if seat.deliver is not None:
                deliver, seat.deliver = seat.deliver, None
                seat.state = RUNNING
                deliver()
                while self._one_by_one and seat.state is RUNNING:
                    self._hear()
        while any(seat.state is RUNNING for seat in self.seats):
            self._hear()

    def _hear(self) -> None:
        """Waits until something may have come about."""
        # The timeout lets Ctrl-C through on Windows, where a lock does not.
        with contextlib.suppress(Empty):
            self._events.get(timeout=0.5)

    def _round(self) -> None:
        """All stand still: holds the meeting that they have come to."""
        arrivals = [seat.state for seat in self.seats if isinstance(seat.state, Arrival)]
        if len(arrivals) < len(self.seats) or len({arrival.what for arrival in arrivals}) > 1:
            failed = next(filter(None, map(error_of, self.seats)), None)
            self._break(self._mismatch() if failed is None else failed)
            raise self._told()
        replies = self._conduct(arrivals[0].act, [arrival.value for arrival in arrivals])
        for seat, reply in zip(self.seats, replies, strict=True):
            if seat.hosted:
                seat.state, seat.reply = RUNNING, reply
            else:
                seat.deliver = partial(seat.inbox.put, reply)

    def _conduct(self, act: Act, values: list[Any]) -> list[Reply]:
        before, self.is_conducting = self.is_conducting, True
        try:
            with seated(None):
                return [Reply(value) for value in act(self, values)]
        except Exception as error:
            if self._broken is not None:
                raise
            return [Reply(error=error)] * len(values)
        finally:
            self.is_conducting = before

    def _mismatch(self) -> MeetingError:
        names = [seat.state.what for seat in self.seats if isinstance(seat.state, Arrival)]
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
            seat.inbox.put(Reply(error=self._told()))
            if seat.is_lost:
                seat.start()
        while not all(seat.has_ended for seat in others):
            self._hear()

    def _told(self) -> BaseException:
        """What a replica is told that cannot go on because of others."""
        if isinstance(self._broken, MeetingError):
            return self._broken
        failed = next((s for s in self.seats if error_of(s) is self._broken), None)
        by = "the run was interrupted" if failed is None else f"replica {failed.replica} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {self._broken!r}")
