"""What remains of a run: the resolved configuration, ``metrics.json`` and a table on the screen."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class DeviceUsage:
    """The part of one device in a training.

    Args:
        device: its name.
        samples: training samples it worked on.
        busy_seconds: seconds it worked on them.
        peak_bytes: the most memory in use on it; 0 where devices do not count it.
    """

    device: str
    samples: int
    busy_seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """The outcome of a training or an evaluation.

    Args:
        metrics: every logged metric's last value; train/... and val/... are the last epoch's.
        devices: the names of the devices that took part, in order.
        usage: each device's part in the training; empty if there was none, or if the strategy does
            not measure it.
    """

    metrics: Mapping[str, float]
    devices: tuple[str, ...]
    usage: tuple[DeviceUsage, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of ``metrics.json``; what was not measured is left out."""
        content: dict[str, Any] = {**self.metrics, "devices": list(self.devices)}
        if self.usage:
            content["samples_per_device"] = [part.samples for part in self.usage]
            content["busy_seconds_per_device"] = [
                round(part.busy_seconds, 4) for part in self.usage
            ]
        if any(part.peak_bytes for part in self.usage):
            content["peak_bytes_per_device"] = [part.peak_bytes for part in self.usage]
        return content


def usage_of(trainer: Trainer) -> tuple[DeviceUsage, ...]:
    """Returns each device's part in the training so far; only lightning_dp's strategy knows it."""
    return tuple(
        DeviceUsage(str(part.device), part.samples, part.busy_seconds, part.peak_bytes)
        for part in getattr(trainer.strategy, "usage", ())
    )


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


def show(report: Report, folder: Path) -> None:
    """Prints the test's metrics, each device's part in the training, and the run folder."""
    console = Console()
    console.print(_metrics_line(report))
    console.print(_devices_table(report))
    console.print("run folder:", str(folder), highlight=False, soft_wrap=True)


def _metrics_line(report: Report) -> str:
    shown = {k: v for k, v in report.metrics.items() if k.startswith("test/")} or report.metrics
    figures = (f"{name} [bold]{value:.4f}[/bold]" for name, value in sorted(shown.items()))
    return "   ".join(figures) or "no metrics were logged"


def _devices_table(report: Report) -> Table:
    table = Table("device")
    if not report.usage:
        for name in report.devices:
            table.add_row(name)
        return table
    counts_memory = any(part.peak_bytes for part in report.usage)
    headings = ["training samples", "share", "busy", *(["peak memory"] if counts_memory else [])]
    for heading in headings:
        table.add_column(heading, justify="right")
    total = sum(part.samples for part in report.usage)
    for part in report.usage:
        share = part.samples / total if total else 0.0
        busy = f"{part.busy_seconds:.1f} s"
        peak = [f"{part.peak_bytes / 2**20:.1f} MiB"] if counts_memory else []
        table.add_row(part.device, f"{part.samples:,}", f"{share:.1%}", busy, *peak)
    return table
