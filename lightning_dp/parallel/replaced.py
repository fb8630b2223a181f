"""Attributes of an object that are others for a while."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Gives an object other attributes, and puts its own back whatever happens.

    They are written to its `__dict__`: a method of its class is hidden for a while, and nothing
    that a module registers is touched. What it had none of before, it has none of afterwards.

    Args:
        owner: a module, a class instance or a Python module.
        names: the attributes.

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
    before = {name: attributes.get(name, _ABSENT) for name in names}
    try:  # from here on an interrupt finds its way to `finally`
        attributes.update(names)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value


class StandIn:
    """Stands on an object for one of its methods, and has the attributes of that method.

    A copy or a pickle of the object that is made meanwhile, to save or to average it, has its own
    method there: what stands in for the original's must not follow it.

    Example:
        >>> import copy
        >>> class Greeter:
        ...     def word(self):
        ...         return "hello"
        >>> greeter = Greeter()
        >>> with standing_in(greeter, "word", lambda: "goodbye"):
        ...     greeter.word(), copy.deepcopy(greeter).word()
        ('goodbye', 'hello')
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)  # which refers to this: a cycle would keep it alive
        self._class, self._name = type(owner), name
        self._own = vars(owner).get(name)
        self._call: Callable[..., Any] | None = call

    @property
    def __func__(self) -> Callable[..., Any]:
        """Without its object. Schedules take it from the `step` of optimizers, and wrap it."""
        return lambda owner, *args, **kwargs: self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What stands in, as long as it does."""
        return (self._call or self._method())(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The method's own: schedules mark the `step` of optimizers."""
        if "_call" not in vars(self):  # it is being made
            raise AttributeError(name)
        return getattr(self._method(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        """The own method of the owner's copy."""
        if self._own is not None:
            return _itself, (self._own,)
        # A copy has no attributes yet when it asks for this: it gets its class's method.
        return getattr, (self._owner(), self._name)

    def retire(self) -> None:
        """From now on it is the method that it has stood for: wrappers may still call it."""
        self._call = None

    def _method(self) -> Any:
        if self._own is not None:
            return self._own
        method = getattr(self._class, self._name)
        return method.__get__(self._owner()) if hasattr(method, "__get__") else method


@contextlib.contextmanager
def standing_in(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, something is called in the place of a method.

    What the code inside binds there, a wrapper around the method perhaps, stays.
    """
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    stand_in = StandIn(owner, name, call)
    try:  # from here on an interrupt finds its way to `finally`
        attributes[name] = stand_in
        yield
    finally:
        if attributes.get(name) is stand_in:
            attributes.pop(name)
            if before is not _ABSENT:
                attributes[name] = before
        stand_in.retire()


def _itself(value: Any) -> Any:
    return value
