"""What remains of a run: ``metrics.json``, a picture of the devices, a table."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp.monitor import table_of
from lightning_dp.parallel.devices import replica_names


def write_report(trainer: Trainer, metrics: Mapping[str, float], folder: Path) -> None:
    """Writes ``metrics.json`` and ``devices.png``, and prints what came out; one process does.

    With a `DataParallelMonitor` among the callbacks it says what the devices of all processes did
    in the training.
    """
    # Lightning sets the attribute from outside the class, where type checkers do not see it.
    callbacks = getattr(trainer, "callbacks", [])
    monitor = next((c for c in callbacks if isinstance(c, DataParallelMonitor)), None)
    rows, strategy = (monitor.summary() if monitor else []), trainer.strategy
    if isinstance(strategy, DataParallelStrategy):  # whose processes share the devices out
        names = [*strategy.replica_names]
        if strategy.world is not None:
            everyone = strategy.world.all_gather_objects((rows, names))
            rows, names = ([*chain.from_iterable(parts)] for parts in zip(*everyone, strict=True))
    else:  # of other strategies nodes are alike
        devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
        names = replica_names([*devices] * trainer.num_nodes)
    if not trainer.is_global_zero:
        return
    content: dict[str, Any] = {**metrics, "devices": names}
    for what in ("samples", "busy_seconds", "waiting_seconds", "peak_bytes") if rows else ():
        column = [round(getattr(row, what), 4) for row in rows]
        if any(column):  # the CPU does not count its memory
            content[f"{what}_per_device"] = column
    (folder / "metrics.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    shown = {k: v for k, v in metrics.items() if k.startswith("test/")} or metrics
    figures = [f"{name} {value:.4f}" for name, value in sorted(shown.items())]
    print("   ".join(figures) or "no metrics were logged")
    if monitor is None or not rows:
        print("devices:", ", ".join(names))
    else:
        print(table_of(rows))
        try:
            print(f"devices: {monitor.plot(folder / 'devices.png')}")
        except ModuleNotFoundError as error:
            print(f"no devices.png: {error}")
    print(f"run folder: {folder}")
