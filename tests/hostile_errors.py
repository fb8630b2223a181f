"""Exceptions whose own methods fail: nobody who carries one may depend on them."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from typing import Any


class HostileError(Exception):
    """An exception of somebody else's, whose methods are not to be relied on."""


def _fails(with_what: type[BaseException] = ZeroDivisionError) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise with_what("a method of the exception itself failed")

    return method


def _hostile(name: str, base: type[BaseException] = HostileError, **methods: Any) -> Any:
    return type(name, (base,), methods)


def _reads_nothing(self: Any, name: str) -> Any:
    raise ZeroDivisionError(name)


class _Text(str):
    """What formats or slices it fails, too."""

    __format__ = __str__ = __getitem__ = _fails()


HOSTILE: dict[str, type[BaseException]] = {
    "repr": _hostile("ReprError", __repr__=_fails()),
    "repr and str": _hostile("ReprAndStrError", __repr__=_fails(), __str__=_fails()),
    "repr, by StopIteration": _hostile("ReprStopError", __repr__=_fails(StopIteration)),
    "repr, by SystemExit": _hostile("ReprExitError", __repr__=_fails(SystemExit)),
    "repr, which is no text": _hostile("ReprNoTextError", __repr__=lambda self: 7),
    "repr, which is odd text": _hostile("ReprOddError", __repr__=lambda self: _Text("text")),
    "bool": _hostile("BoolError", __bool__=_fails()),
    "bool, which is False": _hostile("FalseError", __bool__=lambda self: False),
    "len": _hostile("LenError", __len__=_fails()),
    "len, which is 0": _hostile("EmptyError", __len__=lambda self: 0),
    "eq": _hostile("EqError", __eq__=_fails(), __hash__=BaseException.__hash__),
    "eq, which is True": _hostile("EqualError", __eq__=lambda *_: True, __hash__=lambda self: 0),
    "hash": _hostile("HashError", __hash__=_fails()),
    "add_note": _hostile("AddNoteError", add_note=_fails()),
    "add_note, by StopIteration": _hostile("NoteStopError", add_note=_fails(StopIteration)),
    "add_note, by SystemExit": _hostile("NoteExitError", add_note=_fails(SystemExit)),
    "add_note, a property": _hostile("NotePropertyError", add_note=property(_fails())),
    "add_note, which is None": _hostile("NoteNoneError", add_note=None),
    "notes": _hostile("NotesError", __notes__=property(_fails())),
    "notes, which are no list": _hostile("NotesTextError", __notes__="text"),
    "notes and add_note": _hostile("AllNotesError", __notes__=7, add_note=_fails()),
    "pickling": _hostile("PickleError", __reduce__=_fails(), __reduce_ex__=_fails()),
    "copying": _hostile("CopyError", __copy__=_fails(), __deepcopy__=_fails()),
    "args": _hostile("ArgsError", args=property(_fails())),
    "class": _hostile("ClassError", __class__=property(_fails())),
    "setattr": _hostile("SetattrError", __setattr__=_fails()),
    "getattribute": _hostile("GetattributeError", __getattribute__=_reads_nothing),
}
"""Kinds of exceptions, by what of theirs fails or misleads."""


def groups() -> dict[str, BaseException]:
    """Exceptions that are no `Exception`, or have others in them, each a new one."""
    others: dict[str, BaseException] = {
        "SystemExit": SystemExit(3),
        "CancelledError": asyncio.CancelledError("cancelled"),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "GeneratorExit": GeneratorExit(),
        "StopIteration": StopIteration("a value"),
        "StopAsyncIteration": StopAsyncIteration(),
    }
    group, base_group = (getattr(builtins, f"{b}ExceptionGroup", None) for b in ("", "Base"))
    if group and base_group:  # from Python 3.11 on
        others["ExceptionGroup"] = group("several", [ValueError(1), TypeError(2)])
        nested = [KeyboardInterrupt(), group("inner", [ValueError(1)])]
        others["BaseExceptionGroup"] = base_group("several", nested)
    return others
