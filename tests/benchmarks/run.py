"""Step times of ours and of its peers, which take turns in one run.

    python tests/benchmarks/run.py                            # the CPU, 4 replicas
    python tests/benchmarks/run.py --devices 2 --only transformer --quick
    python tests/benchmarks/run.py --device sim --virtual --devices 2 4 8 16

Each contestant is in processes of its own and waits on a pipe while others train; all have the
same batches, cores and steps to warm up. Printed are medians over rounds, the lowest and the
highest in brackets; ratios are taken within a round, since a busy machine slows all of a round. `to
one device` is the time over that of plain Lightning with all cores, `dp_custom to it` is ours over
the contestant's, and the loss after the warm-up shows whether all train the same.

On virtual time (simulated devices) nothing is measured: the times follow from the links and from
the speed of the devices. The model is `even_layers`, whose share of a device takes 100 ms; the
batch grows with the devices, and `efficiency` is the time of one share over that of the step.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.models import WORKLOADS, EvenLayers
from benchmarks.peers import PEERS, Job, Pace, why_not
from sim_devices.virtual_time import PRESETS

SETTLE = 0.05  # seconds between turns: OpenMP's threads spin for some milliseconds
SPEED = {"flops_per_second": EvenLayers.FLOPS / 0.1, "bytes_per_second": 0.9e12}


def train(job: Job, pipe: Connection) -> None:
    """Trains as the numbers from the pipe say; an error is the last answer."""
    sys.stdout = sys.stderr
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    try:
        if job.device == "sim":
            import sim_devices

            sim_devices.enable(max(8, job.devices))
        if job.links:
            torch.sim.set_links(job.links)
            for k in range(torch.sim.device_count()):
                torch.sim.set_speed(k, **SPEED)
        torch.manual_seed(0)
        PEERS[job.peer](job, Pace(job, pipe))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


class Contestant:
    """The processes of one contestant, which begin to import at once, and its step times."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: list[float] = []
        self.loss, self.memory, self.steps, self.failure = math.nan, 0.0, 0, ""
        several = job.peer in ("torch DDP", "one share")
        threads = max(1, job.cores // job.devices) if several else job.cores
        os.environ["OMP_NUM_THREADS"] = "1" if job.links else str(threads)  # of the children
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

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of each process."""
        found = [pipe.recv() for pipe in self._pipes]
        if failures := [answer for answer in found if isinstance(answer, str)]:
            raise EOFError(failures[0])
        return found

    def turn(self, steps: int) -> float:
        """Does some steps; returns the seconds of one of them."""
        for pipe in self._pipes:
            pipe.send(steps)
        found = self.answers()
        if math.isnan(self.loss):
            self.loss = statistics.fmean(answer["loss"] for answer in found)
        self.memory = max(answer["memory"] for answer in found)
        return max(answer["seconds"] for answer in found) / steps

    def close(self) -> None:
        """Ends the training, and the processes."""
        for pipe in self._pipes if not self.failure else ():
            pipe.send(None)
        for process in self._processes:
            process.join(0 if self.failure else 20)
            process.kill()


def hold(contestants: Sequence[Contestant], rounds: int, warm_up: int, seconds: float) -> None:
    """Lets all train in turns of about so many seconds; who fails is left out from then on."""
    there = list(contestants)

    def each(work: Callable[[Contestant], object]) -> None:
        for contestant in [*there]:
            try:
                work(contestant)
            except (EOFError, OSError) as error:  # its error, or its process is gone
                contestant.failure = str(error) or "its process has ended"
                there.remove(contestant)
            time.sleep(SETTLE)

    def begin(contestant: Contestant) -> None:
        contestant.turn(warm_up)
        contestant.steps = min(max(math.ceil(seconds / (contestant.turn(2) or 1)), 2), 500)

    try:
        each(Contestant.answers)  # all are ready before one trains
        each(begin)
        for _ in range(rounds):
            each(lambda c: c.seconds.append(c.turn(c.steps)))
            there[:] = [*there[1:], *there[:1]]  # each round begins with another one
    finally:
        for contestant in contestants:
            contestant.close()


RATIOS = (
    ("to one device", "one device", False),
    ("dp_custom to it", "dp_custom", True),
    ("efficiency", "one share", True),
)
"""Column, the contestant that each one is compared with, and whether its time is on top."""


def table(contestants: Sequence[Contestant]) -> Iterator[str]:
    """The lines for the terminal: medians with the lowest and the highest."""
    there = {c.job.peer: c for c in contestants if not c.failure}
    rows = [["", "ms", *(column for column, _, _ in RATIOS), "MiB", "loss"]]
    for c in contestants:
        if c.failure:
            rows.append([c.job.peer, f"failed: {c.failure}", *[""] * (len(RATIOS) + 2)])
            continue
        columns = [[1e3 * s for s in c.seconds]]
        for _, name, flip in RATIOS:
            pairs = zip(c.seconds, there[name].seconds if name in there else [], strict=False)
            columns.append([b / a if flip else a / b for a, b in pairs])
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
    for name in options.peers:
        devices = 1 if name == "one device" else job.devices
        own = dataclasses.replace(job, peer=name, devices=devices)
        if reason := why_not(name, own):
            print(f"without {name}: {reason}")
            continue
        if name == "dp_custom":
            given = {key: getattr(options, key) for key in ("split", "executor", "mode")}
            own = dataclasses.replace(own, options=given)
        contestants.append(Contestant(own))
    warm_up = options.warm_up or (4 if job.links else 40)
    hold(contestants, options.rounds, warm_up, 0 if job.links else 0.25 if options.quick else 0.5)
    samples = job.samples or WORKLOADS[job.model].samples
    print(f"{job.model}, {samples} samples, {job.devices} x {job.device}")
    print("\n".join(table(contestants)), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Holds the contests, one after another."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    models = [name for name in WORKLOADS if name != "even_layers"]
    add("--device", default="cpu", choices=("cpu", "sim", "cuda"))
    add("--devices", type=int, nargs="+", default=[4], metavar="K", help="how many; default 4")
    add("--only", nargs="+", default=models, choices=models, metavar="MODEL")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="PEER")
    add("--split", default="even", help="of ours")
    add("--executor", default="auto", help="of ours")
    add("--mode", default="step", choices=("step", "forward"), help="of ours")
    add("--samples", type=int, help="in a batch, instead of each model's own number")
    add("--cores", type=int, default=os.cpu_count(), help="of the CPU, for all devices together")
    add("--rounds", type=int, help="turns of each; 7, with --quick 3, on virtual time 1")
    add("--warm-up", type=int, help="steps before; 40, on virtual time 4")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--virtual", action="store_true", help="virtual time, on simulated devices")
    add("--links", default="pcie4_peer", choices=PRESETS, help="on virtual time")
    options = parser.parse_args(arguments)
    if options.virtual and options.device != "sim":
        parser.error("--virtual: expected --device sim, whose time can be computed")
    options.rounds = options.rounds or (1 if options.virtual else 3 if options.quick else 7)
    if options.virtual:
        options.executor, options.only = "threads", ["even_layers"]
    for model in options.only:
        for k in options.devices:
            samples = 2 * k if options.virtual else options.samples
            links = options.links if options.virtual else ""
            job = Job("", model, options.device, k, options.cores, samples, links=links)
            contest(job, options)


if __name__ == "__main__":
    main()
