"""Attributes and methods that are replaced for a while, and put back whatever happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from typing_extensions import Self

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Gives an object other attributes for a while, and puts its own back whatever happens.

    They are written to its `__dict__`: a method of its class is hidden for a while, and nothing
    that a module registers is touched. What it had none of before, it has none of afterwards.

    Example:
        >>> class Greeter:
        ...     def word(self):
        ...         return "hello"
        >>> greeter = Greeter()
        >>> with replaced(greeter, word=lambda: "goodbye"):
        ...     greeter.word()
        'goodbye'
        >>> greeter.word(), vars(greeter)
        ('hello', {})
    """
    attributes = vars(owner)
    before = [(name, attributes.get(name, _ABSENT)) for name in names]
    try:
        attributes.update(names)
        yield
    finally:
        for name, value in before:
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value


class StandIn(partial[Any]):
    """Stands on an object for one of its methods, for `replaced`.

    A copy or a pickle of the object that is made meanwhile, to save or to average it, has its own
    method there: what stands in for the original's must not follow it.
    """

    _owner: weakref.ref[Any]
    _name: str
    _own: Any

    def __new__(cls, owner: Any, name: str, call: Callable[..., Any]) -> Self:
        """Stands for `owner`'s method `name`."""
        stand_in = super().__new__(cls, call)
        stand_in._owner = weakref.ref(owner)  # which refers to this: a cycle would keep it alive
        stand_in._name, stand_in._own = name, vars(owner).get(name)
        return stand_in

    def __reduce__(self) -> tuple[Any, ...]:
        """The own method of the owner's copy."""
        if self._own is not None:
            return _itself, (self._own,)
        # A copy has no attributes yet when it asks for this: it gets its class's method.
        return getattr, (self._owner(), self._name)


def _itself(value: Any) -> Any:
    return value
