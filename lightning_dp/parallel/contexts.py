"""Contexts: what lasts for a while, and ends whatever happens inside; attributes that are replaced.

The code of users runs inside of them. Its errors leave a context unchanged, and nothing is asked of
them: `contextlib` sets their `__traceback__`, which an error may refuse, and makes a RuntimeError
of a StopIteration.

An interrupt may come while a context ends, or just before. So whoever runs a step knows those that
are open, and ends what an error has left open, see `Surroundings`. Outside of a step nobody knows
them: they would be kept for good.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

Entries: TypeAlias = "list[Lasting | weakref.ref[Any]]"


_GONE: weakref.ref[Any] = weakref.ref(set())


class _Open(threading.local):
    """The innermost surroundings of this thread."""

    def __init__(self) -> None:
        self.around: weakref.ref[Surroundings] = _GONE


_open = _Open()
_NOWHERE: Entries = []
_ABSENT = object()


def opened_here() -> Entries:
    """What this thread has open within its innermost surroundings; a list of no use without any."""
    around = _open.around()
    return [] if around is None else around.opened


class Lasting(ABC):
    """A context that knows what to put back, and can be told to do so again.

    An interrupt may keep `begin` or `end` from going on. So `end` must be right after a part of
    `begin`, and after a part of itself.
    """

    _entries: Entries = _NOWHERE  # of the thread that has entered it; another one may end it

    @abstractmethod
    def begin(self) -> None:
        """What it does to others."""

    @abstractmethod
    def end(self) -> None:
        """Undoes it."""

    def __enter__(self) -> None:
        """It lasts from here on."""
        try:
            around = _open.around()  # as `opened_here`, without its frame
            self._entries = [] if around is None else around.opened
            self._entries.append(self)
            self.begin()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        """It ends, once; if an interrupt keeps it from that, it can be told again."""
        if self in self._entries:
            self.end()
            self._entries.remove(self)

    def put_back(self) -> None:
        """Ends it, if it has not ended."""
        self.__exit__(None, None, None)


_NONE = (None, None, None)


class Contexts(Lasting):
    """Several contexts, each made once those before it have begun. None of them swallows errors."""

    def __init__(self, parts: Iterable[AbstractContextManager[Any]]) -> None:
        self._parts = parts
        self._begun: list[tuple[AbstractContextManager[Any], Any]] = []
        self._error: Any = _NONE

    def begin(self) -> None:
        """Enters all."""
        for part in self._parts:
            # One line: there is none between them for an interrupt.
            self._begun.append((part, part.__enter__()))

    def __exit__(self, *error: Any) -> None:
        """Leaves all, with the error that has come up by then."""
        self._error = error
        super().__exit__(*error)
        raised, self._error = self._error[1], _NONE  # or it would be kept alive in a circle
        try:
            if raised is not error[1]:
                raise raised
        finally:
            del raised, error

    def end(self) -> None:
        """Leaves all, the last one first."""
        while self._begun:
            try:
                self._begun.pop()[0].__exit__(*self._error)
            except BaseException:
                self._error = sys.exc_info()


class Paired(Lasting):
    """A context of two calls: one at its beginning, one at its end."""

    def __init__(self, first: Callable[[], Any], last: Callable[[], Any]) -> None:
        self._first, self._last = first, last
        self._begun: list[tuple[Any, Callable[[], Any]]] = []

    def begin(self) -> None:
        """The first one."""
        self._begun.append((self._first(), self._last))

    def end(self) -> None:
        """The last one, if there was a first one."""
        while self._begun:
            self._begun.pop()[1]()


class Surroundings:
    """What a thread has open, and whether gradients are on, is after an error as it was before.

    An interrupt may have come while something was put back, or just before: it is once more.
    Whoever runs a step surrounds it with this.
    """

    opened: Entries  # what lasts, and was opened meanwhile; the innermost is the last

    def __enter__(self) -> None:
        """Looks."""
        self._grad = torch.is_grad_enabled()
        self._outer = _open.around
        outer = self._outer()
        self.opened = [] if outer is None else outer.opened
        self._count = len(self.opened)
        _open.around = weakref.ref(self)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """After an error, puts everything back that was opened meanwhile."""
        if kind is not None:
            while len(self.opened) > self._count:
                last = self.opened[-1]
                opened = last if isinstance(last, Lasting) else last()
                if opened is None:
                    self.opened.pop()
                else:
                    opened.put_back()
            torch.set_grad_enabled(self._grad)
        _open.around = self._outer


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
