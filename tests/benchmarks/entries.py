"""Who takes part in the contest of a model and a number of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contest import Contestant, Entry
from benchmarks.job import Job
from benchmarks.models import workload
from benchmarks.peers import PEERS
from benchmarks.report import ONE, OURS

import lightning_dp

PACKAGE = Path(lightning_dp.__file__).resolve().parents[1]
CALIBRATION = 1e9
"""Operations per second with which the time of a step on virtual time is found."""


@dataclass(frozen=True)
class Ours:
    """Our own contestants: each of the splits with each executor and each mode."""

    splits: Sequence[str] = ("even",)
    executors: Sequence[str] = ("auto",)
    modes: Sequence[str] = ("step",)
    also: Sequence[Path] = ()  # folders with other versions of the package

    def options(self, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and options of the strategy; what is the same of all is not in the names."""
        splits = dict.fromkeys((*self.splits, *workload(model).splits))
        combined = itertools.product(splits, self.executors, self.modes)
        for i, (split, executor, mode) in enumerate(combined):
            options = {"split": split, "executor": executor, "mode": mode}
            first = (self.splits[0], self.executors[0], self.modes[0])
            others = [v for v, usual in zip(options.values(), first, strict=True) if v != usual]
            yield " ".join([OURS, *others]) if i else OURS, options


def entries(job: Job, peers: Sequence[str], ours: Ours) -> tuple[list[Entry], list[str]]:
    """Who can do a job, and why others cannot.

    Args:
        job: what is trained; the peer and the options in it do not count.
        peers: their names.
        ours: how ours take part.
    """
    found: list[Entry] = []
    why_not: list[str] = []
    for name in peers:
        peer = PEERS[name]
        own = replace(job, peer=name, options={})
        if reason := peer.why_not(own):
            why_not.append(f"{name}: {reason}")
        elif name == OURS:
            found += _ours(own, ours)
        else:
            own = replace(own, devices=1) if name == ONE else own
            found.append(Entry(name, own, peer.is_many, PACKAGE))
    return found, why_not


def _ours(job: Job, ours: Ours) -> Iterator[Entry]:
    for package in (PACKAGE, *ours.also):
        for name, options in ours.options(job.model):
            also = "" if package == PACKAGE else f" of {package.name}"
            yield Entry(name + also, replace(job, options=options), package=package)


def by_stage(job: Job, ours: Ours) -> Entry:
    """Ours, in the first of its ways, with a look at its stages; not for comparing times.

    Stages are what the host does, which takes time on the wall's clock alone.
    """
    name, options = next(ours.options(job.model))
    own = replace(job, peer=OURS, options={**options, "stages": True}, virtual=False)
    return Entry(name, own, package=PACKAGE)


def flops_for(job: Job, seconds_per_byte: float) -> float:
    """The speed of devices with which one computes so long for each byte of the model.

    That ratio decides what an overlap can gain. A ResNet-50 with 100 ms for a step has 1e-9.
    """
    one = Contestant(Entry(ONE, replace(job, peer=ONE, devices=1, flops=CALIBRATION)))
    try:
        one.wait_until_ready()
        one.train(3)
        seconds = one.train(1).seconds
        return CALIBRATION * seconds / (one.turns.parameter_bytes * seconds_per_byte)
    finally:
        one.close()
