"""Laws about training steps: several devices are as one, whatever the step is like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import cast

import torch
from torch import Tensor, nn

from lightning_dp import DataParallel
from lightning_dp.doctor.bench import ALLOWED, STEPS, Bench, Job, as_vector, has_float64, relative
from lightning_dp.doctor.law import Finding, SkippedLaw, worst
from lightning_dp.doctor.subjects import batches_of

_MORE = 10
"""Times what is allowed after one step, where rounding has ten steps to grow."""


def as_one_device(bench: Bench, *, precision: str, steps: int) -> Finding:
    """Losses and weights are those of the root alone."""
    job = Job(precision=precision)
    allowed = ALLOWED[precision] if steps == 1 else after_ten_steps(job)
    return Finding(bench.apart(job, steps=steps), allowed)


def after_ten_steps(job: Job) -> float:
    """The relative difference that rounding may make by then."""
    return ALLOWED[job.precision] * (_MORE if job.precision in ("64", "32") else 1)


def job_as_one_device(bench: Bench, *, job: Job, remark: str = "") -> Finding:
    """The same of any job."""
    job = job if has_double(bench) else replace(job, precision="32")
    return Finding(bench.apart(job), after_ten_steps(job), remark=remark)


def has_double(bench: Bench) -> bool:
    """Whether the devices compute in double precision, which tells faults from rounding."""
    return all(map(has_float64, bench.distinct))


def uneven_shards(bench: Bench) -> Finding:
    """Shares of 1, 2, 3 and so on."""
    weights = list(range(1, len(bench.devices) + 1))
    job = Job(strategy={"weights": weights})
    return job_as_one_device(bench, job=job, remark=f"weights={weights}")


def idle_devices(bench: Bench) -> Finding:
    """A device without a share, and batches with fewer samples than there are devices."""
    k = len(bench.devices)
    first = job_as_one_device(bench, job=Job(strategy={"weights": [0, *[1] * (k - 1)]}))
    sizes = list(islice(chain.from_iterable([(2 * k, k - 1, 1)] * STEPS), STEPS))
    second = job_as_one_device(bench, job=Job(sizes=sizes))
    return Finding(
        worst([first.difference, second.difference]), first.allowed, remark="the root, and others"
    )


def same_metrics(bench: Bench) -> Finding:
    """What is logged and measured is the whole batch's, and predictions keep their order."""
    job = Job() if has_double(bench) else Job(precision="32")
    mine, oracle = bench.several(job), bench.one(job)
    names = sorted(oracle.logged)
    if sorted(mine.logged) != names:
        raise RuntimeError(f"Expected to be logged: {names}, got {sorted(mine.logged)}.")
    logged = [relative(torch.tensor(mine.logged[n]), torch.tensor(oracle.logged[n])) for n in names]
    outputs = [
        as_vector(cast(list[Tensor], record.trainer.predict(record.module, bench.batches(job))))
        for record in (mine, oracle)
    ]
    difference = worst([*logged, relative(*outputs)])
    return Finding(difference, after_ten_steps(job), remark="self.log, torchmetrics, predict")


def drop_in(bench: Bench) -> Finding:
    """`lightning_dp.DataParallel` in a loop of plain PyTorch."""
    precision = "64" if has_double(bench) else "32"
    job = Job(precision=precision)
    dtype = torch.float64 if precision == "64" else torch.float32
    plain, spread = (bench.module(job).net.to(bench.root) for _ in range(2))
    _trained(plain, plain, bench, dtype)
    _trained(DataParallel(spread, bench.devices), spread, bench, dtype)
    vectors = [as_vector(list(module.parameters())) for module in (spread, plain)]
    return Finding(relative(*vectors), after_ten_steps(job), remark="plain PyTorch")


def _trained(called: nn.Module, module: nn.Module, bench: Bench, dtype: torch.dtype) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in batches_of([4 * len(bench.devices) + 1] * 3, dtype):
        optimizer.zero_grad()
        output = called(x.to(bench.root))
        nn.functional.cross_entropy(output, y.to(bench.root)).backward()
        optimizer.step()


def on_side_streams(bench: Bench) -> Finding:
    """The caller has a stream of its own on every device: default streams order nothing."""
    if bench.root.type == "cpu":
        raise SkippedLaw("the CPU has no streams")
    if not hasattr(torch.get_device_module(bench.root), "Stream"):
        raise SkippedLaw(f"{bench.root.type} has one stream")
    with _side_streams(bench.distinct):
        return job_as_one_device(bench.afresh(), job=Job())


@contextlib.contextmanager
def _side_streams(devices: list[torch.device]) -> Iterator[None]:
    here = torch.accelerator.current_device_index()
    pairs = [(torch.accelerator.current_stream(d), torch.Stream(d)) for d in devices]
    for before, side in pairs:
        side.wait_stream(before)
        torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(here)
    try:
        yield
    finally:
        for before, side in pairs:
            before.wait_stream(side)
            torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(here)
