"""Memory that a step on the CPU frees: glibc keeps it for the next step.

By default glibc returns large blocks to the system at the end of each step and maps them again in
the next one, page by page, for which the threads of a process queue: two replicas of a small
convolutional net took a quarter longer than two processes of one each. (`man 3 mallopt` documents
the thresholds.)
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from weakref import finalize

KEPT_BYTES = 2**30
"""The most that a process keeps at the end of its heap while an engine is open."""
LARGEST = 2**25
"""DEFAULT_MMAP_THRESHOLD_MAX of malloc.c: freed blocks up to this size raise the thresholds."""
VARIABLES = ("TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD", "MMAP_MAX")

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of malloc.h
_open: set[object] = set()


class KeptMemory:
    """Keeps freed memory until the last one of these objects is closed or garbage collected.

    Then it is returned, and the thresholds are those that glibc itself has after a program has
    freed a block of 32 MiB. Does nothing without glibc, or if the environment configures malloc.
    """

    def __init__(self) -> None:
        token = object()
        _open.add(token)
        self.close = finalize(self, _close, token)
        self.close.atexit = False
        if len(_open) == 1 and is_adjustable():
            _libc().mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def _close(token: object) -> None:
    _open.discard(token)
    if not _open and is_adjustable():
        _libc().mallopt(_TRIM_THRESHOLD, 2 * _largest())
        _libc().malloc_trim(0)


@cache
def is_adjustable() -> bool:
    """Whether this process has glibc's malloc, with thresholds that the user has not set."""
    names = [f"MALLOC_{name}_" for name in VARIABLES]
    is_set = any(name in os.environ for name in names)
    is_set |= "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return platform.libc_ver()[0] == "glibc" and not is_set


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.mallopt.argtypes, libc.malloc_trim.argtypes = [ctypes.c_int] * 2, [ctypes.c_size_t]
    # The first `mallopt` ends glibc's own adjustment. Freeing the largest block that it adjusts to
    # brings the thresholds to their final values first, to which `_close` can return.
    libc.free(libc.malloc(_largest() - 32))
    return libc


def _largest() -> int:
    return LARGEST - os.sysconf("SC_PAGE_SIZE")
