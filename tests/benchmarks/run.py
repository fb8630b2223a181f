"""Step times of ours and of its peers, which take turns in one run.

    python tests/benchmarks/run.py                            # the CPU, 4 replicas
    python tests/benchmarks/run.py --devices 2 --only transformer --quick
    python tests/benchmarks/run.py --device sim --virtual --devices 2 4 8 16
    python tests/benchmarks/run.py --device sim --virtual --only language_model transformer

Each contestant is in processes of its own and waits on a pipe while others train; all have the
same batches, cores and steps to warm up. Printed are medians over rounds, the lowest and the
highest in brackets; ratios are taken within a round, since a busy machine slows all of a round. `to
one device` is the time over that of plain Lightning with all cores, `dp_custom to it` is ours over
the contestant's, and the loss after the warm-up shows whether all train the same.

On virtual time (simulated devices) nothing is measured: the times follow from the links and from
the speed of the devices. Of `even_layers` each device has a share that takes it 100 ms;
`efficiency` is the time of one share over that of the step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sim_devices
from benchmarks.models import WORKLOADS
from benchmarks.peers import CANNOT, PEERS, Job, Pace

SETTLE = 0.05  # seconds between turns: OpenMP's threads spin for some milliseconds
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train(job: Job, pipe: Connection) -> None:
    """Trains as the numbers from the pipe say; an error is the last answer."""
    sys.stdout = sys.stderr
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if job.device == "sim":
            sim_devices.enable(max(8, job.devices))
        if job.is_virtual:
            torch.sim.set_links("pcie4_peer")
            memory = 0.9e12 if job.model == "even_layers" else math.inf
            rates = {"flops_per_second": WORKLOADS[job.model].rate, "bytes_per_second": memory}
            for k in range(torch.sim.device_count()):
                torch.sim.set_speed(k, **rates)
        torch.manual_seed(0)
        PEERS[job.peer](job, Pace(job, pipe))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


class Contestant:
    """The processes of one contestant, which begin to import at once, and its step times."""

    def __init__(self, job: Job) -> None:
        self.job, self.seconds = job, list[float]()
        self.loss, self.memory = math.nan, 0.0  # after the warm-up; of the last turn
        shares = job.devices if job.peer in ("torch DDP", "one share") else 1
        threads = 1 if job.is_virtual else max(1, CORES // shares)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the children
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            master = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(job.devices if job.peer == "torch DDP" else 1):
            here, there = spawn.Pipe()
            own = dataclasses.replace(job, master=master, rank=rank)
            self._processes.append(spawn.Process(target=train, args=(own, there), daemon=True))
            self._processes[-1].start()
            there.close()  # so that the end of the process is seen
            self._pipes.append(here)

    def answers(self) -> list[dict[str, float]]:
        """The next answer of each process."""
        found: list[Any] = [pipe.recv() for pipe in self._pipes]
        if failures := [answer for answer in found if isinstance(answer, str)]:
            raise SystemExit(f"{self.job.peer}: {failures[0]}")
        return found

    def turn(self, steps: int) -> dict[str, float]:
        """Does some steps; of all processes the longest time, the most memory, the mean loss."""
        for pipe in self._pipes:
            pipe.send(steps)
        found = self.answers()
        most = {key: max(answer[key] for answer in found) for key in ("seconds", "memory")}
        return {**most, "loss": statistics.fmean(answer["loss"] for answer in found)}

    def close(self) -> None:
        """Ends the training, and the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its process has ended
                pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


def hold(contestants: Sequence[Contestant], rounds: int, warm_up: int, seconds: float) -> None:
    """Lets all train in turns of about so many seconds; each round begins with another one."""
    turns = collections.deque(contestants)
    steps: dict[str, int] = {}
    try:
        for c in contestants:
            c.answers()  # all are ready before one trains
        for c in contestants:
            c.loss = c.turn(warm_up)["loss"]
            steps[c.job.peer] = 4
            if seconds:
                steps[c.job.peer] = min(max(math.ceil(seconds / c.turn(2)["seconds"]), 2), 500)
        for _ in range(rounds):
            for c in turns:
                time.sleep(SETTLE)
                found = c.turn(steps[c.job.peer])
                c.seconds.append(found["seconds"])
                c.memory = found["memory"]
            turns.rotate(-1)
    finally:
        for c in contestants:
            c.close()


def table(contestants: Sequence[Contestant]) -> Iterator[str]:
    """The lines for the terminal: medians with the lowest and the highest."""
    of = {**dict.fromkeys(PEERS, ()), **{c.job.peer: c.seconds for c in contestants}}
    rows = [["", "ms", "to one device", "dp_custom to it", "efficiency", "MiB", "loss"]]
    for c in contestants:
        columns = [[1e3 * own for own in c.seconds]]
        columns += [[own / one for own, one in zip(c.seconds, of["one device"], strict=False)]]
        for peer in ("dp_custom", "one share"):
            columns += [[one / own for one, own in zip(of[peer], c.seconds, strict=False)]]
        texts = [
            f"{statistics.median(v):.4g} [{min(v):.3g} to {max(v):.3g}]" if v else "-"
            for v in columns
        ]
        rows.append([c.job.peer, *texts, f"{c.memory / 2**20:.0f}", f"{c.loss:.5g}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def contest(job: Job, options: argparse.Namespace) -> None:
    """Holds one for a model and a number of devices, and prints its table."""
    contestants: list[Contestant] = []
    for name in options.peers or PEERS:
        if (name, job.device) not in CANNOT:
            devices = 1 if name == "one device" else job.devices
            contestants.append(Contestant(dataclasses.replace(job, peer=name, devices=devices)))
    quick = (3, 10, 0.25) if options.quick else (7, 40, 0.5)
    hold(contestants, *((1, 4, 0.0) if job.is_virtual else quick))
    print(f"{job.model}, {job.samples} samples, {job.devices} x {job.device}")
    print("\n".join(table(contestants)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "sim", "cuda"))
    add("--devices", type=int, nargs="+", default=[4], metavar="K", help="how many; default 4")
    add("--only", nargs="+", choices=WORKLOADS, metavar="MODEL")
    add("--peers", nargs="+", choices=PEERS, metavar="PEER")
    add("--split", default="even", help="of ours")
    add("--executor", default="auto", help="of ours; on virtual time threads")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--virtual", action="store_true", help="virtual time, on devices of the kind sim")
    options = parser.parse_args()
    ours = {"split": options.split, "executor": "threads" if options.virtual else options.executor}
    models = [name for name in WORKLOADS if (name == "even_layers") == options.virtual]
    for model in options.only or models:
        for k in options.devices:
            samples = 2 * k if model == "even_layers" else WORKLOADS[model].samples
            contest(Job("", model, options.device, k, samples, ours, options.virtual), options)


if __name__ == "__main__":
    main()
