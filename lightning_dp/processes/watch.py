"""Watch: what processes know of each other when one of them fails.

A collective that fails says that a connection was closed, or that time is up. Which process was
the first to fail, and why, stands in the store: each one writes what it does there now and then,
and its error before it leaves.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dp.parallel.errors import described, is_a
from lightning_dp.processes import whereabouts
from lightning_dp.processes.attempts import prefixed

log = logging.getLogger("lightning_dp")

INTERVAL = 0.5  # seconds between two signs of life
SILENT = 2.5  # seconds without one after which a process is taken for dead
PATIENCE = 4.0  # seconds for others to say what has happened
GRACE = 30.0  # seconds for the main thread to end after another process has failed

_THREAD = "lightning_dp-watch"


@dataclass(frozen=True)
class Sign:
    """A sign of life.

    Attributes:
        rank: whose.
        who: the process in words.
        second: when, counted from when the processes have joined.
        doing: what the process does.
        is_waiting: whether it waits for others.
        has_ended: whether it has left in good order.
    """

    rank: int
    who: str
    second: float
    doing: str
    is_waiting: bool
    has_ended: bool = False


class Watch:
    """Tells the other processes of this one, and knows what they have told.

    Args:
        store: what all processes share.
        rank: which process this is.
        size: how many there are.
        doing: says what the process does, at any moment, from another thread.
    """

    def __init__(self, store: Any, rank: int, size: int, doing: Callable[[], str]) -> None:
        self.rank, self.size = rank, size
        self.who = f"process {rank} of {size} (machine {socket.gethostname()}, pid {os.getpid()})"
        self._doing, self._start = doing, time.monotonic()
        # A store's client answers one thread at a time, and the main thread may wait in it.
        self._store = prefixed("watch", store.clone())
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_asking = self._has_seen = False

    def start(self) -> None:
        """Begins to give signs of life."""
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leaves in good order; without effect if that is so."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end.set()
            thread.join()
            self._tell(has_ended=True)

    # What this process tells

    def note(self, error: BaseException) -> None:
        """Tells the others of an error of this process's own."""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        kind, text = type(error).__qualname__, described(error, str)
        self._note(f"{self.who}, {self._doing()}: {kind}: {text}{notes}")

    def wait_for_readers(self) -> None:
        """Waits a little until the others have read what has been noted."""
        end = time.monotonic() + PATIENCE
        try:
            with self._lock:
                while self._store.add("seen", 0) < self.size and time.monotonic() < end:
                    time.sleep(INTERVAL / 10)
        except RuntimeError as error:
            log.debug("The store has ended: %s", error)

    def _note(self, text: str) -> None:
        try:
            with self._lock:
                number = self._store.add("errors", 1)
                self._store.set(f"error/{number}", text)
        except RuntimeError as error:  # who kept the store has left
            log.error("%s. The others could not be told: %s", text, error)

    def sign(self, *, has_ended: bool = False) -> Sign:
        """What this process does now."""
        doing = ", ".join(part for part in (self._doing(), whereabouts.place()) if part)
        waiting = self._is_asking or whereabouts.is_waiting()
        return Sign(self.rank, self.who, self._second(), doing, waiting, has_ended)

    def _second(self) -> float:
        return time.monotonic() - self._start

    def _tell(self, *, has_ended: bool = False) -> None:
        sign = json.dumps(vars(self.sign(has_ended=has_ended)))
        try:
            with self._lock:
                self._store.set(f"sign/{self.rank}", sign)
        except RuntimeError as error:  # who kept the store has left
            log.debug("%s could not give a sign of life: %s", self.who, error)

    def _run(self) -> None:
        self._tell()
        while not self._end.wait(INTERVAL):
            self._tell()
            if self._first_told() is not None and not self._end.wait(GRACE):
                self._leave()

    def _leave(self) -> None:
        """Ends a process whose main thread does not end by itself though another has failed."""
        text = f"{self.who} does not end by itself and is ended, since {self._first_told()}"
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    # What others have told

    def first(self) -> str | None:
        """Which process has failed first, and why; None if no other one has.

        Waits a little: those who fail need time to say so, and those who are dead to be missed.
        """
        self._is_asking = True
        end = time.monotonic() + PATIENCE
        while (told := self._first_told()) is None and time.monotonic() < end:
            if missed := self._missed():
                self._note(missed)
            else:
                time.sleep(INTERVAL / 10)
        if told is None and (late := self._late()):
            self._note(late)
        return self._first_told()

    def _first_told(self) -> str | None:
        try:
            with self._lock:
                if not self._store.check(["error/1"]):
                    return None
                if not self._has_seen:
                    self._store.add("seen", 1)
                self._has_seen = True
                text: bytes = self._store.get("error/1")
                return text.decode()
        except RuntimeError:
            return "process 0, which kept the store, has left"

    def _missed(self) -> str | None:
        """Which process gives no signs of life."""
        for sign in self._signs():
            silent = self._second() - sign.second
            if silent > SILENT and not sign.has_ended:
                text = f"has not been heard of for {silent:.0f} s: it was killed, or hangs"
                return f"{self._whole(sign)}: {text}"
        return None

    def _late(self) -> str | None:
        """Which process is alive and does not come."""
        for sign in self._signs():
            if sign.has_ended:
                return f"{sign.who}: has ended, and does not come to a collective"
            if not sign.is_waiting:
                return f"{self._whole(sign)}: is alive, but does not come to a collective"
        return None

    def _signs(self) -> list[Sign]:
        keys = [f"sign/{rank}" for rank in range(self.size) if rank != self.rank]
        try:
            with self._lock:
                keys = [key for key in keys if self._store.check([key])]
                return [Sign(**json.loads(self._store.get(key))) for key in keys]
        except RuntimeError:
            return []

    @staticmethod
    def _whole(sign: Sign) -> str:
        return f"{sign.who}, {sign.doing}" if sign.doing else sign.who


def is_of_group(error: BaseException) -> bool:
    """Whether a collective has failed, and not what the process itself has done."""
    if is_a(error, dist.DistError):
        return True
    if not is_a(error, RuntimeError):
        return False
    text = described(error, str)
    frames = traceback.extract_tb(error.__traceback__)
    is_inside = bool(frames) and whereabouts.is_collective(frames[-1].filename)
    return is_inside or any(name in text for name in ("gloo", "NCCL", "pair closure"))
