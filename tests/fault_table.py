"""Prints what faults and interrupts in a training leave behind: nothing, if all is well.

    python tests/fault_table.py --count 2000

Raises errors of all kinds in all stages of a training, in every mode, by every executor, on the CPU
and on simulated devices; and interrupts the main thread at every line of the package that it comes
to, or at each Nth. Counted are trainings that hang, threads that stay, modules whose next training
is not that of one device, and errors other than those that one device gives. Exits 1 if there is
any.

The trainings run in processes of their own, each watched: one that hangs is counted and ended. What
goes wrong is tried three times more, each in a new process. What then does not go wrong again is
shown and counted apart: on a busy machine nobody knows whose doing it was. Two such cases fail.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from fault_cases import FaultCase, Left, all_settings, fault_cases, run_fault
from interrupts import Interrupt, interrupts, run_interrupt

Case = FaultCase | Interrupt

HANGS_AFTER = 10.0  # seconds
STARTS_IN = 120.0  # imports, and the build of simulated devices
COLUMNS = ("cases", "hangs", "threads left", "broken modules", "wrong errors")
ONCE = "not again"


def run(case: Case) -> Left:
    """Does one case in this process."""
    return run_fault(case) if isinstance(case, FaultCase) else run_interrupt(case)


def quiet() -> None:
    """Nobody reads what a thousand trainings say."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(2)  # not 1, which is what workers have
    gc.freeze()  # collections, of which there are many, need not look at imported code


def work(cases: Sequence[Case], pipe: Connection) -> None:
    """In a process: does the cases in their order, and tells of each one's begin and end."""
    quiet()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    all_settings()
    for case in cases:
        if case.setting.on == "sim":
            from lightning_dp import sim

            sim.enable(8)
            break
    for case in cases:
        pipe.send(None)
        try:
            left: Any = run(case)
        except BaseException as error:
            left = Left(broken=f"the case ended with {type(error).__name__}: {error}")
        pipe.send(left)
        if left and left.broken:
            return  # the next ones had better not be in this process


class Watched:
    """A process that does cases, and the time that it may take for each."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=work, args=(self.cases, theirs))
        self.process.start()
        theirs.close()
        self.deadline = time.monotonic() + STARTS_IN
        self.is_at_work = False

    def hear(self) -> Left | str | None:
        """What became of the first case: what it left, "hangs" or "dies"; None if nothing yet."""
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                self.is_at_work = said is None
                self.deadline = time.monotonic() + (HANGS_AFTER if said is None else STARTS_IN)
                if said is not None:
                    self.cases.pop(0)
                    return said
        except (EOFError, ConnectionError):
            if self.is_at_work:
                return self._again("dies")
            self.end()
            self._start()
        return self._again("hangs") if time.monotonic() > self.deadline else None

    def _again(self, why: str) -> str:
        if hasattr(signal, "SIGUSR1") and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)  # where it hangs
            time.sleep(1)
        self.end()
        self.cases.pop(0)
        if self.cases:
            self._start()
        return why

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def outcomes(cases: Sequence[Case], processes: int) -> Iterator[tuple[Case, Left | str]]:
    """Does all cases, in several processes."""
    shares = [cases[i::processes] for i in range(min(processes, len(cases)))]
    watched = [Watched(share) for share in shares]
    try:
        while any(each.cases for each in watched):
            busy = [each for each in watched if each.cases]
            wait([each.pipe for each in busy], timeout=0.5)
            for each in busy:
                case = each.cases[0]
                if (outcome := each.hear()) is not None:
                    yield case, outcome
    finally:
        for each in watched:
            if not each.pipe.closed:
                each.end()


def goes_wrong_again(case: Case) -> bool:
    """Whether it does so in one of three new processes."""
    return any([outcome for _ in range(3) for _, outcome in outcomes([case], processes=1)])


def row_of(case: Case) -> str:
    """The row of the table that a case counts in."""
    kind = "faults" if isinstance(case, FaultCase) else "interrupts"
    return f"{kind}, {case.setting.mode}, {case.setting.executor}, {case.setting.on}"


def count(
    case: Case, outcome: Left | str, table: dict[str, Counter[str]], *, again: bool = True
) -> None:
    """Counts a case, and tells what is wrong with it, and whether it was so again."""
    row = table.setdefault(row_of(case), Counter())
    row["cases"] += 1
    if not again:
        row[ONCE] += 1
        print(f"ONCE, AND NOT AGAIN: {case}: {outcome}", flush=True)
        return
    if isinstance(outcome, str):
        row["hangs"] += 1
        print(f"{outcome.upper()}: {case}", flush=True)
        return
    row["threads left"] += bool(outcome.threads)
    row["broken modules"] += bool(outcome.broken)
    row["wrong errors"] += bool(outcome.wrong_error)
    if outcome:
        print(f"{case}: {outcome}", flush=True)


def show(table: dict[str, Counter[str]]) -> int:
    """Prints the table; how much is wrong."""
    total = sum(table.values(), Counter())
    shown = (*COLUMNS, ONCE)
    print(f"{'':<42}" + "".join(f"{name:>16}" for name in shown))
    for name, row in [*sorted(table.items()), ("together", total)]:
        print(f"{name:<42}" + "".join(f"{row[column]:>16}" for column in shown))
    return sum(total[column] for column in COLUMNS[1:]) + max(0, total[ONCE] - 1)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults and visits")
    parser.add_argument("--on", choices=["cpu", "sim", "both"], default="both")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--interrupts",
        choices=["no", "lines", "settings"],
        default="lines",
        help="none; at every line, in one of the settings that come to it; or in each of them",
    )
    parser.add_argument("--apart", type=int, default=1, help="of the interrupts take each Nth")
    return parser.parse_args()


def main() -> int:
    """Runs everything."""
    args = arguments()
    start = time.monotonic()
    on = ("cpu", "sim") if args.on == "both" else (args.on,)
    quiet()
    cases: list[Case] = list(fault_cases(args.count, args.seed, on))
    if args.interrupts != "no":
        every = args.interrupts == "settings"
        cases += interrupts(all_settings(on), args.seed, every_setting=every)[:: args.apart]
    table: dict[str, Counter[str]] = {}
    for case, outcome in outcomes(cases, args.processes):
        count(case, outcome, table, again=not outcome or goes_wrong_again(case))
    wrong = show(table)
    print(f"{time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
