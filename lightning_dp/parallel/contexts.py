"""Contexts: what lasts for a while, and ends whatever happens inside.

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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")
Entries: TypeAlias = "list[Lasting | weakref.ref[_Generated[Any]]]"


_GONE: weakref.ref[Any] = weakref.ref(set())


class _Open(threading.local):
    """The innermost surroundings of this thread."""

    def __init__(self) -> None:
        self.around: weakref.ref[Surroundings] = _GONE


_open = _Open()
_NOWHERE: Entries = []


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
            around = _open.around()
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


def context(
    generator: Callable[P, Iterator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """As `contextlib.contextmanager`, for what users' errors come through.

    Example:
        >>> @context
        ... def talking():
        ...     print("hello")
        ...     try:
        ...         yield
        ...     finally:
        ...         print("goodbye")
        >>> with talking():
        ...     print("how are you?")
        hello
        how are you?
        goodbye
    """

    @wraps(generator)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        # An iterator is declared, as for `contextlib.contextmanager`.
        return _Generated(cast(Generator[T, None, None], generator(*args, **kwargs)))

    return make


class _Generated(AbstractContextManager[T], Generic[T]):
    """A context that a generator begins and ends."""

    def __init__(self, generator: Generator[T, None, None]) -> None:
        self._generator = generator
        self._entry = weakref.ref(self)  # it ends by itself, once nobody has it any more
        around = _open.around()
        self._entries: Entries = [] if around is None else around.opened

    def __enter__(self) -> T:
        self._entries.append(self._entry)
        try:
            return next(self._generator)
        except BaseException as error:
            raised = _own(error)
        self.put_back()
        try:
            raise raised
        finally:
            del raised

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Whether the generator has swallowed the error."""
        raised: BaseException | None
        try:
            if error is None:
                next(self._generator)
            else:
                self._generator.throw(error)
            raised = RuntimeError("Expected the generator of a context to yield once.")
        except StopIteration as found:
            raised = error if found is error else None
        except BaseException as found:
            raised = _own(found)
        self.put_back()  # the error may be an interrupt of the lines above
        try:
            if raised is None:
                return error is not None
            if raised is not error:
                raise raised
            # Not through the error's own attributes.
            BaseException.with_traceback(raised, traceback)
            return False
        finally:
            del raised, error  # which would be kept alive in a circle

    def put_back(self) -> None:
        """Ends it, if it has not ended."""
        if self._entry in self._entries:
            self._generator.close()
            self._entries.remove(self._entry)


def _own(raised: BaseException) -> BaseException:
    """What was raised in a generator, which makes a RuntimeError of a StopIteration."""
    if type(raised) is RuntimeError and raised.args == ("generator raised StopIteration",):
        cause = raised.__cause__
        if cause is not None and issubclass(type(cause), StopIteration):
            return cause
    return raised


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
