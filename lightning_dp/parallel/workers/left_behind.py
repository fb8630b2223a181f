"""Left behind: workers whose replica does not end when a run is interrupted or closed.

Such a thread cannot be killed. It is named, with the line of the user's code where it is, and told
to end at its next line of Python; nobody waits for it any more.
"""

from __future__ import annotations

import ctypes
import linecache
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType

GRACE_SECONDS = 5.0
"""How long replicas that work may go on after an interrupt."""

AT_EXIT_SECONDS = 2.0
"""How long the program's end waits for them."""

_LIBRARIES = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_dp"}
_OURS_TO_READ = "lightning_dp.examples"

log = logging.getLogger("lightning_dp")


def leave_behind(who: str, thread: threading.Thread) -> None:
    """Says who does not end and where it is, and interrupts it."""
    if not thread.is_alive():
        return
    log.warning(
        "Expected %s to end within %g seconds, got it still at %s. Its thread is left behind, and "
        "ends when this line does. Give what waits there a timeout.",
        who,
        GRACE_SECONDS,
        innermost_line(thread),
    )
    interrupt(thread)


def innermost_line(thread: threading.Thread) -> str:
    """The line of the user's code that a thread runs, or that has called what it runs.

    If there is none, the line of a library.
    """
    innermost = sys._current_frames().get(thread.ident or 0)
    if innermost is None:
        return "its end"
    frames = list(traceback.walk_stack(innermost))
    frame, number = next((f for f in frames if _is_users(f[0])), frames[0])
    code = frame.f_code
    line = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_name}: {line}"


def interrupt(thread: threading.Thread, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Raises an error in a thread, as soon as it runs a line of Python."""
    if thread.ident is not None and thread.is_alive():
        ident = ctypes.c_ulong(thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))


def threads_within(package: str) -> list[threading.Thread]:
    """The threads that have called a function of a package, which has not returned."""
    frames = sys._current_frames()
    return [t for t in threading.enumerate() if _calls(package, frames.get(t.ident or 0))]


def ended(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Waits so long at most until threads have ended, but for the calling one; whether they have.

    In short waits, which Ctrl-C can end on Windows too.
    """
    end = time.monotonic() + seconds
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        while thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(left, 0.5))
    return not any([thread.is_alive() for thread in others])


def _calls(package: str, frame: FrameType | None) -> bool:
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(f"{package}."):
        frame = frame.f_back
    return frame is not None


def _is_users(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    package = name.partition(".")[0]
    is_library = package in _LIBRARIES or package in sys.stdlib_module_names
    return not is_library or name.startswith(_OURS_TO_READ)
