"""Efficiency against the number of devices, on virtual time: ours, its peers, and what links allow.

    python tests/benchmarks/scaling.py                      # 8 minutes of one core, 2 at once
    python tests/benchmarks/scaling.py --devices 2 4 --links pcie4_peer --figure scaling.svg
    python tests/benchmarks/scaling.py --devices 8 --links pcie4_peer --readings weak

The model has 101 MB of gradients and takes 100 ms per step, about as a ResNet-50 does. Under `weak`
that is what each device takes with its share, so that the batch grows with the devices; under
`strong` it is what one device takes with the whole batch, of which each of K has a K-th. Its layers
are equal in time and bytes. Batches themselves are small: what data cost on their way is left out.

`efficiency` is the time of one device's share, without anybody else, over that of the step. `at
least` is the bound of `least_seconds`, which no step with one optimizer can be faster than.

Nothing is measured: one run says what ten would. A step's time is that from the end of the one
before, when each is through with all that it has issued.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sim_devices
from benchmarks import figure
from benchmarks.contestant import quieten
from benchmarks.job import Job
from benchmarks.machine import cores
from benchmarks.nets import EvenLayers
from benchmarks.pace import Pace
from benchmarks.peers import PEERS
from benchmarks.report import OURS, SHARE
from sim_devices.links import PRESETS, Link

THEIRS, RING, BOUND = "nn.DataParallel", "DDP's ring", "at least"
CONTESTANTS = (OURS, THEIRS, RING)
READINGS = ("weak", "strong")
SECONDS = 0.1
"""Of a device's share, or of the whole batch on one device."""

BYTES_PER_SECOND = 0.9e12
"""Of a device's memory: what sums and the optimizer take."""

MOST = 16
"""Devices."""

SAMPLES, WARM_UP = 2, 2
"""Samples of a device, and steps before: replicas and their memory are made once."""


@dataclass(frozen=True)
class Case:
    """A machine, and how much each device has to do.

    Args:
        reading: one of `READINGS`.
        links: their name; None for copies that take no time.
        devices: how many.
    """

    reading: str
    links: str | None
    devices: int

    @property
    def seconds(self) -> float:
        """What a device's share takes to compute, forward and backward."""
        return SECONDS / (self.devices if self.reading == "strong" else 1)

    @property
    def alone(self) -> Case:
        """The same for one of the devices, with its share."""
        return replace(self, links=None)

    @property
    def machine(self) -> dict[str, Any]:
        """What a contestant is told."""
        flops = EvenLayers.flops() / self.seconds
        speed = {"flops_per_second": flops, "bytes_per_second": BYTES_PER_SECOND}
        return {"links": self.links, "speed": speed}


def least_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    sizes: Sequence[int],
    link: Link,
    rest: float = 0.0,
) -> float:
    """What a step takes at least that has one optimizer, however copies and compute overlap.

    The optimizer's step is a barrier, for it may need all gradients (to clip them by their norm,
    say). Between two of them each replica but the root's has to do this:

    1. Forward. No layer begins before its new parameters are there. All of them leave the root by
       one engine, and enter the replica by one. Of the layers up to l, some layer m comes last, not
       before `seconds + (bytes of the layers up to l) / rate`. Then the layers from m on are still
       to be computed, which are those from l on, at least. So for every l the forward ends after
       `seconds + (bytes up to l) / rate + (forward from l on)`.
    2. Backward. It goes from the last layer to the first. No gradient of the layers up to l is
       there before it has been through l; from then on all of theirs leave the replica by one
       engine, and enter the root by one: sums made on the way can be of all replicas, but a byte of
       the sum is a byte. So for every l the root has all sums after
       `(backward from the last layer to l) + (bytes up to l) / rate + seconds`.
    3. The optimizer's step, and whatever else takes time between the two.

    The bound is the sum of the three, each at its worst l. With l = 1 it says what no overlap can
    hide: the way of the first layer's parameters to a replica, and of its gradient to the root.
    With the last l it says that links may be slower than compute: all parameters have to cross in
    the time of the forward, and all gradients in that of the backward. How many replicas there are
    does not matter. A way from replica to replica takes longer by a bucket per replica, which the
    bound leaves out since buckets may be small.

    Args:
        forward: of each layer, the seconds of its forward on a device.
        backward: the same for its backward.
        sizes: of each layer, the bytes of its parameters, and of its gradients.
        link: between two devices, in each direction.
        rest: the seconds of the optimizer's step, and of what else no copy can overlap.

    Example:
        >>> least_seconds([1.0, 1.0], [2.0, 2.0], [3, 3], Link(bytes_per_second=3, seconds=0))
        8.0
        >>> least_seconds([1.0, 1.0], [2.0, 2.0], [30, 30], Link(bytes_per_second=3, seconds=0))
        43.0
    """
    crossing = [link.seconds + size / link.bytes_per_second for size in accumulate(sizes)]

    def last(seconds: Sequence[float]) -> float:
        computing = list(accumulate(reversed(seconds)))[::-1]  # from each layer on
        return max(a + b for a, b in zip(computing, crossing, strict=True))

    return last(forward) + last(backward) + rest


def link_between_devices(links: str) -> Link:
    """The way between two devices: their own, or through the CPU's memory, in pieces."""
    found = PRESETS[links]
    return found.peer or Link(found.host.bytes_per_second, 2 * found.host.seconds)


