"""The advice: what was timed, and what follows from it and from the machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_dp import DataParallelStrategy
from lightning_dp.doctor.ddp import DdpProcesses, NoDdpError, why_no_ddp
from lightning_dp.doctor.timing import (
    SECONDS,
    size_of_batches,
    timed,
    times_in_one_process,
    ways_in_one_process,
)
from lightning_dp.doctor.workloads import Workload
from lightning_dp.parallel.batch import infer_batch_size

DDP = "DDP"
STEPS_OF_DDP = 10  # that are counted: fewer than of the others, whose processes are here
LEAST_FOR_DDP = 4.0  # seconds that its processes need, once they have imported everything
NO_TIME = "no time was left"
CLEAR = 0.9  # of another time: what is less is faster, and no chance
WAYS = ("one device", "threads", "inorder", DDP)


@dataclass(frozen=True)
class Timing:
    """Step times of a workload.

    Args:
        workload: its name.
        samples: in each batch; None where nobody knows.
        seconds: per step, by the way it was run.
        why_not: for ways that were not timed, the reason.
    """

    workload: str
    samples: int | None
    seconds: Mapping[str, float]
    why_not: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As it is in the file."""
        return asdict(self)


def timings(
    workloads: Sequence[Workload],
    devices: Sequence[torch.device],
    folder: Path,
    processes: DdpProcesses | None,
    seconds_left: Callable[[], float],
    tell: Callable[[str], None] = lambda what: None,
) -> list[Timing]:
    """Times all workloads in all ways that there are, as long as there is time."""
    found = []
    shares = len(workloads) + (processes is not None)
    for i, workload in enumerate(workloads):
        tell(f"step times of {workload.name}")
        end = time.perf_counter() + seconds_left() / (shares - i)
        found.append(_timing(workload, devices, folder, partial(_until, end)))
    tell("step times of DDP")
    return _with_ddp(found, devices, processes, seconds_left() + LEAST_FOR_DDP)


def _until(end: float) -> float:
    return end - time.perf_counter()


