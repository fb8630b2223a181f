"""Contexts that a generator begins and ends, for what users' errors come through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar, cast

from lightning_dp.parallel.contexts import opened_here

P = ParamSpec("P")
T = TypeVar("T")


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
        self._entries = opened_here()

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
