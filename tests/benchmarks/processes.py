"""Step times of ours in 1, 2 and 4 processes and of DDP, and what the forecast says of them.

    python tests/benchmarks/processes.py                     # some minutes
    python tests/benchmarks/processes.py --only transformer --quick --cores 2

Four CPU devices in one process, two in each of two, and one in each of four; torch's DDP and
Lightning's, of four processes over gloo. They take turns in one run, as in run.py, with the same
batches and cores, first as they are and then with the loss logged in each step, that of all
devices. Told are medians over rounds with their ranges, and ratios within a round.

The forecast knows the step of one process, the time of a device's share of the batch and of the
cores while all other devices compute theirs, without a word between them, and what sums over gloo
take between processes that do nothing else. It is that of `python -m lightning_dp plan`, of
processes in place of machines.
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
from benchmarks.messages import measured_link
from benchmarks.models import WORKLOADS, workload

from lightning_dp.app.plan.options import LOCAL
from lightning_dp.forecast import Cluster, Link, job_of, ours
from lightning_dp.forecast import Job as Forecast

DEVICES = 4
OURS = {count: f"{count} x {DEVICES // count}" for count in (1, 2, 4)}
"""Processes, and their names: processes x devices."""

DDP, LIGHTNING, SHARE = "torch DDP", "Lightning ddp", "shares alone"
GATHERS = 4
"""What a step tells once round all processes: a loss in two messages; a sum goes round twice."""

MODELS = ("convnet", "transformer", "language_model", "mlp")

LOGS = {"no": [False], "yes": [True], "both": [False, True]}


def contestants(job: Job) -> list[Entry]:
    """Ours in each number of processes, DDP's two, and all devices' shares for the forecast."""
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


def forecasts(held: Mapping[str, Turns], links: Mapping[int, Link]) -> dict[str, float]:
    """What the forecast says of several processes, by what was measured of one."""
    one, share = held[OURS[1]], held[SHARE]
    if one.failure or share.failure:
        return {}
    before = Cluster(
        machines=1,
        devices=DEVICES,
        local=LOCAL["memory"],
        network=links[2],
        overlaps=False,
        refreshes=False,
        reduces="ring",
        exchanges=GATHERS,
    )
    step = summary(one.seconds).median
    known = Forecast(compute=0.0, size=one.parameter_bytes)
    job = job_of(step, known, before, min(step, summary(share.seconds).median))
    return {
        OURS[count]: ours(job, _shared_out(before, count, link), before).seconds
        for count, link in links.items()
    }


def _shared_out(before: Cluster, count: int, link: Link) -> Cluster:
    devices = before.devices // count
    return dataclasses.replace(before, machines=count, devices=devices, network=link)


def result(held: Mapping[str, Turns], told: Mapping[str, float]) -> dict[str, Any]:
    """What was measured and forecast, and ratios within rounds."""
    there = {name: turns for name, turns in held.items() if not turns.failure}
    found: dict[str, Any] = {}
    for name, turns in held.items():
        own: dict[str, Any] = {"failure": turns.failure, "loss": turns.loss}
        if name in there:
            own["seconds"] = summary(turns.seconds)._asdict()
            for other in (DDP, LIGHTNING, OURS[1]):
                if other in there and name != SHARE:
                    own[f"to {other}"] = ratios(turns.seconds, there[other].seconds)._asdict()
        if name in told:
            own["forecast"] = told[name]
        found[name] = own
    return found


HEADER = ("processes x devices", "ms per step", f"to {DDP}", f"to {LIGHTNING}", f"to {OURS[1]}")


def table(found: Mapping[str, Any]) -> list[str]:
    """The lines for the terminal."""
    rows = [(*HEADER, "forecast", "loss")]
    for name, own in found.items():
        if own["failure"]:
            rows.append((name, f"failed: {own['failure']}", "", "", "", "", ""))
            continue
        forecast = f"{own['forecast'] * 1e3:.3g}" if "forecast" in own else "-"
        texts = [_text(own.get(key)) for key in HEADER[2:]]
        rows.append((name, _text(own["seconds"], 1e3), *texts, forecast, f"{own['loss']:.6g}"))
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
    links = {count: measured_link(count) for count in OURS if count > 1}
    for count, link in links.items():
        rate = link.bytes_per_second / 1e9
        print(f"{count} processes, sums: {rate:.3g} GB/s, {link.seconds * 1e6:.3g} us per message")
    for model in options.only:
        for logs in LOGS[options.logs]:
            own = {"logs": True} if logs else {}
            job = Job("", model, "cpu", DEVICES, options.cores, options.samples, options=own)
            held = hold(contestants(job), rules, print)
            found = result(held, forecasts(held, links))
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