def _timing(
    workload: Workload,
    devices: Sequence[torch.device],
    folder: Path,
    seconds_left: Callable[[], float],
) -> Timing:
    if seconds_left() <= 0:
        return Timing(workload.name, None, {}, {"all": NO_TIME})
    try:
        samples = size_of_batches(workload, devices, folder, seconds_left)
        batches = workload.batches(samples)
        times = times_in_one_process(workload, batches, devices, folder, seconds_left)
    except Exception as error:  # of the user's module, perhaps: the report goes on
        return Timing(workload.name, None, {}, {"all": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(ValueError):
        samples = infer_batch_size(batches[0], 0).size or 0
    left_out = ways_in_one_process(workload, devices).keys() - times.keys()
    return Timing(workload.name, samples, times, dict.fromkeys(sorted(left_out), NO_TIME))


def _with_ddp(
    found: Sequence[Timing],
    devices: Sequence[torch.device],
    processes: DdpProcesses | None,
    seconds: float,
) -> list[Timing]:
    has_time = processes is not None and seconds >= LEAST_FOR_DDP
    reason, times = why_no_ddp(devices) or ("" if has_time else NO_TIME), {}
    tasks = {
        timing.workload: {
            "samples": timing.samples or 0,
            "steps": max(3, min(STEPS_OF_DDP, int(SECONDS / timing.seconds["one device"]))),
        }
        for timing in found
        if timing.seconds
    }
    if not reason and processes is not None and tasks:
        try:
            times = processes.measure(tasks, seconds)
        except NoDdpError as error:
            reason = str(error)
    return [_joined(timing, times.get(timing.workload), reason) for timing in found]


def _joined(timing: Timing, seconds: float | None, reason: str) -> Timing:
    if not timing.seconds:
        return timing
    if seconds is None:
        return replace(timing, why_not={**timing.why_not, DDP: reason})
    return replace(timing, seconds={**timing.seconds, DDP: seconds})


def first_steps(
    workloads: Sequence[Workload],
    devices: Sequence[torch.device],
    folder: Path,
    seconds_left: Callable[[], float],
) -> list[str]:
    """Of the user's own modules: is a split batch's step that of one device, and if not, why."""
    told = []
    for workload in workloads:
        if workload.grows or len(devices) == 1:
            continue
        if seconds_left() <= 0:
            told.append(f"{workload.name}: {NO_TIME} for check_first_step=True; try it yourself")
            continue
        options = {**workload.strategy, "check_first_step": True}
        strategy = DataParallelStrategy(devices=devices, **options)
        try:
            timed(workload, workload.batches(0), strategy, devices, folder, steps=1)
            told.append(f"{workload.name}: {strategy.first_step}")
        except Exception as error:  # of the user's module
            told.append(f"{workload.name}: its step failed: {type(error).__name__}: {error}")
    return told


def advice(
    found: Sequence[Timing], devices: Sequence[torch.device], environment: Mapping[str, Any]
) -> list[str]:
    """What follows, one thought a line."""
    return [*_of_devices(devices, environment), *_of_times(found, devices)]


def _of_devices(devices: Sequence[torch.device], environment: Mapping[str, Any]) -> Iterator[str]:
    kind, distinct = devices[0].type, list(dict.fromkeys(devices))
    if len(devices) == 1:
        yield f"There is one device, {devices[0]}: dp_custom is plain Lightning there."
    cores = environment["machine"]["cores"]
    if kind == "cpu" and len(devices) > cores:
        yield f"{len(devices)} replicas share {cores} cores: take at most {cores}."
    if kind == "sim":
        yield (
            "Simulated devices share this machine's cores: these times show what the package "
            "costs, and say nothing of GPUs."
        )
    busy = environment["machine"]["load"]
    if busy > cores:
        yield (
            f"The machine is busy (load {busy:.0f} on {cores} cores): step times say little. Here "
            "each operation had one thread."
        )
    apart = [link for link in environment["links"] if link["peer_access"] is False]
    if apart:
        pairs = ", ".join(f"{link['source']} -> {link['target']}" for link in apart)
        yield (
            f"No peer access: {pairs}. Copies go through the host, so that models with many "
            "parameters gain less."
        )
    sizes = [
        entry["memory_bytes"]
        for entry in environment["devices"]
        if entry["memory_bytes"] and entry["device"] != "cpu"
    ]
    if len(distinct) > 1 and sizes and min(sizes) < CLEAR * max(sizes):
        yield "Memory is unequal: split='memory' makes room for the largest batch."
    names = {entry["name"] for entry in environment["devices"]}
    if kind == "cuda" and len(names) > 1:
        yield f"Devices are unequal ({', '.join(sorted(names))}): try split='adaptive'."


def _of_times(found: Sequence[Timing], devices: Sequence[torch.device]) -> Iterator[str]:
    for timing in found:
        if not timing.seconds:
            if timing.why_not["all"] != NO_TIME:  # of which the table tells
                yield f"{timing.workload}: nothing was timed: {timing.why_not['all']}"
        elif {"threads", "inorder"} & timing.seconds.keys() and devices[0].type != "sim":
            yield _of_time(timing, len(devices))


def _of_time(timing: Timing, count: int) -> str:
    times = timing.seconds
    own = min((way for way in ("threads", "inorder") if way in times), key=lambda way: times[way])
    share = times[own] / times["one device"]
    if share < CLEAR:
        text = f"dp_custom takes {share:.2f} of one device's time ({own}, as executor='auto' finds)"
        what = f"Trainer(strategy='dp_custom', devices={count})"
    else:
        text = f"dp_custom takes {share:.2f} times one device's time: no gain at this size"
        what = "one device, or larger batches"
    ddp = times.get(DDP)
    if ddp is not None and ddp < CLEAR * min(times[own], times["one device"]):
        what = f"strategy='ddp', which takes {ddp / times['one device']:.2f}, if processes are fine"
    return f"{timing.workload}: {text}. Take {what}."
