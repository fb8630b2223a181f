"""Attributes and methods that are replaced for a while, and put back whatever happens."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

_ABSENT = object()


class Lasting(ABC):
    """A context with a `begin` and an `end`; `end` also undoes a `begin` that raised halfway."""

    @abstractmethod
    def begin(self) -> None:
        """Enters."""

    @abstractmethod
    def end(self) -> None:
        """Leaves. Called twice, it does nothing the second time."""

    def __enter__(self) -> None:
        """Begins."""
        try:
            self.begin()
        except BaseException:
            self.end()
            raise

    def __exit__(self, *error: Any) -> None:
        """Ends."""
        self.end()


class Contexts(ExitStack):
    """Several contexts, entered one after another when this one is entered, left in reverse."""

    def __init__(self, parts: Iterable[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._parts = parts

    def __enter__(self) -> Any:
        """Enters all; if one fails, those before it are left."""
        try:
            for part in self._parts:
                self.enter_context(part)
        except BaseException:
            if not self.__exit__(*sys.exc_info()):
                raise
        return self


class replaced(Lasting):
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

    def __init__(self, owner: Any, **names: Any) -> None:
        self._attributes = vars(owner)
        self._names = names
        self._before = {name: self._attributes.get(name, _ABSENT) for name in names}

    def begin(self) -> None:
        """The attributes are others from here on."""
        self._attributes.update(self._names)

    def end(self) -> None:
        """They are the object's own again."""
        for name, value in self._before.items():
            if value is _ABSENT:
                self._attributes.pop(name, None)
            else:
                self._attributes[name] = value


class Paired(Lasting):
    """A context of two calls: one at its beginning, one at its end."""

    def __init__(self, first: Callable[[], Any], last: Callable[[], Any]) -> None:
        self._first, self._last = first, last
        self._has_begun = False

    def begin(self) -> None:
        """The first one."""
        self._has_begun = True
        self._first()

    def end(self) -> None:
        """The last one, once."""
        if self._has_begun:
            self._has_begun = False
            self._last()


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


class standing_in(replaced):
    """While it lasts, something is called in the place of a method, see `StandIn`.

    What the code inside binds there, a wrapper around the method perhaps, stays.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._name, self._stand_in = name, StandIn(owner, name, call)
        super().__init__(owner, **{name: self._stand_in})

    def end(self) -> None:
        """As `replaced`; and what stood in becomes the method, which wrappers may still call."""
        if self._attributes.get(self._name) is self._stand_in:
            super().end()
        self._stand_in.retire()


def _itself(value: Any) -> Any:
    return value
