"""The watchdog: nothing hangs. A copy over a broken link may never end, and cannot be ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Watchdog:
    """Knows what the doctor is at, shows it on a terminal, and calls somebody when it takes long.

    Args:
        seconds: from the latest `tell` on.
        call: called with what was told, in a thread of its own.
    """

    def __init__(self, seconds: float, call: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._timer: threading.Timer | None = None

    def tell(self, what: str) -> None:
        """What comes next."""
        self.rest()
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what} ...", end="", file=sys.stderr, flush=True)
        self._timer = threading.Timer(self._seconds, self._call, [what])
        self._timer.daemon = True
        self._timer.start()

    def rest(self) -> None:
        """Nothing is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Watchdog:
        """Nothing is told yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is under way any more."""
        self.rest()
