"""The rendezvous: where replicas wait for each other in the middle of a call.

The thread that makes the replicas' calls happen, usually the main one, is the host. It hears of
every replica that it has come to a rendezvous or that its call has ended, so nobody waits for one
that never comes; and what a rendezvous is about happens once, on the host, while all stand still.

Where replicas run in order, the host itself makes the first one's call. When that comes to a
rendezvous, the others begin in their workers, and the replicas take turns from one rendezvous to
the next: always the same turns, and never two at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from lightning_dp.parallel.split import Order
from lightning_dp.parallel.workers.participant import (
    RUNNING,
    Act,
    Answer,
    Arrival,
    Ended,
    Errand,
    Participant,
    RendezvousError,
    ReplicaStopped,
    Reply,
    State,
    error_of,
    nothing,
    participating,
)


class Rendezvous:
    """Where the replicas of one apply meet, as often as they like.

    Args:
        sizes: samples of these replicas; None if they are not known.
        order: the positions of their samples in the batch; None for the batch's own order.
        dim: the dimension along which the batch was cut.

    Attributes:
        participants: one per replica that works.
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
        self.participants: list[Participant] = []
        self.crossed = False
        self.is_open = True
        self.is_conducting = False
        self._one_by_one = False
        self._broken: BaseException | None = None
        # Something has come about; what, is in the participants: an interrupt must not lose it.
        self._events: SimpleQueue[None] = SimpleQueue()

    @property
    def has_failed(self) -> bool:
        """Whether a replica has failed, or the rendezvous was broken up."""
        return self._broken is not None or any(error_of(p) is not None for p in self.participants)

    # The replicas' side

    def arrive(self, participant: Participant, arrival: Arrival) -> Any:
        """See `Participant.meet`."""
        self.check()
        if participant.hosted:
            participant.state = arrival
            if not any(other.has_ended for other in self.participants):
                self._advance()
            self._round()
            return participant.reply.take()
        self.tell(participant, arrival)
        while isinstance(reply := participant.inbox.get(), Errand):
            self.tell(participant, participant.do(reply))
        return reply.take()

    def tell(self, participant: Participant, state: State) -> None:
        """Tells the host what has become of a replica."""
        participant.state = state
        self._events.put(None)

    def check(self) -> None:
        """Raises an error if the rendezvous was broken up."""
        if self._broken is not None:
            raise self._told()

    # The host's side

    def begin(self, replicas: Sequence[tuple[int, torch.device]], *, one_by_one: bool) -> None:
        """Makes a participant for each replica, told as number and device."""
        self.participants = [Participant(self, replica, device) for replica, device in replicas]
        self._one_by_one = one_by_one

    def can_start(self, participant: Participant, start: Callable[[], None]) -> None:
        """Tells how a replica's worker is started, once it is its turn."""
        participant.start = participant.deliver = start

    def run_here(self, participant: Participant, call: Callable[[], Any]) -> None:
        """Makes a replica's call on the host, who brings the others on while it waits for them."""
        participant.hosted, participant.deliver, participant.state = True, None, RUNNING
        try:
            with participating(participant):
                participant.state = Ended(call())
        except Exception as error:
            participant.state = Ended(error=error)
        except BaseException as error:  # an interrupt
            participant.state = Ended(error=error)
            self._break(error)
            raise

    def serve(self) -> None:
        """Lets the replicas that have begun, or can, go on until they end.

        An interrupt ends the replicas that wait, and is raised when the others have ended, too. A
        second one is raised at once.
        """
        try:
            while not self.has_failed:
                self._advance()
                if all(p.has_ended for p in self.participants):
                    return
                self._round()
            if self._broken is None:
                self._break(next(filter(None, map(error_of, self.participants))))
        except (RendezvousError, ReplicaStopped):
            return  # it has been broken up, and `close` tells why
        except BaseException as error:  # an interrupt
            self._break(error)
            raise

    def close(self) -> tuple[list[Any], tuple[int | None, BaseException] | None]:
        """Ends the rendezvous, when all calls have ended.

        Returns:
            What the calls returned, in the order of the replicas; and the error to be raised, if
            there is one, with the position of the replica whose own it is, or None.
        """
        if self._broken is None and any(p.has_begun and not p.has_ended for p in self.participants):
            self._break(KeyboardInterrupt())  # at a bad moment, since nothing else comes here
        self.is_open = False
        participants, self.participants = self.participants, []
        for participant in participants:  # which would keep batches and graphs alive in a circle
            participant.start, participant.deliver, participant.reply = nothing, None, Reply()
        errors = [error_of(participant) for participant in participants]
        failed = [error for error in errors if error is not None]
        if self._broken is not None:
            failed.insert(0, self._broken)
        if all(p.has_ended for p in participants):
            self._broken = None  # which holds the frames of the calls
        if not failed:
            return [p.state.result for p in participants if isinstance(p.state, Ended)], None
        is_own = failed[0] in errors and not isinstance(failed[0], RendezvousError)
        return [], (errors.index(failed[0]) if is_own else None, failed[0])

    def call(self, functions: Sequence[Callable[[], Any]], *, as_replicas: bool) -> list[Any]:
        """Lets every replica make a call while it waits, in its own thread.

        Only for an act. The calls may meet in their turn.

        Args:
            functions: one per replica.
            as_replicas: whether the calls are part of the replicas' steps, and may meet.
        """
        orders = [Errand(function, as_replicas) for function in functions]
        for participant, order in zip(self.participants, orders, strict=True):
            if not participant.hosted:
                participant.deliver = partial(participant.inbox.put, order)
        for participant, order in zip(self.participants, orders, strict=True):
            if participant.hosted:
                participant.state = RUNNING
                participant.state = participant.do(order)
        while True:
            self._advance()
            states = [p.state for p in self.participants]
            answers = [state.value for state in states if isinstance(state, Answer)]
            if len(answers) == len(states):
                return answers
            self._round()

    def _advance(self) -> None:
        """Lets everybody go on who can, until nobody runs any more."""
        for participant in self.participants:
            if participant.deliver is not None:
                deliver, participant.deliver = participant.deliver, None
                participant.state = RUNNING
                deliver()
                while self._one_by_one and participant.state is RUNNING:
                    self._hear()
        while any(p.state is RUNNING for p in self.participants):
            self._hear()

    def _hear(self) -> None:
        """Waits until something may have come about."""
        # The timeout lets Ctrl-C through on Windows, where a lock does not.
        with contextlib.suppress(Empty):
            self._events.get(timeout=0.5)

    def _round(self) -> None:
        """All stand still: holds the rendezvous that they have come to."""
        arrivals = [p.state for p in self.participants if isinstance(p.state, Arrival)]
        if (
            len(arrivals) < len(self.participants)
            or len({arrival.what for arrival in arrivals}) > 1
        ):
            failed = next(filter(None, map(error_of, self.participants)), None)
            self._break(self._mismatch() if failed is None else failed)
            raise self._told()
        replies = self._conduct(arrivals[0].act, [arrival.value for arrival in arrivals])
        for participant, reply in zip(self.participants, replies, strict=True):
            if participant.hosted:
                participant.state, participant.reply = RUNNING, reply
            else:
                participant.deliver = partial(participant.inbox.put, reply)

    def _conduct(self, act: Act, values: list[Any]) -> list[Reply]:
        before, self.is_conducting = self.is_conducting, True
        try:
            with participating(None):
                return [Reply(value) for value in act(self, values)]
        except Exception as error:
            if self._broken is not None:
                raise
            return [Reply(error=error)] * len(values)
        finally:
            self.is_conducting = before

    def _mismatch(self) -> RendezvousError:
        names = [p.state.what for p in self.participants if isinstance(p.state, Arrival)]
        return RendezvousError(
            f"Expected all replicas at {(names or ['the end of their closures'])[0]}, got: "
            f"{', '.join(p.said() for p in self.participants)}. Make the same calls in the same "
            "order on every replica: they must not depend on what is in its shard."
        )

    def _break(self, error: BaseException) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run."""
        if self._broken is None:
            self._broken = error
        others = [
            participant
            for participant in self.participants
            if participant.has_begun and not participant.hosted
        ]
        for participant in others:
            participant.deliver = None
            participant.inbox.put(Reply(error=self._told()))
            if participant.is_lost:
                participant.start()
        while not all(p.has_ended for p in others):
            self._hear()

    def _told(self) -> BaseException:
        """What a replica is told that cannot go on because of others."""
        if isinstance(self._broken, RendezvousError):
            return self._broken
        failed = next((p for p in self.participants if error_of(p) is self._broken), None)
        by = "the run was interrupted" if failed is None else f"replica {failed.replica} failed"
        return ReplicaStopped(f"Expected all replicas to meet, but {by}: {self._broken!r}")
