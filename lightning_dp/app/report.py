"""What remains of a run: its configuration, ``metrics.json``, a picture of the devices, a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dp import DataParallelStrategy
from lightning_dp.app.callbacks import SamplesTested, StepTimes
from lightning_dp.app.run import note
from lightning_dp.app.together import of_all
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.usage import DeviceUsage
from lightning_dp.table import print_table

PICTURE = "devices.png"
PROFILE = "profile"

C = TypeVar("C", bound=Callback)


@dataclass(frozen=True)
class Report:
    """The outcome of a training or an evaluation."""

    metrics: Mapping[str, float]  # every logged one's last value
    devices: tuple[str, ...]
    # What each device did, by names in metrics.json, without what nobody measures.
    per_device: Mapping[str, Sequence[float]]
    note: str | None = None  # what these numbers alone do not say


def training_of(trainer: Trainer) -> dict[str, list[float]]:
    """Returns what each device of all processes did in the training so far, as far as is known."""
    usage: Sequence[DeviceUsage] = getattr(trainer.strategy, "usage", ())
    monitor = _first(trainer, DataParallelMonitor)
    # It knows what a device did while others worked.
    watched = monitor.total if monitor and monitor.total.steps else None
    busy = watched.busy_seconds if watched else [part.busy_seconds for part in usage]
    waiting = watched.waiting_seconds if watched else ()
    peaks = [part.peak_bytes for part in usage]
    columns: dict[str, list[float]] = {
        "samples_per_device": [part.samples for part in usage],
        "busy_seconds_per_device": [round(seconds, 4) for seconds in busy],
        "waiting_seconds_per_device": [round(seconds, 4) for seconds in waiting],
        "peak_bytes_per_device": [*peaks] if any(peaks) else [],
    }
    return _of_all(trainer, {name: values for name, values in columns.items() if values})


def note_of(trainer: Trainer) -> str | None:
    """Returns what the monitor has to say of the training besides numbers."""
    monitor = _first(trainer, DataParallelMonitor)
    return monitor.note if monitor else None


def tested_of(trainer: Trainer) -> dict[str, list[float]]:
    """Returns the samples that each device worked on in the latest test."""
    counter = _first(trainer, SamplesTested)
    samples = counter.per_device if counter else ()
    return _of_all(trainer, {"test_samples_per_device": [*samples]} if samples else {})


def device_names(trainer: Trainer) -> tuple[str, ...]:
    """Returns the names of the replicas of all processes; of other strategies nodes are alike."""
    strategy = trainer.strategy
    if isinstance(strategy, DataParallelStrategy):
        return tuple(chain.from_iterable(of_all(strategy.replica_names)))
    devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    return tuple(replica_names([*devices] * trainer.num_nodes))


def _of_all(trainer: Trainer, columns: dict[str, list[float]]) -> dict[str, list[float]]:
    """The columns of all processes, one after another."""
    if not isinstance(trainer.strategy, DataParallelStrategy):
        return columns
    told = of_all(columns)
    names = dict.fromkeys(chain.from_iterable(told))
    return {name: [*chain.from_iterable(own.get(name, []) for own in told)] for name in names}


def metrics_of(trainer: Trainer) -> dict[str, float]:
    """Returns the trainer's latest metrics as plain numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def write_config(cfg: DictConfig, folder: Path) -> None:
    """Writes the configuration with all interpolations resolved to ``config.yaml``."""
    text = OmegaConf.to_yaml(cfg, resolve=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"paths.output_dir: expected a folder to write to, got {str(folder)!r} "
            f"({error.strerror}). Give another one, or leave it out."
        ) from error


def finish(report: Report, trainer: Trainer, folder: Path) -> None:
    """Writes ``metrics.json`` and ``devices.png``, and prints what came out; one process does."""
    if trainer.is_global_zero:
        times = _first(trainer, StepTimes)
        took = {"ms_per_step": round(times.milliseconds, 3)} if times and times.milliseconds else {}
        content = {**report.metrics, "devices": report.devices, **took, **report.per_device}
        text = json.dumps(content, indent=2)
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        note.info("metrics.json:\n%s", text)
        _show(report, folder, _draw_devices(trainer, folder))


def _draw_devices(trainer: Trainer, folder: Path) -> str | None:
    """Draws the devices, if a training on several was watched, and says what to tell about it."""
    monitor = _first(trainer, DataParallelMonitor)
    if monitor is None or not monitor.total.steps:
        return None
    try:
        return f"devices: {monitor.plot(folder / PICTURE)}"
    except ModuleNotFoundError as error:
        return f"no {PICTURE}: {error}"


def _show(report: Report, folder: Path, picture: str | None) -> None:
    shown = {k: v for k, v in report.metrics.items() if k.startswith("test/")} or report.metrics
    figures = [f"{name} {value:.4f}" for name, value in sorted(shown.items())]
    print("   ".join(figures) or "no metrics were logged")
    if report.per_device:
        _show_devices(report)
    else:
        print("devices:", ", ".join(report.devices))
    profiles = [f"profile: {file}" for file in sorted(folder.glob(f"*{PROFILE}*.txt"))]
    for line in (report.note, picture, *profiles, f"run folder: {folder}"):
        if line is not None:
            print(line)


def _show_devices(report: Report) -> None:
    """Prints a row per device: what it did in the training, or in a test without a training."""
    found = report.per_device
    trained, tested = found.get("samples_per_device"), found.get("test_samples_per_device")
    samples = trained or tested or ()
    columns = {
        "device": list(report.devices),
        "training samples" if trained else "test samples": [f"{n:,}" for n in samples],
        "share": [f"{n / (sum(samples) or 1):.1%}" for n in samples],
        "busy": [f"{seconds:.1f} s" for seconds in found.get("busy_seconds_per_device", ())],
        "waiting": [f"{seconds:.1f} s" for seconds in found.get("waiting_seconds_per_device", ())],
        "peak memory": [
            f"{size / 2**20:.1f} MiB" if size else ""
            for size in found.get("peak_bytes_per_device", ())
        ],
    }
    headings = [heading for heading, cells in columns.items() if cells]
    rows = list(zip(*(columns[heading] for heading in headings), strict=True))
    print_table(headings, rows, right=headings[1:])


def _first(trainer: Trainer, kind: type[C]) -> C | None:
    """Returns the trainer's first callback of a kind."""
    # Lightning sets the attribute from outside the class, where type checkers do not see it.
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)
