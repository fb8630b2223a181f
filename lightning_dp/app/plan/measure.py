"""One machine's step, measured here for ``python -m lightning_dp plan``."""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_dp
from lightning_dp.app.doctor import devices_named, own_workloads
from lightning_dp.doctor import Workload, fair_threads, timed, times_in_one_process
from lightning_dp.forecast import Measured
from lightning_dp.parallel.batch import infer_batch_size

SECONDS = 8.0
"""After which no further way is tried."""


def measured(overrides: Sequence[str], which: str | None) -> Measured:
    """A step of an experiment of ``conf/``: the median of some, in the faster of our two ways.

    Args:
        overrides: such as ``experiment=digits``.
        which: the devices, as the doctor has them; None for those that it would take.
    """
    devices = devices_named(which)
    (workload,) = own_workloads(None, None, overrides)
    batches = workload.batches(0)
    end = time.perf_counter() + SECONDS
    with tempfile.TemporaryDirectory() as name, fair_threads():
        folder = Path(name)
        times = times_in_one_process(
            workload, batches, devices, folder, lambda: end - time.perf_counter()
        )
        share = _share(workload, batches, devices, folder) if len(devices) > 1 else None
    alone = times.pop("one device")
    return Measured(
        name=workload.name,
        seconds=min(times.values(), default=alone),
        devices=len(devices),
        kind=devices[0].type,
        share=share,
        size=_size(workload),
        samples=infer_batch_size(batches[0], 0).size or None,
    )


def _share(
    workload: Workload,
    batches: Sequence[object],
    devices: Sequence[torch.device],
    folder: Path,
) -> float:
    """Seconds of the first device alone with its part of each batch, and of the cores."""
    hosts = ["cpu"] * len(devices)
    parts = [lightning_dp.scatter(batch, hosts)[0] for batch in batches]
    strategy = SingleDeviceStrategy(devices[0])
    with _threads(len(devices) if devices[0].type == "cpu" else 1):
        return timed(workload, parts, strategy, devices[:1], folder)


@contextlib.contextmanager
def _threads(parts: int) -> Iterator[None]:
    """One of so many parts of the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // parts))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _size(workload: Workload) -> float:
    trained = [p for p in workload.make().parameters() if p.requires_grad]
    return float(sum(p.numel() * p.element_size() for p in trained))
