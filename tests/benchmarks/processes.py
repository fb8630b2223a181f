"""Step times of ours in 1, 2 and 4 processes and of DDP.

    python tests/benchmarks/processes.py                     # some minutes
    python tests/benchmarks/processes.py --only transformer --quick --cores 2

Four CPU devices in one process, two in each of two, and one in each of four; torch's DDP and
Lightning's, of four processes over gloo. They take turns in one run, as in run.py, with the same
batches and cores, first as they are and then with the loss logged in each step, that of all
devices. Told are medians over rounds with their ranges, and ratios within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.arithmetic import Summary, ratios, summary
from benchmarks.contest import Entry, Rules, Turns, hold
from benchmarks.entries import PACKAGE
from benchmarks.job import Job
from benchmarks.machine import cores, load, machine
from benchmarks.models import WORKLOADS, workload

DEVICES = 4
OURS = {count: f"{count} x {DEVICES // count}" for count in (1, 2, 4)}
"""Processes, and their names: processes x devices."""

DDP, LIGHTNING, SHARE = "torch DDP", "Lightning ddp", "shares alone"

MODELS = ("convnet", "transformer", "language_model", "mlp")

LOGS = {"no": [False], "yes": [True], "both": [False, True]}


def contestants(job: Job) -> list[Entry]:
    """Ours in each number of processes, DDP's two, and all devices' shares, each by itself."""
    one = dataclasses.replace(job, peer="dp_custom")
    several = [
        Entry(name, dataclasses.replace(job, peer="dp_custom in processes", processes=count))
        for count, name in OURS.items()
        if count > 1
    ]
    others = [Entry(name, dataclasses.replace(job, peer=name), True) for name in (DDP, LIGHTNING)]
    # At once, as processes of one machine share its memory and its cores.
    shares = Entry(SHARE, dataclasses.replace(job, peer="one share"), True)
    return [Entry(OURS[1], one), *several, *others, shares]


def result(held: Mapping[str, Turns]) -> dict[str, Any]:
    """What was measured, and ratios within rounds."""
    there = {name: turns for name, turns in held.items() if not turns.failure}
    found: dict[str, Any] = {}
    for name, turns in held.items():
        own: dict[str, Any] = {"failure": turns.failure, "loss": turns.loss}
        if name in there:
            own["seconds"] = summary(turns.seconds)._asdict()
            for other in (DDP, LIGHTNING, OURS[1]):
                if other in there and name != SHARE:
                    own[f"to {other}"] = ratios(turns.seconds, there[other].seconds)._asdict()
        found[name] = own
    return found


HEADER = ("processes x devices", "ms per step", f"to {DDP}", f"to {LIGHTNING}", f"to {OURS[1]}")


def table(found: Mapping[str, Any]) -> list[str]:
    """The lines for the terminal."""
    rows = [(*HEADER, "loss")]
    for name, own in found.items():
        if own["failure"]:
            rows.append((name, f"failed: {own['failure']}", "", "", "", ""))
            continue
        texts = [_text(own.get(key)) for key in HEADER[2:]]
        rows.append((name, _text(own["seconds"], 1e3), *texts, f"{own['loss']:.6g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _text(value: Mapping[str, float] | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    middle, low, high = (x * scale for x in Summary(**value))
    return f"{middle:.3g} [{low:.3g} to {high:.3g}]"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--only", nargs="+", default=MODELS, choices=[*WORKLOADS], metavar="NAME")
    add("--samples", type=int, help="in a batch, instead of each model's own number")
    add("--cores", type=int, default=cores(), help="of the CPU, for all devices together")
    add("--rounds", type=int, help="turns of each contestant; 7, with --quick 3")
    add("--steps", type=int, help="of a turn, instead of as many as take half a second")
    add("--warm-up", type=int, default=40, help="steps before")
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--logs", choices=[*LOGS], default="both", help="whether each step logs its loss")
    add("--json", type=Path, metavar="FILE", help="all that was measured goes there")
    return parser.parse_args()


def main() -> None:
    """Holds the contests, one after another."""
    options = arguments()
    rounds = options.rounds or (3 if options.quick else 7)
    rules = Rules(rounds, options.warm_up, 0.25 if options.quick else 0.5, options.steps)
    about: dict[str, Any] = {"machine": machine(PACKAGE), "arguments": sys.argv[1:], "results": []}
    for model in options.only:
        for logs in LOGS[options.logs]:
            own = {"logs": True} if logs else {}
            job = Job("", model, "cpu", DEVICES, options.cores, options.samples, options=own)
            held = hold(contestants(job), rules, print)
            found = result(held)
            about["results"].append({"model": model, "logs": logs, "contestants": found})
            samples = options.samples or workload(model).samples
            what = "each step logs its loss" if logs else "nothing is logged"
            print(f"\n{model}, {samples} samples, {what}")
            print("\n".join(table(found)), flush=True)
    about["load_after"] = load()
    print(f"\n{options.cores} cores; load before {about['machine']['load']}, after {load()}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
