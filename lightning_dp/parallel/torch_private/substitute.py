"""A function of torch's that another one stands in for, as long as anybody has a use for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dp.parallel.torch_private.found import found


class Substitute:
    """Replaces an attribute while it has users, who may come and go in any order, in any thread.

    Args:
        owner: whose attribute it is.
        name: the attribute, a function. Gone: an error.
        function: what stands in for it.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = found(owner, name)
        self.users: set[Any] = set()
        self._owner, self._name, self._function = owner, name, function

    def add(self, user: object) -> None:
        """The user has it from here on."""
        self.users.add(user)
        self._update()

    def discard(self, user: object) -> None:
        """The user has it no longer, if it ever had."""
        self.users.discard(user)
        self._update()

    def _update(self) -> None:
        """Without a lock, which an interrupt could leave locked: the last to write looks again."""
        function = None
        while function is not (wanted := self._function if self.users else self.original):
            function = wanted
            setattr(self._owner, self._name, function)
