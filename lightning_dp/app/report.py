"""What remains of a run: ``metrics.json``, a picture of the devices, a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback, Trainer

from lightning_dp import DataParallelStrategy
from lightning_dp.app.callbacks import StepTimes
from lightning_dp.app.together import of_all
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.parallel.devices import replica_names
from lightning_dp.table import table

C = TypeVar("C", bound=Callback)


@dataclass(frozen=True)
class Usage:
    """What the devices of all processes did in a training, as far as it was measured."""

    samples: Sequence[int] = ()
    busy_seconds: Sequence[float] = ()
    waiting_seconds: Sequence[float] = ()
    peak_bytes: Sequence[int] = ()  # empty where devices do not count them
    ms_per_step: float | None = None  # the median
    note: str | None = None  # what these numbers alone do not say


@dataclass(frozen=True)
class Report:
    """The outcome of a training or an evaluation."""

    metrics: Mapping[str, float]  # every logged one's last value
    devices: Sequence[str]
    usage: Usage = field(default_factory=Usage)


def usage_of(trainer: Trainer) -> Usage:
    """Returns what was measured of the training so far."""
    monitor, times = _first(trainer, DataParallelMonitor), _first(trainer, StepTimes)
    rows: Sequence[Any] = monitor.summary() if monitor else ()
    if isinstance(trainer.strategy, DataParallelStrategy):  # whose processes share the devices out
        # Without a monitor it knows the same, but not how long a device waited.
        rows = [*chain.from_iterable(of_all([*(rows or trainer.strategy.usage)]))]
    return Usage(
        samples=[row.samples for row in rows],
        busy_seconds=[round(row.busy_seconds, 4) for row in rows],
        waiting_seconds=[
            round(row.waiting_seconds, 4) for row in rows if hasattr(row, "waiting_seconds")
        ],
        peak_bytes=[row.peak_bytes for row in rows] if any(row.peak_bytes for row in rows) else [],
        ms_per_step=times.milliseconds if times else None,
        note=monitor.note if monitor else None,
    )


def device_names(trainer: Trainer) -> Sequence[str]:
    """Returns the names of the replicas of all processes; of other strategies nodes are alike."""
    strategy = trainer.strategy
    if isinstance(strategy, DataParallelStrategy):
        return [*chain.from_iterable(of_all(strategy.replica_names))]
    devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    return replica_names([*devices] * trainer.num_nodes)


def metrics_of(trainer: Trainer) -> dict[str, float]:
    """Returns the trainer's latest metrics as plain numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def finish(report: Report, trainer: Trainer, folder: Path) -> None:
    """Writes ``metrics.json`` and ``devices.png``, and prints what came out; one process does."""
    if not trainer.is_global_zero:
        return
    usage = report.usage
    columns = {
        "ms_per_step": usage.ms_per_step and round(usage.ms_per_step, 3),
        "samples_per_device": usage.samples,
        "busy_seconds_per_device": usage.busy_seconds,
        "waiting_seconds_per_device": usage.waiting_seconds,
        "peak_bytes_per_device": usage.peak_bytes,
    }
    content = {**report.metrics, "devices": report.devices}
    content |= {name: column for name, column in columns.items() if column}
    (folder / "metrics.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    shown = {k: v for k, v in report.metrics.items() if k.startswith("test/")} or report.metrics
    figures = [f"{name} {value:.4f}" for name, value in sorted(shown.items())]
    print("   ".join(figures) or "no metrics were logged")
    if usage.samples:
        _print_devices(report)
    else:
        print("devices:", ", ".join(report.devices))
    for line in (usage.note, _draw_devices(trainer, folder), f"run folder: {folder}"):
        if line is not None:
            print(line)


def _print_devices(report: Report) -> None:
    usage = report.usage
    columns = {
        "device": report.devices,
        "training samples": [f"{n:,}" for n in usage.samples],
        "share": [f"{n / (sum(usage.samples) or 1):.1%}" for n in usage.samples],
        "busy": [f"{seconds:.1f} s" for seconds in usage.busy_seconds],
        "waiting": [f"{seconds:.1f} s" for seconds in usage.waiting_seconds],
        "peak memory": [f"{n / 2**20:.1f} MiB" if n else "" for n in usage.peak_bytes],
    }
    headings = [heading for heading, cells in columns.items() if cells]
    rows = list(zip(*(columns[heading] for heading in headings), strict=True))
    print(table(headings, rows))


def _draw_devices(trainer: Trainer, folder: Path) -> str | None:
    """Draws a training that was watched, and returns what to say about the picture."""
    monitor = _first(trainer, DataParallelMonitor)
    if monitor is None or not monitor.summary():
        return None
    try:
        return f"devices: {monitor.plot(folder / 'devices.png')}"
    except ModuleNotFoundError as error:
        return f"no devices.png: {error}"


def _first(trainer: Trainer, kind: type[C]) -> C | None:
    """Returns the trainer's first callback of a kind."""
    # Lightning sets the attribute from outside the class, where type checkers do not see it.
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)
