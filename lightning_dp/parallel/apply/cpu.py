"""On the CPU: memory that a step frees stays for the next one.

[Note: kept memory] By default glibc returns large blocks to the system at the end of each step and
maps them again in the next one, page by page, for which the threads of a process queue: two
replicas of a small convolutional net took a quarter longer than two processes of one each.
"""

from __future__ import annotations

import ctypes
import os
import platform
from weakref import finalize

KEPT_BYTES = 2**30  # the most that a process keeps at the end of its heap
LARGEST_BYTES = 2**25  # larger blocks are mapped by themselves; glibc takes no higher threshold

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
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
        if len(_open) == 1 and _is_adjustable():
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
            ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def _close(token: object) -> None:
    _open.discard(token)
    if not _open and _is_adjustable():
        ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, 2 * LARGEST_BYTES)
        ctypes.CDLL(None).malloc_trim(0)


def _is_adjustable() -> bool:
    """Whether this process has glibc's malloc, and the user has not configured it."""
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    is_set = is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return platform.libc_ver()[0] == "glibc" and not is_set
