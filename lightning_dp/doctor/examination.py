"""The examination: environment, proof, advice, one after another, each told when it is there."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_dp.doctor import report
from lightning_dp.doctor.advice import advice, first_steps, timings
from lightning_dp.doctor.aside import Aside, how_to_look_at
from lightning_dp.doctor.bench import Bench
from lightning_dp.doctor.compilers import no_code_for
from lightning_dp.doctor.ddp import DdpProcesses, why_no_ddp
from lightning_dp.doctor.environment import environment
from lightning_dp.doctor.law import Law, Result
from lightning_dp.doctor.machine import machine
from lightning_dp.doctor.proof import COMPILED, LAWS, prove
from lightning_dp.doctor.timing import fair_threads
from lightning_dp.doctor.watchdog import Watchdog
from lightning_dp.doctor.workloads import Workload
from lightning_dp.parallel.devices import replica_names

MINUTE = 60.0  # seconds from the start of the process to its end
SECONDS = 48.0  # of these, after which nothing more is timed
FOR_COMPILER = 27.0  # of these, after which a compiler is waited for no more
SLOW = 12.0  # of these, spent on imports: other processes, which import the same, would be too late
SLOW_START = (
    "The start took {:.0f} s of the minute that there is for all. On a machine that has read the "
    "files for the first time, run it again: more will be timed."
)
STUCK = 180.0  # seconds at one thing, after which the doctor gives up


@dataclass(frozen=True)
class Plan:
    """What is to be looked at, and with what.

    Args:
        devices: as they were asked for; one may repeat.
        laws: of the proof.
        workloads: what is timed; none for no advice.
        command: the program that looks at one law more, `[]` for none.
        ddp_command: the program that answers for DDP's processes, `[]` for none.
        output: the file.
        seconds_before: that the process has taken so far, of the minute that there is for all.
    """

    devices: Sequence[torch.device]
    laws: Sequence[Law] = LAWS
    workloads: Sequence[Workload] = ()
    command: Sequence[str] = ()
    ddp_command: Sequence[str] = ()
    output: Path = Path("doctor.json")
    seconds_before: float = 0.0

    @property
    def seconds_to_time(self) -> float:
        """From the start of the process, after which nothing more is timed.

        What begins just before takes longer on a machine that was long at the imports.
        """
        return min(SECONDS, MINUTE - 2 * self.seconds_before)

    @property
    def is_slow_machine(self) -> bool:
        """Whether it is too slow, too busy, or cold, for what needs processes of its own."""
        return self.seconds_before > SLOW


def examine(plan: Plan) -> report.Report:
    """Looks at everything, prints it, and writes the file."""
    start = time.perf_counter() - plan.seconds_before
    found = report.Report(list(map(str, plan.devices)))
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(STUCK, lambda what: _give_up(what, found, plan)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        host = machine()
        stack.enter_context(fair_threads())
        watchdog.tell("environment and links")
        found.environment = environment(plan.devices, host)
        watchdog.rest()
        print("Environment")
        report.show_environment(found.environment)
        sys.stdout.flush()
        aside, ddp = _started(plan, stack)
        _proof(found, plan, folder, watchdog, aside, start)
        if plan.workloads and found.is_healthy:
            _advice(found, plan, folder, watchdog, ddp, start)
        found.seconds = time.perf_counter() - start
    print()
    found.write(plan.output)
    report.show_verdict(found, plan.output)
    return found


def _started(plan: Plan, stack: contextlib.ExitStack) -> tuple[Aside | None, DdpProcesses | None]:
    """What runs beside the proof: neither is needed before its end."""
    aside = ddp = None
    if plan.is_slow_machine:
        return aside, ddp
    if plan.command and not no_code_for(plan.devices[0]):
        aside = Aside(COMPILED, plan.command)
        stack.callback(aside.close)
    if plan.ddp_command and plan.workloads and not why_no_ddp(plan.devices):
        ddp = DdpProcesses(plan.ddp_command, plan.devices)
        stack.callback(ddp.close)
    return aside, ddp


def replicas_on(devices: Sequence[torch.device]) -> list[torch.device]:
    """Where the proof's replicas are: two on a single device, which proves more than one."""
    return list(devices) if len(devices) > 1 else list(devices) * 2


def _proof(
    found: report.Report,
    plan: Plan,
    folder: Path,
    watchdog: Watchdog,
    aside: Aside | None,
    start: float,
) -> None:
    bench = Bench(replicas_on(plan.devices), folder)
    names = ", ".join(replica_names(bench.devices))
    print(f"\nProof: replicas on {names}; {bench.root} alone is the measure", flush=True)
    found.proof = results = prove(bench, plan.laws, watchdog.tell)
    watchdog.tell(COMPILED.name)
    if aside is not None:
        results.append(aside.result(start + FOR_COMPILER - time.perf_counter()))
    elif plan.command:
        remark = no_code_for(bench.root) or f"slow start; {how_to_look_at(COMPILED)}"
        results.append(Result(COMPILED.name, "skip", remark=remark))
    watchdog.rest()
    report.show_proof(results)
    sys.stdout.flush()


def _advice(
    found: report.Report,
    plan: Plan,
    folder: Path,
    watchdog: Watchdog,
    ddp: DdpProcesses | None,
    start: float,
) -> None:
    def seconds_left() -> float:
        return start + plan.seconds_to_time - time.perf_counter()

    watchdog.tell("step times")
    found.timings = timings(plan.workloads, plan.devices, folder, ddp, seconds_left, watchdog.tell)
    own = first_steps(plan.workloads, plan.devices, folder, seconds_left)
    found.advice = [*advice(found.timings, plan.devices, found.environment), *own]
    if plan.is_slow_machine:
        found.advice.append(SLOW_START.format(plan.seconds_before))
    watchdog.rest()
    print("\nAdvice")
    report.show_timings(found.timings)
    for line in found.advice:
        print(f"- {line}")


def _give_up(what: str, found: report.Report, plan: Plan) -> None:
    """Ends the process: what hangs in a driver cannot be interrupted."""
    found.unfinished = what
    found.write(plan.output)
    print(
        f"\nNOT HEALTHY: no end after {STUCK:.0f} s of: {what}. A device or a link hangs.\n"
        f"The report to attach: {plan.output}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
