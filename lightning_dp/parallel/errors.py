"""Errors of other people's code: carried by identity, described and annotated with care.

Every method of such an error may fail or mislead: its `repr`, its truth value, its `add_note`, its
`__class__`. Nothing that the engine does with one may depend on them: others wait for its end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

log = logging.getLogger("lightning_dp")


def is_a(error: BaseException | None, *types: type[BaseException]) -> bool:
    """As `isinstance`, which would ask the error itself."""
    return issubclass(type(error), types)


def described(error: BaseException, how: Callable[[BaseException], str] = repr) -> str:
    """An error's `repr`, or its `str`; its type's name where that fails."""
    try:
        # Plain text: a subclass of it may fail again where it is used.
        return str.__str__(how(error))
    except BaseException:  # whatever that code raises
        return f"{type(error).__qualname__} (whose {how.__name__}() fails)"


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error; to the log if the error takes none."""
    # Python 3.10 has no such method.
    plain = getattr(BaseException, "add_note", _add_to_text)
    for add in (lambda error, note: error.add_note(note), plain):
        try:
            add(error, note)
        except BaseException:  # its own method is not there, or raises anything
            continue
        return
    log.error("%s %s. The error itself takes no note.", type(error).__qualname__, note)


def _add_to_text(error: BaseException, note: str) -> None:
    """Python 3.10 shows no notes."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def context_of_errors(
    generator: Callable[P, Iterator[None]],
) -> Callable[P, AbstractContextManager[None]]:
    """As `contextlib.contextmanager`, for a generator that calls other people's code at its end.

    Their StopIteration would leave a generator as a RuntimeError.
    """
    manager = contextlib.contextmanager(generator)

    @wraps(generator)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return _WithErrors(manager(*args, **kwargs))

    return make


class _WithErrors(AbstractContextManager[None]):
    def __init__(self, manager: AbstractContextManager[None]) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        self._manager.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._manager.__exit__(*error)
        except RuntimeError as raised:
            own, cause = type(raised) is RuntimeError, raised.__cause__
            if not (own and str(raised) == "generator raised StopIteration" and cause is not None):
                raise
            original = cause
        raise original
