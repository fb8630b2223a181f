"""What passes for another object, but for some of its methods."""

from __future__ import annotations

import copy
from typing import Any


class Passes:
    """Has the class and the attributes of another object; copies and pickles are the other's."""

    def __init__(self, original: Any) -> None:
        self._original = original

    @property  # type: ignore[misc]  # it cannot be set
    def __class__(self) -> type[Any]:
        """The original's, for whoever asks."""
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        """What is not here is the original's."""
        return getattr(self._original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the original."""
        return copy.deepcopy(self._original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is one of the original."""
        return self._original.__reduce_ex__(protocol)
