"""Step times of ours and of its peers, which take turns in one run.

    python tests/benchmarks/run.py                           # the CPU, 4 replicas: ten minutes
    python tests/benchmarks/run.py --only transformer --quick
    python tests/benchmarks/run.py --devices 1 2 4 --json speed.json --figure speed.svg
    python tests/benchmarks/run.py --device sim --virtual --devices 2 4 8 16
    python tests/benchmarks/run.py --executor auto threads inorder --peers "one device" dp_custom

Each contestant is in processes of its own and waits while others train. Each has the same batches,
the same cores in all, and the same steps to warm up. Told are medians over rounds, and the lowest
and the highest in brackets; ratios are taken within a round. `to one device` is a contestant's time
over that of plain Lightning with all cores, `dp_custom to it` is ours over the contestant's.
`overhead` is the time beyond that of one device alone with its share of the batch and of the cores.
The loss after the warm-up shows whether all train the same.

On virtual time (simulated devices) nothing is measured: the times follow from the links and from
the speed of the devices, which is such that one device computes `--seconds-per-byte` for each byte
of the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import figure, report
from benchmarks.contest import Entry, Rules, hold
from benchmarks.entries import PACKAGE, Ours, by_stage, entries, flops_for
from benchmarks.job import Job
from benchmarks.machine import cores, load, machine
from benchmarks.models import WORKLOADS
from benchmarks.peers import PEERS
from sim_devices.links import PRESETS


def arguments() -> argparse.Namespace:
    """What the command line says."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "sim", "cuda"))
    add("--devices", type=int, nargs="+", default=[4], metavar="K", help="how many; default 4")
    add("--only", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, metavar="NAME")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="PEER")
    add("--split", nargs="+", default=["even"], help="of ours")
    add("--executor", nargs="+", help="of ours; auto, on virtual time threads")
    add("--mode", nargs="+", default=["step"], choices=("step", "forward"), help="of ours")
    add("--also", type=Path, nargs="+", default=[], metavar="FOLDER", help="other versions of ours")
    add("--samples", type=int, help="in a batch, instead of each model's own number")
    add("--cores", type=int, default=cores(), help="of the CPU, for all devices together")
    add("--rounds", type=int, help="turns of each contestant; 7, with --quick 3")
    add("--steps", type=int, help="of a turn, instead of as many as take half a second")
    add("--warm-up", type=int, help="steps before; 40, on virtual time 4")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--virtual", action="store_true", help="virtual time, on simulated devices")
    add("--links", default="pcie4_peer", choices=PRESETS, help="on virtual time")
    add("--seconds-per-byte", type=float, default=1e-9, help="on virtual time; see above")
    add("--breakdown", action="store_true", help="also a step of ours by stage")
    add("--timeline", type=Path, metavar="FOLDER", help="a step of each contestant goes there")
    add("--json", type=Path, metavar="FILE", help="all that was measured goes there")
    add("--figure", type=Path, metavar="FILE", help="efficiency as a picture, PNG or SVG")
    options = parser.parse_args()
    if options.virtual and options.device != "sim":
        parser.error("--virtual: expected --device sim, whose time can be computed")
    if min(options.devices) < 1:
        parser.error(f"--devices: expected at least 1, got {min(options.devices)}")
    return options


def rules(options: argparse.Namespace, traces: dict[str, str]) -> Rules:
    """How long and how often; on virtual time every turn takes the same."""
    if options.virtual:
        return Rules(1, options.warm_up or 4, steps=options.steps or 2, traces=traces)
    rounds = options.rounds or (3 if options.quick else 7)
    seconds = 0.25 if options.quick else 0.5
    return Rules(rounds, options.warm_up or 40, seconds, options.steps, traces)


def trace(folder: Path, entry: Entry) -> str:
    """The file of a contestant's timeline."""
    name = "".join(c if c.isalnum() else "_" for c in entry.name)
    file = folder.resolve() / f"{entry.job.model}-{entry.job.devices}-{name}.json"
    return str(file)


def contest(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Holds one, and prints what came of it."""
    executors = options.executor or ["threads" if options.virtual else "auto"]
    ours = Ours(options.split, executors, options.mode, [path.resolve() for path in options.also])
    found, why_not = entries(job, options.peers, ours)
    for reason in why_not:
        print(f"without {reason}")
    traces = {entry.name: trace(options.timeline, entry) for entry in found if options.timeline}
    turns = hold(found, rules(options, traces), print)
    samples = job.samples or WORKLOADS[job.model].samples
    about = WORKLOADS[job.model].about
    result = report.result(job.model, about, job.device, job.devices, samples, turns)
    print("\n".join([*report.table(result), *report.other_losses(result)]))
    if options.breakdown:
        entry = by_stage(job, ours)
        ((name, own),) = hold([entry], rules(options, {}), print).items()
        result["stages"] = own.last.stages if own.last else {}
        print("\n".join(report.stages(name, own)))
    print(flush=True)
    return result


def main() -> None:
    """Holds the contests, one after another."""
    options = arguments()
    about: dict[str, Any] = {"machine": machine(PACKAGE), "arguments": sys.argv[1:], "results": []}
    start = time.monotonic()
    for model in options.only:
        job = Job("", model, options.device, 1, options.cores, options.samples)
        if options.virtual:
            job = job.on_virtual_time(options.links, 0.0)
            job = job.on_virtual_time(options.links, flops_for(job, options.seconds_per_byte))
        for k in options.devices:
            about["results"].append(contest(options, job.with_devices(k)))
            about["load_after"], about["seconds"] = load(), time.monotonic() - start
            write(about, options)  # each time: a long run may be interrupted
    print(f"load before {about['machine']['load']}, after {about['load_after']}")


def write(about: dict[str, Any], options: argparse.Namespace) -> None:
    """What there is so far, as a file and as a picture."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about, indent=1), encoding="utf-8")
    if options.figure and figure.curves(about["results"]):
        figure.draw(about["results"], options.figure)


if __name__ == "__main__":
    main()
