"""Whereabouts: what this process is doing, as another thread of it sees."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import lightning
import torch

_HERE = str(Path(__file__).parents[1])
_TRAINERS = (_HERE, str(Path(lightning.__file__).parent))
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
_COLLECTIVES = (
    str(Path(torch.distributed.__file__).parent),
    str(Path(_HERE) / "parallel" / "processes"),
)


def is_collective(filename: str) -> bool:
    """Whether a file's code is that of collectives."""
    return filename.startswith(_COLLECTIVES)


def is_waiting() -> bool:
    """Whether the main thread waits for other processes, in a collective."""
    frame = _frame_of(threading.main_thread())
    while frame is not None and not _in(frame, _COLLECTIVES):
        if _in(frame, _TRAINERS):
            return False
        frame = frame.f_back
    return frame is not None


def place() -> str:
    """Which line of the user's code runs; empty if none does.

    Where the main thread waits for its replicas, that of one of them.
    """
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main]
    for thread in (main, *others):
        frame = _users(_frame_of(thread))
        if frame is not None:
            code = frame.f_code
            return f"in {code.co_name} ({code.co_filename}, line {frame.f_lineno})"
    return ""


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's, if no Trainer or strategy stands further in."""
    while frame is not None and not _in(frame, _TRAINERS):
        if not _in(frame, _LIBRARIES):
            return frame
        frame = frame.f_back
    return None


def _in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)
