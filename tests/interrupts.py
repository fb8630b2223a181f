"""Ctrl-C at any line of the package that the main thread comes to in a small training."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fault_cases import (
    Fault,
    Left,
    Setting,
    caught,
    thread_state,
    threads_left,
    train,
    victim,
    what_is_broken,
)

import lightning_dp

PACKAGE = str(Path(lightning_dp.__file__).parent) + "/"
WITH_STATEMENTS = contextlib.__file__
"""Of its lines those count that our own with statements come to."""
NOT_OURS = ("/sim/", "/app/")  # devices themselves, and programs

Line = tuple[str, int]


@dataclass(frozen=True)
class Interrupt:
    """An interrupt in front of a line, when the main thread comes to it for the n-th time."""

    setting: Setting
    line: Line
    nth: int

    def __str__(self) -> str:
        s, (file, number) = self.setting, self.line
        place = file.removeprefix(PACKAGE)
        return f"interrupt at {place}:{number}, visit {self.nth}, {s.mode}, {s.executor}, {s.on}"


def _is_ours(file: str) -> bool:
    ours = file.startswith(PACKAGE) and not any(part in file for part in NOT_OURS)
    return ours or file == WITH_STATEMENTS


class Tracer:
    """Counts the lines that the main thread comes to, and raises in front of one of them."""

    def __init__(self, line: Line | None = None, nth: int = 0) -> None:
        self.visits: Counter[Line] = Counter()
        self._line, self._nth = line, nth

    def enters(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if file == WITH_STATEMENTS and not self._is_called_by_us(frame):
            return None
        return self.comes_to if _is_ours(file) else None

    def comes_to(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            self.visits[here] += 1
            if here == self._line and self.visits[here] == self._nth:
                raise KeyboardInterrupt
        return self.comes_to

    @staticmethod
    def _is_called_by_us(frame: FrameType) -> bool:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == WITH_STATEMENTS:
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename.startswith(PACKAGE)

    def run(self, call: Callable[[], Any]) -> Any:
        """Makes a call on this thread, which is the main one.

        No garbage is collected meanwhile: what is destroyed then would come to lines of ours, too.
        """
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(self.enters)
        try:
            return call()
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()


def lines_of(setting: Setting) -> Counter[Line]:
    """The lines that an undisturbed training comes to, and how often."""
    module = victim(setting.mode, Fault())
    tracer = Tracer()
    tracer.run(partial(train, module, setting))
    return tracer.visits


def interrupts(
    settings: Sequence[Setting], seed: int, *, every_setting: bool = False
) -> list[Interrupt]:
    """At every line, in one of the settings that come to it or in each, at a visit by chance."""
    draw = random.Random(seed)
    known: dict[Line, list[tuple[Setting, int]]] = {}
    for setting in settings:
        for line, visits in lines_of(setting).items():
            known.setdefault(line, []).append((setting, visits))
    chosen = []
    for line, places in sorted(known.items()):
        for setting, visits in places if every_setting else [draw.choice(places)]:
            nth = draw.choice([1, visits, draw.randint(1, visits)])
            chosen.append(Interrupt(setting, line, nth))
    return chosen


def run_interrupt(case: Interrupt) -> Left:
    """Interrupts a training, and looks at what is left."""
    module = victim(case.setting.mode, Fault())
    before, tracer = thread_state(case.setting), Tracer(case.line, case.nth)
    error = caught(partial(tracer.run, partial(train, module, case.setting)))
    left = Left(threads=", ".join(threads_left()))
    # Python itself swallows one in a callback of its garbage collector, say.
    if not isinstance(error, KeyboardInterrupt | SystemExit | None):
        left.wrong_error = f"expected an interrupt, got {type(error).__name__}: {error}"
    left.broken = what_is_broken(module, case.setting, before)
    left.threads = left.threads or ", ".join(threads_left())
    return left
