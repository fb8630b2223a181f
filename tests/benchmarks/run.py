"""Step times of ours and of its peers, which take turns in one run.

    python tests/benchmarks/run.py                            # the CPU, 4 replicas
    python tests/benchmarks/run.py --devices 2 --only transformer --quick
    python tests/benchmarks/run.py --device sim --virtual --devices 2 4 8 16 --only even_layers

Each contestant is in processes of its own and waits on a pipe while others train; all have the
same batches, cores and steps to warm up. Printed are medians over rounds, the lowest and the
highest in brackets; ratios are taken within a round, since a busy machine slows all of a round. `to
one device` is the time over that of plain Lightning with all cores, `dp_custom to it` is ours over
the contestant's, and the loss after the warm-up shows whether all train the same.

On virtual time (simulated devices) nothing is measured: the times follow from the links and from
the speed of the devices. One device computes `--seconds-per-byte` for each byte of the model (1e-9:
about a ResNet-50 that takes 100 ms). `even_layers` is such a model; its batch grows with the
devices, and `efficiency` is the time of one device's share over that of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.models import WORKLOADS, EvenLayers
from benchmarks.peers import PEERS, Job, Pace, why_not
from sim_devices.virtual_time import PRESETS

TESTS = Path(__file__).resolve().parents[1]
SETTLE = 0.05  # seconds between turns: OpenMP's threads spin for some milliseconds
BYTES_PER_SECOND = 0.9e12  # of a simulated device's memory


class ContestantError(Exception):
    """A contestant has ended, or does not answer."""


class Contestant:
    """The processes of one contestant, which begin to import at once, and its step times.

    Args:
        name: in the table.
        job: what it does.
    """

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job = name, job
        self.seconds: list[float] = []
        self.loss, self.memory, self.steps, self.failure = math.nan, 0.0, 0, ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `close` closes it
        count = job.devices if job.peer == "torch DDP" else 1
        shares = job.devices if job.peer == "one share" else count
        threads = "1" if job.machine else str(max(1, job.cores // shares))
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(count)}
        command = [sys.executable, __file__, "--child", json.dumps(dataclasses.asdict(job))]
        self._processes = [
            subprocess.Popen(
                command,
                env={**environment, **({**group, "RANK": str(rank)} if count > 1 else {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for rank in range(count)
        ]

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of each process.

        Raises:
            ContestantError: one has ended.
        """
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(lines):
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["it said nothing"]
            raise ContestantError([line for line in said if "Error" in line or line][-1].strip())
        return [json.loads(line) for line in lines]

    def train(self, steps: int) -> float:
        """Does a turn of some steps; returns the seconds of one of them."""
        for process in self._processes:
            with contextlib.suppress(OSError):  # it has ended: the missing answer says so
                print(steps, file=process.stdin, flush=True)
        found = self.answers()
        if math.isnan(self.loss):
            self.loss = statistics.fmean(answer["loss"] for answer in found)
        self.memory = max(answer["memory"] for answer in found)
        return max(answer["seconds"] for answer in found) / steps

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.communicate(timeout=20)
            process.kill()
            process.wait()
        self._errors.close()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def hold(contestants: Sequence[Contestant], rounds: int, warm_up: int, seconds: float) -> None:
    """Lets all train in turns of about so many seconds; who fails is left out from then on."""
    there = list(contestants)

    def each(work: Callable[[Contestant], object]) -> None:
        for contestant in [*there]:
            try:
                work(contestant)
            except ContestantError as error:
                contestant.failure = str(error)
                there.remove(contestant)
            time.sleep(SETTLE)

    def begin(contestant: Contestant) -> None:
        contestant.train(warm_up)
        step = contestant.train(2)
        contestant.steps = 2 if not step else min(max(math.ceil(seconds / step), 2), 500)

    try:
        each(Contestant.answers)  # all are ready before one trains
        each(begin)
        for _ in range(rounds):
            each(lambda c: c.seconds.append(c.train(c.steps)))
            there[:] = [*there[1:], *there[:1]]  # each round begins with another one
    finally:
        for contestant in contestants:
            contestant.close()


def report(contestants: Sequence[Contestant]) -> dict[str, dict[str, Any]]:
    """Of each contestant its loss, memory, and median, low and high of times and of ratios."""
    by_name = {c.name: c for c in contestants if not c.failure}
    found: dict[str, dict[str, Any]] = {}
    for c in contestants:
        found[c.name] = own = {"failure": c.failure, "loss": c.loss, "MiB": c.memory / 2**20}
        if c.failure:
            continue
        own["ms"] = _summary([1e3 * s for s in c.seconds])
        for key, name, flip in (
            ("to one device", "one device", False),
            ("dp_custom to it", "dp_custom", True),
            ("efficiency", "one share", True),
        ):
            if name in by_name:
                pairs = zip(c.seconds, by_name[name].seconds, strict=True)
                own[key] = _summary([b / a if flip else a / b for a, b in pairs])
    return found


