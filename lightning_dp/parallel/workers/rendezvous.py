"""The rendezvous: where replicas wait for each other in the middle of a call.

The host hears of every replica that it has come to the rendezvous or that its call has ended, so
nobody waits for one that never comes; and what a rendezvous is about happens once, on the host,
while all stand still.

Where replicas run in order, the host itself makes the first one's call. When that comes to a
rendezvous, the others begin in their workers, and the replicas take turns from one rendezvous to
the next: always the same turns, and never two at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dp.parallel.workers.participant import (
    ENDED,
    NOT_BEGUN,
    RUNNING,
    Act,
    Answer,
    Arrival,
    Errand,
    Participant,
    RendezvousError,
    ReplicaStopped,
    Reply,
    participating,
)

if TYPE_CHECKING:
    from lightning_dp.parallel.workers.calls import Calls


class Rendezvous:
    """Where the replicas of one apply meet, as often as they like; made when the first one asks."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._participants = calls.participants
        for participant in calls.participants:
            if participant.state is NOT_BEGUN:
                participant.deliver = partial(calls.begin_late, participant)

    # The replicas' side

    def arrive(self, participant: Participant, arrival: Arrival) -> Any:
        """See `Participant.meet`."""
        calls = self._calls
        calls.check()
        if participant.hosted:
            participant.state = arrival
            if not any(other.state is ENDED for other in self._participants):
                self._advance()
            self._round()
            return participant.reply.take()
        calls.tell(participant, arrival)
        while isinstance(reply := participant.inbox.get(), Errand):
            calls.tell(participant, participant.run_errand(reply))
        return reply.take()

    # The host's side

    def serve(self) -> None:
        """Lets the replicas go on from rendezvous to rendezvous until all have ended."""
        with contextlib.suppress(RendezvousError, ReplicaStopped):  # all ended: `close` tells why
            while not self._calls.has_failed:
                self._advance()
                if all(p.state is ENDED for p in self._participants):
                    return
                self._round()
            if self._calls.broken is None:
                self._calls.end(self._first_error())

    def call(self, functions: Sequence[Callable[[], Any]], *, as_replicas: bool) -> list[Any]:
        """In an act: lets every replica make a call while it waits, in its own thread.

        As parts of the replicas' steps, the calls may meet in their turn.
        """
        errands = [Errand(function, as_replicas) for function in functions]
        for participant, errand in zip(self._participants, errands, strict=True):
            if not participant.hosted:
                participant.deliver = partial(participant.inbox.put, errand)
        for participant, errand in zip(self._participants, errands, strict=True):
            if participant.hosted:
                participant.state = RUNNING
                participant.state = participant.run_errand(errand)
        while True:
            self._advance()
            states = [p.state for p in self._participants]
            answers = [state.value for state in states if isinstance(state, Answer)]
            if len(answers) == len(states):
                return answers
            self._round()

    def _advance(self) -> None:
        """Lets everybody go on who can, until nobody runs any more."""
        for participant in self._participants:
            self._calls.advance(participant)
        self._calls.wait()

    def _round(self) -> None:
        """All stand still: does what they have come for."""
        arrivals = [p.state for p in self._participants if isinstance(p.state, Arrival)]
        names = {arrival.what for arrival in arrivals}
        if len(arrivals) < len(self._participants) or len(names) > 1:
            self._calls.end(self._first_error())
            raise self._calls.told()
        replies = self._conduct(arrivals[0].act, [arrival.value for arrival in arrivals])
        for participant, reply in zip(self._participants, replies, strict=True):
            if participant.hosted:
                participant.state, participant.reply = RUNNING, reply
            else:
                participant.deliver = partial(participant.inbox.put, reply)

    def _conduct(self, act: Act, values: list[Any]) -> list[Reply]:
        before, self._calls.is_conducting = self._calls.is_conducting, True
        try:
            with participating(None):
                return [Reply(value) for value in act(self._calls, values)]
        except BaseException as error:
            running = any(p.state is RUNNING for p in self._participants)
            if running or self._calls.broken is not None:
                raise  # an interrupt, while they make a call of their own: that has to end first
            return [Reply(error=error)] * len(values)
        finally:
            self._calls.is_conducting = before

    def _first_error(self) -> BaseException:
        """A replica's own, or that they have not all come to the same rendezvous."""
        errors = [p.error for p in self._participants if p.error is not None]
        if errors:
            return errors[0]
        names = [p.state.what for p in self._participants if isinstance(p.state, Arrival)]
        return RendezvousError(
            f"Expected all replicas at {(names or ['the end of their closures'])[0]}, got: "
            f"{', '.join(p.said() for p in self._participants)}. Make the same calls in the same "
            "order on every replica: they must not depend on what is in its shard."
        )
