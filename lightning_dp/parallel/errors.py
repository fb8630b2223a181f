"""Errors of other people's code: carried by identity, described and annotated with care.

Every method of such an error may fail or mislead: its `repr`, its truth value, its `add_note`, its
`__class__`. Nothing that the engine does with one may depend on them: others wait for its end.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator

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
        notes = [*getattr(error, "__notes__", ()), note]
        error.__notes__ = notes  # type: ignore[attr-defined]  # as mypy reads Python 3.10


def chain(error: BaseException | None, link: str = "__context__") -> Iterator[BaseException]:
    """An error, and those that it came from, by `__context__` or by `__cause__`: none is asked."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = BaseException.__getattribute__(error, link)


def forget_frames(error: BaseException) -> None:
    """Lets go of the half-done work that the frames of an error, and of its chain, hold."""
    for each in chain(error):
        traceback.clear_frames(BaseException.__getattribute__(each, "__traceback__"))
        BaseException.with_traceback(each, None)