def bound(case: Case, share: float) -> float:
    """The bound of a case, in which a device takes `share` for its share alone."""
    with torch.device("meta"):
        model = EvenLayers()
    sizes = [4 * sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    updated = 3 * 4 * sum(p.numel() for p in model.parameters())  # read, with gradients, written
    update = updated / BYTES_PER_SECOND
    each = (share - update) / 3 / len(sizes)
    return least_seconds(
        [each] * len(sizes),
        [2 * each] * len(sizes),
        sizes,
        link_between_devices(str(case.links)),
        rest=update,
    )


def steps(peer: str, cases: Sequence[Case], devices: int) -> list[float]:
    """What a contestant takes for a step, case by case."""
    sim_devices.enable(MOST)
    options = {"executor": "threads", "split": "even"} if peer == OURS else {}
    job = Job(peer, "even_layers", "sim", devices, 1, SAMPLES * devices, True, options=options)
    warm_up = {"steps": WARM_UP, **cases[0].machine}
    commands = [warm_up, *({"steps": 2, **case.machine} for case in cases)]
    told, answers = io.StringIO("\n".join(map(json.dumps, commands))), io.StringIO()
    torch.manual_seed(0)
    PEERS[peer].train(job, Pace(job, told, answers))
    gc.collect()  # the next one needs the memory
    ends = [json.loads(line)["ends"] for line in answers.getvalue().splitlines()[2:]]
    return [second - first for first, second in ends]


def _begin(threads: int, depth: int) -> None:
    EvenLayers.DEPTH = depth
    quieten()
    torch.set_num_threads(threads)


def measure(
    readings: Sequence[str], links: Sequence[str], counts: Sequence[int], processes: int
) -> list[dict[str, Any]]:
    """All cases: what each contestant takes, and what follows."""
    cases = [Case(*values) for values in product(readings, links, counts)]
    alone = list(dict.fromkeys(case.alone for case in cases))
    work: dict[tuple[str, int], list[Case]] = {}
    for count, peer in product(sorted(counts, reverse=True), CONTESTANTS):  # the longest ones first
        work[peer, count] = [case for case in cases if case.devices == count]
    work[SHARE, 2] = alone
    threads = max(1, cores() // processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (threads, EvenLayers.DEPTH)) as pool:
        jobs = {(peer, k): pool.submit(steps, peer, own, k) for (peer, k), own in work.items()}
        found = {
            (key[0], case): seconds
            for key, own in work.items()
            for case, seconds in zip(own, jobs[key].result(), strict=True)
        }
    return [
        result(case, {name: found[name, case] for name in CONTESTANTS}, found[SHARE, case.alone])
        for case in cases
    ]


def result(case: Case, seconds: Mapping[str, float], share: float) -> dict[str, Any]:
    """What is kept of a case, as `figure.draw` takes it.

    Args:
        case: which.
        seconds: what each contestant takes for a step.
        share: what a device takes for its share alone.
    """
    contestants = {
        name: {"seconds": s, "efficiency": dict.fromkeys(("median", "low", "high"), share / s)}
        for name, s in (seconds | {BOUND: bound(case, share)}).items()
    }
    about = {"reading": case.reading, "links": case.links, "devices": case.devices}
    model = f"{case.reading}, {case.links}"
    return {**about, "model": model, "device": "sim", "share": share, "contestants": contestants}


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines for the terminal."""
    names = (*CONTESTANTS, BOUND)
    ways = (*(f"to {name}" for name in (THEIRS, RING)), "of the bound")
    for model in dict.fromkeys(found["model"] for found in results):
        yield f"{model}: ms per step, efficiency of each, then times of {OURS} to those of others"
        yield "".join(["   K   share", *(f"{n:>17}" for n in names), *(f"{w:>20}" for w in ways)])
        for found in (found for found in results if found["model"] == model):
            own = {name: found["contestants"][name] for name in names}
            ours = own[OURS]["seconds"]
            times = [
                f"{o['seconds'] * 1e3:9.2f}  {o['efficiency']['median']:6.3f}" for o in own.values()
            ]
            ratios = [ours / own[THEIRS]["seconds"], ours / own[RING]["seconds"]]
            ratios.append(own[BOUND]["seconds"] / ours)
            line = [f"{found['devices']:4}{found['share'] * 1e3:8.2f}", *times]
            yield "".join([*line, *(f"{ratio:20.3f}" for ratio in ratios)])
        yield ""


def main() -> None:
    """Runs all cases, and prints what came of it."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[2, 4, 8, 16], metavar="K")
    add("--links", nargs="+", default=["pcie4_peer", "pcie4", "nvlink4"], choices=PRESETS)
    add("--readings", nargs="+", default=list(READINGS), choices=READINGS)
    add("--depth", type=int, default=EvenLayers.DEPTH, help="layers of 4.2 MB; fewer are faster")
    add("--processes", type=int, default=2, help="at once; one of 16 devices takes 7 GB")
    add("--json", type=Path, metavar="FILE", help="all that came of it goes there")
    add("--figure", type=Path, metavar="FILE", help="efficiency as a picture, PNG or SVG")
    options = parser.parse_args()
    if not all(2 <= count <= MOST for count in options.devices):
        parser.error(f"--devices: expected 2 to {MOST}, got {options.devices}")
    EvenLayers.DEPTH = options.depth
    found = measure(options.readings, options.links, options.devices, options.processes)
    print("\n".join(table(found)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"results": found}, indent=1), encoding="utf-8")
    if options.figure:
        figure.draw(found, options.figure)


if __name__ == "__main__":
    main()
