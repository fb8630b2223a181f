"""Errors of other people's code: annotated, and relieved of the work that they hold."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

if sys.version_info < (3, 11):
    import exceptiongroup  # noqa: F401  # prints the notes of errors


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error, as Python does since 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to an error that user code or a library raises."""
    try:
        yield
    except Exception as error:
        add_note(error, note)
        raise


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those during whose handling it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__context__


def forget_frames(error: BaseException) -> None:
    """Lets go of the half-done work that the frames of an error, and of its chain, hold."""
    for each in chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
