"""What remains of a run: its configuration, ``metrics.json``, a picture of the devices, a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_dp.app.callbacks import SamplesTested
from lightning_dp.monitor import DataParallelMonitor

PICTURE = "devices.png"

C = TypeVar("C", bound=Callback)


@dataclass(frozen=True)
class DeviceUsage:
    """The part of one device in a training.

    Args:
        device: its name.
        samples: training samples it worked on.
        busy_seconds: seconds it worked on them.
        peak_bytes: the most memory in use on it; 0 where devices do not count it.
        waiting_seconds: seconds it had nothing to do during training steps; None where nobody
            measured it.
    """

    device: str
    samples: int
    busy_seconds: float
    peak_bytes: int = 0
    waiting_seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """The outcome of a training or an evaluation.

    Args:
        metrics: every logged metric's last value; train/... and val/... are the last epoch's.
        devices: the names of the devices that took part, in order.
        usage: each device's part in the training; empty if there was none, or if the strategy does
            not measure it.
        tested: the test samples that each device worked on; empty if there was no test, or if the
            strategy does not share them out.
    """

    metrics: Mapping[str, float]
    devices: tuple[str, ...]
    usage: tuple[DeviceUsage, ...] = ()
    tested: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of ``metrics.json``; what was not measured is left out."""
        content: dict[str, Any] = {**self.metrics, "devices": list(self.devices)}
        if self.usage:
            content["samples_per_device"] = [part.samples for part in self.usage]
            content["busy_seconds_per_device"] = [
                round(part.busy_seconds, 4) for part in self.usage
            ]
        waiting = [part.waiting_seconds for part in self.usage if part.waiting_seconds is not None]
        if waiting:
            content["waiting_seconds_per_device"] = [round(seconds, 4) for seconds in waiting]
        if any(part.peak_bytes for part in self.usage):
            content["peak_bytes_per_device"] = [part.peak_bytes for part in self.usage]
        if self.tested:
            content["test_samples_per_device"] = list(self.tested)
        return content


def usage_of(trainer: Trainer) -> tuple[DeviceUsage, ...]:
    """Returns each device's part in the training so far; only lightning_dp's strategy knows it.

    Times are the monitor's, if there is one: it knows what a device did while others worked.
    """
    usage = tuple(
        DeviceUsage(str(part.device), part.samples, part.busy_seconds, part.peak_bytes)
        for part in getattr(trainer.strategy, "usage", ())
    )
    monitor = _first(trainer, DataParallelMonitor)
    if monitor is None or not monitor.total.steps:
        return usage
    times = zip(usage, monitor.total.busy_seconds, monitor.total.waiting_seconds, strict=True)
    return tuple(
        replace(part, busy_seconds=busy, waiting_seconds=waiting) for part, busy, waiting in times
    )


def tested_of(trainer: Trainer) -> tuple[int, ...]:
    """Returns the samples that each device worked on in the latest test."""
    samples = _first(trainer, SamplesTested)
    return () if samples is None else samples.per_device


def device_names(trainer: Trainer) -> tuple[str, ...]:
    """Returns the names of the devices of all processes; nodes are taken to be alike."""
    strategy = trainer.strategy
    devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    return tuple(str(device) for device in devices) * trainer.num_nodes


def metrics_of(trainer: Trainer) -> dict[str, float]:
    """Returns the trainer's latest metrics as plain numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def write_config(cfg: DictConfig, folder: Path) -> None:
    """Writes the configuration with all interpolations resolved to ``config.yaml``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")


def write_metrics(report: Report, folder: Path) -> None:
    """Writes ``metrics.json``."""
    text = json.dumps(report.as_dict(), indent=2)
    (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")


def draw_devices(trainer: Trainer, folder: Path) -> str | None:
    """Writes ``devices.png``, if a training on several devices was watched.

    Returns:
        What to tell the user about it.
    """
    monitor = _first(trainer, DataParallelMonitor)
    if monitor is None or not monitor.total.steps:
        return None
    try:
        return f"devices: {monitor.plot(folder / PICTURE)}"
    except ModuleNotFoundError as error:
        return f"no {PICTURE}: {error}"


def show(report: Report, folder: Path, picture: str | None = None) -> None:
    """Prints the test's metrics, each device's part, and where the results are."""
    console = Console()
    console.print(_metrics_line(report))
    if report.usage:
        console.print(_training_table(report.usage))
    elif report.tested:
        console.print(_test_table(report))
    else:
        console.print("devices:", ", ".join(report.devices), highlight=False)
    for line in (picture, f"run folder: {folder}"):
        if line is not None:
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _metrics_line(report: Report) -> str:
    shown = {k: v for k, v in report.metrics.items() if k.startswith("test/")} or report.metrics
    figures = (f"{name} [bold]{value:.4f}[/bold]" for name, value in sorted(shown.items()))
    return "   ".join(figures) or "no metrics were logged"


def _training_table(usage: Sequence[DeviceUsage]) -> Table:
    columns = {
        "training samples": [f"{part.samples:,}" for part in usage],
        "share": _shares([part.samples for part in usage]),
        "busy": [f"{part.busy_seconds:.1f} s" for part in usage],
        "waiting": [_seconds(part.waiting_seconds) for part in usage],
        "peak memory": [
            f"{part.peak_bytes / 2**20:.1f} MiB" if part.peak_bytes else "" for part in usage
        ],
    }
    return _table([part.device for part in usage], columns)


def _test_table(report: Report) -> Table:
    samples = [f"{n:,}" for n in report.tested]
    columns = {"test samples": samples, "share": _shares(report.tested)}
    return _table(report.devices, columns)


def _table(devices: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    """A row per device; columns in which nothing stands are left out."""
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table("device")
    for heading in shown:
        table.add_column(heading, justify="right")
    for device, *cells in zip(devices, *shown.values(), strict=True):
        table.add_row(device, *cells)
    return table


def _shares(samples: Sequence[int]) -> list[str]:
    total = sum(samples)
    return [f"{n / total if total else 0.0:.1%}" for n in samples]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _first(trainer: Trainer, kind: type[C]) -> C | None:
    """Returns the trainer's first callback of a kind."""
    # Lightning sets the attribute from outside the class, where type checkers do not see it.
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)