def _summary(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines for the terminal."""
    columns = ["ms", "to one device", "dp_custom to it", "efficiency"]
    rows = [["", *columns, "MiB", "loss"]]
    for name, own in found.items():
        if own["failure"]:
            rows.append([name, f"failed: {own['failure']}", *[""] * (len(columns) + 1)])
            continue
        texts = [
            "-" if c not in own else "{:.4g} [{:.3g} to {:.3g}]".format(*own[c]) for c in columns
        ]
        rows.append([name, *texts, f"{own['MiB']:.0f}", f"{own['loss']:.5g}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def contest(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Holds one for a model and a number of devices, and prints its table."""
    contestants: list[Contestant] = []
    for name in options.peers:
        own = dataclasses.replace(
            job, peer=name, devices=1 if name == "one device" else job.devices
        )
        if reason := why_not(name, own):
            print(f"without {name}: {reason}")
            continue
        if name == "dp_custom":
            given = {key: getattr(options, key) for key in ("split", "executor", "mode")}
            own = dataclasses.replace(own, options=given)
        contestants.append(Contestant(name, own))
    is_virtual = bool(job.machine)
    warm_up, rounds = options.warm_up or (4 if is_virtual else 40), options.rounds
    hold(contestants, rounds, warm_up, 0.0 if is_virtual else 0.25 if options.quick else 0.5)
    found = report(contestants)
    samples = job.samples or WORKLOADS[job.model].samples
    print(f"{job.model}, {samples} samples, {job.devices} x {job.device}")
    print("\n".join(table(found)), flush=True)
    return {"model": job.model, "devices": job.devices, "contestants": found}


def on_virtual_time(job: Job, links: str, seconds_per_byte: float) -> Job:
    """The job on devices so fast that one computes so many seconds for each byte of the model."""
    speed = {"flops_per_second": EvenLayers.FLOPS / 0.1, "bytes_per_second": BYTES_PER_SECOND}
    if job.model != "even_layers":
        trial = {"links": None, "speed": {"flops_per_second": 1e9}}
        one = Contestant("", dataclasses.replace(job, peer="one device", devices=1, machine=trial))
        try:
            (ready,) = one.answers()
            one.train(3)
            speed = {"flops_per_second": one.train(2) * 1e9 / (ready["bytes"] * seconds_per_byte)}
        finally:
            one.close()
    return dataclasses.replace(job, machine={"links": links, "speed": speed})


def child(job: Job) -> None:
    """Trains as the commands on the standard input say; other people's prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    if job.device == "sim":
        import sim_devices

        sim_devices.enable(max(8, job.devices))
        for k in range(torch.sim.device_count()) if job.machine else ():
            torch.sim.set_speed(k, **job.machine["speed"])
        if job.machine:
            torch.sim.set_links(job.machine["links"])
    torch.manual_seed(0)
    PEERS[job.peer](job, Pace(job, sys.stdin, answers))


def main(arguments: Sequence[str] | None = None) -> None:
    """Holds the contests, one after another."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    models = [name for name in WORKLOADS if name != "even_layers"]
    add("--child", help=argparse.SUPPRESS)
    add("--device", default="cpu", choices=("cpu", "sim", "cuda"))
    add("--devices", type=int, nargs="+", default=[4], metavar="K", help="how many; default 4")
    add("--only", nargs="+", default=models, choices=WORKLOADS, metavar="MODEL")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="PEER")
    add("--split", default="even", help="of ours")
    add("--executor", default="auto", help="of ours")
    add("--mode", default="step", choices=("step", "forward"), help="of ours")
    add("--samples", type=int, help="in a batch, instead of each model's own number")
    add("--cores", type=int, default=cores, help="of the CPU, for all devices together")
    add("--rounds", type=int, help="turns of each; 7, with --quick 3, on virtual time 1")
    add("--warm-up", type=int, help="steps before; 40, on virtual time 4")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--virtual", action="store_true", help="virtual time, on simulated devices")
    add("--links", default="pcie4_peer", choices=PRESETS, help="on virtual time")
    add("--seconds-per-byte", type=float, default=1e-9, help="on virtual time")
    add("--json", type=Path, metavar="FILE", help="all that was measured goes there")
    options = parser.parse_args(arguments)
    if options.child:
        return child(Job(**json.loads(options.child)))
    if options.virtual and options.device != "sim":
        parser.error("--virtual: expected --device sim, whose time can be computed")
    options.rounds = options.rounds or (1 if options.virtual else 3 if options.quick else 7)
    options.executor = "threads" if options.virtual else options.executor
    results = []
    for model in options.only:
        job = Job("", model, options.device, 1, options.cores, options.samples)
        if options.virtual:
            job = on_virtual_time(job, options.links, options.seconds_per_byte)
        for k in options.devices:
            samples = 2 * k if model == "even_layers" else options.samples
            results.append(contest(dataclasses.replace(job, devices=k, samples=samples), options))
            if options.json:  # each time: a long run may be interrupted
                about = {"torch": torch.__version__, "cores": cores, "load": os.getloadavg()}
                options.json.write_text(json.dumps({**about, "results": results}, indent=1))
    return None


if __name__ == "__main__":
    main()
