"""Laws about what goes wrong in a step, and about what is kept."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dp.doctor.bench import Bench, Job, Watch, as_vector, relative
from lightning_dp.doctor.law import Finding, SkippedLaw, worst
from lightning_dp.doctor.steps import after_ten_steps, has_double
from lightning_dp.doctor.subjects import Classifier
from lightning_dp.parallel.devices import (
    allocated_memory,
    counts_memory,
    memory_capacity,
    replica_names,
    replica_text,
)

MOST = 4  # samples for which one device has memory, in the law about that


class PlantedError(Exception):
    """What the failing module raises, and what has to arrive."""


class _Failing(Classifier):
    """Fails on the replica that has the batch's last sample, in the third step."""

    last = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Notes which sample is the last."""
        self.last = float(batch[0][-1, 0]) if batch_idx == 2 else float("nan")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The step, or the error."""
        if bool((batch[0][:, 0] == self.last).any()):
            raise PlantedError("on purpose")
        return super().training_step(batch, batch_idx)


def error_in_a_replica(bench: Bench) -> Finding:
    """It arrives as it was, names its replica, leaves no thread, and harms no later training."""
    job = _job(bench, _Failing)
    who = replica_text(len(bench.devices) - 1, replica_names(bench.devices))
    try:
        bench.trainer(job, bench.strategy()).fit(bench.module(job), bench.batches(job))
    except PlantedError as error:
        told = " ".join([*map(str, error.args), *getattr(error, "__notes__", ())])
    else:
        raise RuntimeError("Expected the error that a replica raised, got none.")
    if who not in told:
        raise RuntimeError(f"Expected an error that names {who}, got {told!r}.")
    left = [t.name for t in threading.enumerate() if t.name.startswith("dp-")]
    if left:
        raise RuntimeError(f"Expected no thread to be left behind, got {', '.join(left)}.")
    job = _job(bench)
    return Finding(bench.afresh().apart(job), after_ten_steps(job), remark=f"named {who}")


class _Hungry(Classifier):
    """Needs more memory than a device has, where it gets more samples than so many."""

    def __init__(self, hungry: torch.device) -> None:
        super().__init__()
        self.hungry = hungry

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The step, if there is room for it."""
        x, _ = batch
        if x.device == self.hungry and len(x) > MOST:
            _take_too_much(x.device)
        return super().training_step(batch, batch_idx)


def _take_too_much(device: torch.device) -> None:
    """Asks the device's allocator for more than there is, which raises."""
    module: Any = torch.get_device_module(device)
    limit = getattr(module, "set_memory_limit", None)
    if limit is None:
        torch.empty(2 * memory_capacity(device), dtype=torch.uint8, device=device)
        return
    limit(device, allocated_memory(device) + 1)
    try:
        torch.empty(2**20, dtype=torch.uint8, device=device)
    finally:
        limit(device, None)


def memory_runs_out(bench: Bench) -> Finding:
    """The step runs again with fewer samples there, and gives the same numbers."""
    own = [device for device in bench.devices if bench.devices.count(device) == 1]
    if not all(map(counts_memory, bench.distinct)):
        raise SkippedLaw(f"{bench.root.type} does not count its memory")
    if not own:
        raise SkippedLaw("one device: no other has room for its samples")
    device = own[-1]
    mine = bench.several(_job(bench, partial(_Hungry, device)))
    job, strategy = _job(bench), mine.trainer.strategy
    sizes: tuple[int, ...] = getattr(strategy, "last_sizes", ())
    if sizes[bench.devices.index(device)] > MOST:
        raise RuntimeError(
            f"Expected at most {MOST} samples on {device}, which has no memory for more, got the "
            f"sizes {sizes}."
        )
    remark = f"on {device}; then sizes {', '.join(map(str, sizes))}"
    return Finding(mine.apart(bench.one(job)), after_ten_steps(job), remark=remark)


def checkpoints(bench: Bench) -> Finding:
    """An epoch, a file, and another one are two epochs; on one device the file goes on, too."""
    plain, path = _job(bench), bench.folder / "doctor.ckpt"
    job = replace(plain, sizes=[4 * len(bench.devices) + 1] * 5, trainer={"max_epochs": 2})
    first = bench.trainer(job, bench.strategy(), max_epochs=1)
    first.fit(bench.module(job), bench.batches(job))
    first.save_checkpoint(path)
    keys = list(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
    expected = list(bench.module(job).state_dict())
    if keys != expected:
        raise RuntimeError(f"Expected the keys {expected} in a checkpoint, got {keys}.")
    oracle = bench.one(job)
    ends = [_resumed(bench, job, path, strategy) for strategy in (bench.strategy(), bench.alone())]
    off = [relative(end - oracle.start, oracle.last - oracle.start) for end in ends]
    return Finding(worst(off), after_ten_steps(job), remark="resumed on all devices, and on one")


def _resumed(bench: Bench, job: Job, path: Path, strategy: Any) -> Tensor:
    module, watch = bench.module(job), Watch()
    bench.trainer(job, strategy, watch).fit(module, bench.batches(job), ckpt_path=path)
    return as_vector(watch.states[-1])


def _job(bench: Bench, make: Any = Classifier) -> Job:
    return Job(make, precision="64" if has_double(bench) else "32")
