"""Random numbers for drawing: those of the first process, in every process.

Samplers draw from the global generators of torch, of Python and of NumPy. The state of these parts
as soon as processes compute with different samples, by dropout for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_dp.parallel.generated import context
from lightning_dp.processes.random_states import host_state, same_states, set_host_state

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


class DrawingState:
    """The state of the global generators while somebody draws samples.

    Afterwards the first process's generators are as drawing has left them, as on one device, and
    those of the others as they were.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._latest = host_state()

    @context
    def told(self) -> Iterator[None]:
        """While it lasts, all processes draw with the first one's state, which it tells them."""
        own = host_state()
        state = self._world.broadcast(own)
        is_first = self._world.rank == 0
        if not is_first:
            set_host_state(state)
        yield
        self._latest = host_state()
        if not is_first:
            set_host_state(own)

    @context
    def continued(self) -> Iterator[None]:
        """While it lasts, all draw with the state that the latest draw has left.

        Nobody needs to tell it. If others have drawn since in the first process, their numbers are
        left alone there, too.
        """
        own = host_state()
        is_own = self._world.rank == 0 and same_states(own, self._latest)
        set_host_state(self._latest)
        yield
        self._latest = host_state()
        if not is_own:
            set_host_state(own)
