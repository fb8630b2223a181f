"""How much memory does training take, and where? ``python -m lightning_dp estimate``."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lightning_dp.app.doctor import devices_named, own_workloads
from lightning_dp.app.estimate.bench import STEPS, Bench
from lightning_dp.app.estimate.report import report
from lightning_dp.app.estimate.search import EVEN, Clock, Search, Split, taken
from lightning_dp.app.plan import typed
from lightning_dp.forecast import shown_bytes, size
from lightning_dp.parallel.devices import counts_memory, memory_capacity
from lightning_dp.table import ScreenParser

SECONDS = 60.0
"""After which nothing more is proven."""

DESCRIPTION = """\
What each device holds at the peak of a training step, by steps on simulated
devices, which count every byte of every tensor; and the largest batch that a
memory has room for: it has run, and one sample more has not. What would not fit
into this machine's own memory is computed from smaller batches: "about".

  python -m lightning_dp estimate experiment=digits --devices 8 --memory 24GiB
  python -m lightning_dp estimate --module package.Class --batch 64
  python -m lightning_dp estimate experiment=digits --devices cuda:4

Splits: even and weights keep their shares: the largest batch with which no
device ever runs out. memory moves samples to where there is room: the largest
that goes on. chunk has even's; auto, adaptive and cost have none to name.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        bench, n = _bench(options)
        limit = _limit(options, bench)
        splits = _splits(options, bench, n, limit)
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    print("\n".join(report(bench.name, n, splits, limit)))
    if options.json:
        _write(options, n, splits)
    return 0


def _parser() -> ScreenParser:
    parser = ScreenParser("python -m lightning_dp estimate", description=DESCRIPTION)
    add = parser.add_argument
    add("--module", metavar="PACKAGE.CLASS", help="a LightningModule made without arguments")
    add("--data", metavar="PACKAGE.CLASS", help="its LightningDataModule, if it has no data itself")
    add("overrides", nargs="*", metavar="experiment=NAME KEY=VALUE")
    add("--batch", metavar="N", type=int, help="samples of all devices; else as the data has them")
    add("--devices", metavar="K", default="4", help="simulated ones; or cuda, cuda:2; 4")
    add("--memory", metavar="SIZE", type=typed(size), help="of each device: 24GiB, 24GB")
    add("--weights", metavar="X,X", type=typed(_weights), help="shares of the devices: 1,3,3,3")
    add("--json", metavar="FILE", type=Path, help="all numbers go there, in bytes")
    return parser


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"expected a number for each device, such as 1,3,3,3, got {text!r}"
        ) from None


def _bench(options: Namespace) -> tuple[Bench, int]:
    found = own_workloads(options.module, options.data, options.overrides)
    if not found:
        alone = "nothing" if options.batch is None else "--batch alone"
        raise ValueError(
            f"expected experiment=NAME or --module package.Class, got {alone}. Say what is trained."
        )
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch: expected at least 1 sample, got {options.batch}.")
    if options.memory is not None and options.memory < 1:
        raise ValueError(f"--memory: expected at least 1 byte, got {options.memory:g}.")
    bench = Bench(found[0], _devices(options.devices))
    return bench, options.batch or bench.own_size


def _devices(text: str) -> list[torch.device]:
    """A number of simulated devices, or those that are named as for the doctor."""
    devices = devices_named(f"sim:{text}" if text.isdigit() else text)
    if not all(map(counts_memory, devices)):
        raise ValueError(
            f"--devices: expected devices that count their memory, got {text!r}. Give a number, "
            "such as 4, for as many simulated ones, or cuda."
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"--devices: expected each device once, got {text!r}.")
    return devices


def _splits(options: Namespace, bench: Bench, n: int, limit: int | None) -> list[Split]:
    """Each split with this batch, and if there is a limit, with its largest one."""
    asked: dict[str, dict[str, Any]] = {"even": EVEN}
    if len(bench.devices) > 1:
        asked["memory"] = {**EVEN, "split": "memory"}
    weights = options.weights or bench.weights
    if weights:
        asked["weights"] = {**EVEN, "weights": weights}
    splits = [Split(name, own, taken(bench, n, own)) for name, own in asked.items()]
    if limit is None:
        return splits
    search = Search(bench, limit, Clock(SECONDS))
    search.approach(n, splits[0].run)
    found = [replace(split, largest=search.largest(split)) for split in splits]
    if not any(split.largest and split.largest.samples for split in found):
        least = taken(bench, 1, splits[0].options).fullest
        raise ValueError(
            f"--memory: expected at least {shown_bytes(least.peak)}, what a step of one sample "
            f"takes on {least.device}, got {shown_bytes(limit)}. Use larger devices, or a smaller "
            "model."
        )
    return found


def _limit(options: Namespace, bench: Bench) -> int | None:
    """Bytes of each device: as said, or what real ones have."""
    if options.memory is not None:
        return int(options.memory)
    is_real = bench.devices[0].type != "sim"
    return min(map(memory_capacity, bench.devices)) if is_real else None


def _write(options: Namespace, n: int, splits: Sequence[Split]) -> None:
    content = {
        "batch": n,
        "memory": options.memory,
        "steps": STEPS,
        "splits": [asdict(split) for split in splits],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
