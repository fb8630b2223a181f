"""What would many machines give? ``python -m lightning_dp plan``."""

import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_dp.app.plan.options import IN_MEMORY, LOCAL, plan_parser
from lightning_dp.forecast import (
    OPTIMIZERS,
    Cluster,
    Job,
    Link,
    Measured,
    Memory,
    Row,
    Setting,
    advice,
    digits,
    draw,
    forecast,
    job_of,
    read,
    shown_bytes,
    shown_time,
)

WIDTH = 98
LEGEND = (
    "In {}: a step and its parts, then steps of DDP, of FSDP, and of half as many machines with "
    "twice the devices each (wider). Efficiency is against one machine."
)
COLUMNS = {
    "compute": "compute",
    "python": "python",
    "local": "local",
    "network": "network",
    "exchange": "told",
    "waiting": "waits",
}
"""A step's parts; what is 0 everywhere has no column."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = plan_parser()
    options = parser.parse_args(arguments)
    try:
        known = _measured(options)
        setting = _setting(options, known)
        rows = forecast(setting)
        told = advice(setting, rows)
        print("\n".join([*_headlines(setting, known), "", *table(rows), "", *map(_point, told)]))
        if options.json:
            _write(options.json, setting, rows, told)
        if options.plot:
            draw(options.plot, rows, _headlines(setting, known)[0])
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


def _measured(options: Namespace) -> Measured:
    """One machine's step, from wherever the options say; what they say themselves is first."""
    named = {"--step": options.step, "--from": options.file, "--measure": options.measure}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"expected one of {', '.join(named)}, which says what one machine's step takes, got "
            f"{' and '.join(given) or 'none of them'}. Try --step 100ms, or --help."
        )
    if options.file:
        known = read(json.loads(options.file.read_text("utf-8")), options.model, options.devices)
    elif options.measure:
        from lightning_dp.app.plan.measure import measured

        known = measured(options.measure, options.on)
    else:
        known = Measured(
            "a step as given", options.step, 1 if (k := options.devices) is None else k
        )
    own = {"share": options.share, "size": _bytes(options), "samples": options.batch}
    if options.devices not in (None, known.devices):
        raise ValueError(
            f"--devices: expected {known.devices}, as many as were measured, got {options.devices}."
        )
    return replace(known, **{name: value for name, value in own.items() if value is not None})


def _bytes(options: Namespace) -> float | None:
    given: float | None = options.bytes
    return 4 * options.parameters if given is None and options.parameters else given


def _setting(options: Namespace, known: Measured) -> Setting:
    _check(options, known)
    on_cpu = known.kind == "cpu"
    machine = Cluster(
        machines=1,
        devices=known.devices,
        local=options.local or LOCAL[IN_MEMORY if on_cpu else "pcie4"],
        network=Link(options.network, options.latency),
        bucket=options.bucket,
        overlaps=not (options.no_overlap or on_cpu),
        refreshes=not on_cpu,
        reduces=options.reduce,
        gathers=options.gather,
        exchanges=options.exchanges,
    )
    job = Job(
        compute=0.0,
        size=known.size or 0.0,
        backward_share=options.backward_share,
        samples=known.samples,
        fixed=options.fixed,
        strong=options.scaling == "strong",
        noise=options.noise,
        layers=options.layers,
    )
    job = job_of(known.seconds, job, machine, known.share)
    if job.fixed > job.compute:
        raise ValueError(f"--fixed: expected at most {job.compute:.3g} s, what is computed.")
    return Setting(job, machine, _memory(options, job), options.machines or Setting.machines)


def _check(options: Namespace, known: Measured) -> None:
    if known.size is None:
        raise ValueError("--parameters: expected how many parameters are trained, got nothing.")
    if options.scaling == "strong" and known.samples is None:
        raise ValueError("--batch: expected the samples that all machines share, got nothing.")
    least: dict[str, tuple[Any, float]] = {
        "--step": (known.seconds, 1e-12),
        "--devices": (known.devices, 1),
        "--batch": (known.samples or 1, 1),
        "--bucket": (options.bucket, 1),
        "--layers": (options.layers, 1),
        "--exchanges": (options.exchanges, 0),
        "--machines": (min(options.machines or [1]), 1),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"{name}: expected at least {bound:g}, got {value:g}.")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot: expected a file named .png or .svg, got {str(options.plot)!r}.")
    if not 0 <= options.backward_share < 1:
        raise ValueError(
            f"--backward-share: expected a number from 0 to less than 1, the part of computing in "
            f"which gradients come, got {options.backward_share:g}."
        )


def _memory(options: Namespace, job: Job) -> Memory | None:
    if options.capacity is None and not options.activations:
        return None
    return Memory(
        weights=job.size,
        state=OPTIMIZERS[options.optimizer] * job.size,
        activations=options.activations,
        layers=options.layers,
        capacity=options.capacity,
    )


def _headlines(setting: Setting, known: Measured) -> list[str]:
    """What was taken for granted."""
    job, machine = setting.job, setting.machine
    devices = f"{machine.devices} device" + "s" * (machine.devices > 1)
    batch = f" and {known.samples:,} samples" if known.samples else ""
    shared = "which all machines share" if job.strong else "each machine as many"
    scaling = f", {shared}" if batch else ""
    lines = [
        f"{known.name}: {shown_time(known.seconds)} per step with {devices}{batch}{scaling}",
        f"gradients {shown_bytes(job.size)}, in buckets of {shown_bytes(machine.bucket)}, "
        + ("while the backward runs" if machine.overlaps else "after the backward"),
        f"between machines {_shown_link(machine.network)}",
    ]
    if machine.devices > 1:
        lines[-1] += f"; within one {_shown_link(machine.local)}"
    return lines


def _shown_link(link: Link) -> str:
    return f"{link.bytes_per_second / 1e9:.4g} GB/s, {link.seconds * 1e6:.3g} us"


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table."""
    scale, unit = (1.0, "s") if rows[0].step.seconds >= 10 else (1e3, "ms")
    there = [name for name in COLUMNS if any(vars(row.step)[name] for row in rows)]
    heads = [COLUMNS[name] for name in there]
    cells = [["machines", "devices", unit, *heads, "eff.", "DDP", "FSDP", "wider"]]
    for row in rows:
        others = [step and step.seconds for step in (row.ddp, row.fsdp, row.wider)]
        times = [row.step.seconds, *(vars(row.step)[name] for name in there), *others]
        own = ["-" if s is None else digits(s * scale) for s in times]
        before = [f"{row.machines:,}", f"{row.devices:,}"]
        cells.append([*before, *own[:-3], f"{row.efficiency:.1%}", *own[-3:]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [map(str.rjust, line, widths) for line in cells]
    return [*map("  ".join, lines), *textwrap.wrap(LEGEND.format(unit), WIDTH)]


def _point(text: str) -> str:
    """A thought, as an item of a list, in lines that fit."""
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")


def _write(file: Path, setting: Setting, rows: Sequence[Row], told: Sequence[str]) -> None:
    content = {
        "job": asdict(setting.job),
        "machine": asdict(setting.machine),
        "memory": setting.memory and asdict(setting.memory),
        "rows": [row.as_json() for row in rows],
        "advice": list(told),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
