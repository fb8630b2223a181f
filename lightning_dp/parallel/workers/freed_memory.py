"""Memory that a step on the CPU has freed: glibc keeps it for the next step.

By itself glibc gives large blocks back to the system at the end of each step, and takes them again
in the next one, page by page. The threads of a process queue for that: measured, two replicas of a
small convolutional net, in threads, took a quarter longer than two processes of one each. (`man 3
mallopt` tells what the two thresholds do and how they adapt.)
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from weakref import finalize

KEEPS = 2**30
"""Bytes that a process keeps at the end of its heap while an engine is open."""

MOST = 2**25
"""Bytes of a block that move the thresholds no further, DEFAULT_MMAP_THRESHOLD_MAX of malloc.c."""

VARIABLES = tuple(
    f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD", "MMAP_MAX")
)
"""Each of these ends that glibc moves its thresholds by itself, as the first `mallopt` does."""

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of malloc.h
_open: set[object] = set()


class KeptMemory:
    """From the first of these on until the last one is closed, freed memory stays.

    Then it is given back, and thresholds are where glibc itself has them once a program has freed a
    block of 32 MiB. Nothing is done on other systems, nor where `is_decided`.
    """

    def __init__(self) -> None:
        token = object()
        _open.add(token)
        self.close = finalize(self, _close, token)
        self.close.atexit = False  # then all memory is given back
        _adapt()


def _close(token: object) -> None:
    _open.discard(token)
    _adapt()


def _adapt() -> None:
    """Without a lock, which a finalizer may find held by its own thread: the last looks again."""
    if not is_glibc() or is_decided():
        return
    libc, keeps = _libc(), None
    while keeps is not (wanted := bool(_open)):
        keeps = wanted
        libc.mallopt(_TRIM_THRESHOLD, KEEPS if keeps else 2 * _largest())
    if not keeps:
        libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.mallopt.argtypes, libc.malloc_trim.argtypes = [ctypes.c_int] * 2, [ctypes.c_size_t]
    # A freed block moves both thresholds up. That of the largest size moves them as far as they
    # go, which the first `mallopt` would put an end to; so what it changes can be put back exactly.
    libc.free(libc.malloc(_largest() - 32))
    return libc


def _largest() -> int:
    """Bytes, in whole pages, of the largest block that moves thresholds."""
    return MOST - os.sysconf("SC_PAGE_SIZE")


@cache
def is_glibc() -> bool:
    """Whether this is a Linux with GNU's C library, and not another's."""
    return platform.libc_ver()[0] == "glibc"


@cache
def is_decided() -> bool:
    """Whether the environment says how malloc is to be, whose thresholds then move no more."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in VARIABLES)
