"""What a long run must not leave behind, counted as it goes on."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_dp.parallel.devices import allocated_memory
from support.oracle import Classifier

SLACK = {"objects": 200, "resident MiB": 16}
"""Lightning keeps a little of every epoch; memory is given back in large parts, or is not."""


class Busy(Classifier):
    """Logs, measures, collects and binds, as real modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.outputs: list[Tensor] = []
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.ones_like(x[0])
        return self.net(self.norm(x) * self.mask)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))
        self.outputs.append(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.outputs.clear()


class Count(Callback):
    """At the end of every epoch: what is there, and bytes where they are counted.

    Args:
        devices: whose memory is counted.
        of_process: whether open files, children and the process's memory are counted as well.
    """

    def __init__(self, devices: Sequence[torch.device], *, of_process: bool = False) -> None:
        self.devices, self.of_process = devices, of_process
        self.counts: list[dict[str, int]] = []

    def on_train_epoch_end(self, job: Any, module: Any) -> None:
        gc.collect()
        objects = gc.get_objects()
        counts = {
            "tensors": sum(issubclass(type(o), Tensor) for o in objects),
            "modules": sum(issubclass(type(o), nn.Module) for o in objects),
            "objects": len(objects),
            "threads": threading.active_count(),
        }
        counts |= {str(d): allocated_memory(d) for d in self.devices}
        if self.of_process:
            counts |= of_this_process()
        self.counts.append(counts)


def of_this_process() -> dict[str, int]:
    """Open files, children, and memory, as Linux tells them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "children": len(mp.active_children()),
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def check_flat(counts: Sequence[Mapping[str, int]]) -> None:
    """Holds the last counts to early ones."""
    early, late = counts[5], counts[-1]
    for name, number in late.items():
        assert number <= early[name] + SLACK.get(name, 0), (name, early, late)
