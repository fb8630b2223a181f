"""The proof: the laws, in the order in which they are looked at, and what becomes of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from lightning_dp.doctor.bench import Bench, Job, muted
from lightning_dp.doctor.compilers import compiled_module
from lightning_dp.doctor.culprits import MISSING_WAIT, culprits_of, is_race
from lightning_dp.doctor.failures import checkpoints, error_in_a_replica, memory_runs_out
from lightning_dp.doctor.law import Law, Result, SkippedLaw
from lightning_dp.doctor.parts import (
    devices_compute_as_the_cpu_does,
    gather_undoes_scatter,
    links_carry_what_was_sent,
    replicas_have_the_roots_weights,
)
from lightning_dp.doctor.steps import (
    as_one_device,
    drop_in,
    idle_devices,
    job_as_one_device,
    on_side_streams,
    same_metrics,
    uneven_shards,
)
from lightning_dp.doctor.subjects import Complete, Contrastive, Manual, Normalized
from lightning_dp.parallel.errors import described

PRECISIONS = {
    "float64": "64",
    "float32": "32",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed, scaler": "16-mixed",
}

PARTS = (
    Law("links carry what was sent", links_carry_what_was_sent, is_about_parts=True),
    Law("devices compute as the CPU", devices_compute_as_the_cpu_does, is_about_parts=True),
    Law("gather(scatter(x)) == x", gather_undoes_scatter, is_about_parts=True),
    Law("replicas have the weights", replicas_have_the_roots_weights, is_about_parts=True),
)
STEPS = [
    Law(f"{count}, {name}", partial(as_one_device, precision=precision, steps=steps))
    for name, precision in PRECISIONS.items()
    for count, steps in (("one step", 1), ("ten steps", 10))
]
JOBS = {
    "all layers have gradients": Job(Complete),
    "one after another": Job(strategy={"executor": "inorder"}),
    "loss on the host": Job(strategy={"output_device": "cpu"}),
    "forward mode": Job(Contrastive, strategy={"mode": "forward"}),
    "outputs on the host": Job(Contrastive, strategy={"mode": "forward", "output_device": "cpu"}),
    "manual optimisation": Job(Manual),
    "synced batch norm": Job(Normalized, trainer={"sync_batchnorm": True}),
    "split='adaptive'": Job(strategy={"split": "adaptive"}),
    "split='memory'": Job(strategy={"split": "memory"}),
}
LAWS = (
    *PARTS,
    *STEPS,
    Law("uneven shards", uneven_shards),
    Law("idle devices", idle_devices),
    *(Law(name, partial(job_as_one_device, job=job)) for name, job in JOBS.items()),
    Law("on side streams", on_side_streams),
    Law("logs, metrics, predictions", same_metrics),
    Law("DataParallel, the drop-in", drop_in),
    Law("error in a replica", error_in_a_replica),
    Law("out of memory", memory_runs_out),
    Law("checkpoint", checkpoints),
)
MOST_SEARCHES = 3
"""For a culprit: each takes as long as many laws."""

COMPILED = Law("compiled module", compiled_module)
"""Apart from the others: compilers may take minutes."""


def prove(
    bench: Bench, laws: Sequence[Law] = LAWS, tell: Callable[[str], None] = lambda name: None
) -> list[Result]:
    """Looks at the laws, one after another.

    Args:
        bench: the devices.
        laws: which ones.
        tell: is told the name of each before it is looked at.
    """
    results: list[Result] = []
    for law in laws:
        tell(law.name)
        failed = [result for result in results if result.verdict == "fail"]
        is_known = any(result.culprits for result in failed) or len(failed) >= MOST_SEARCHES
        results.append(look_at(bench, law, asks_why=not is_known))
    return results


def look_at(bench: Bench, law: Law, *, asks_why: bool = True) -> Result:
    """Looks at one law, and where it does not hold, for the reason.

    `asks_why` is False where another law has found a culprit, which this one would find again.
    """
    start = time.perf_counter()
    with muted(), _one_thread():
        result = _look_at(bench, law, asks_why)
    return Result(**{**vars(result), "seconds": time.perf_counter() - start})


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for each operation: they are small, and several would wait for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _look_at(bench: Bench, law: Law, asks_why: bool) -> Result:
    try:
        finding = law.look(bench)
    except SkippedLaw as reason:
        return Result(law.name, "skip", remark=str(reason))
    except Exception as error:  # whatever it is, it means that the law does not hold
        if is_race(error):
            culprits: tuple[str, ...] = (MISSING_WAIT,)
        else:
            culprits = culprits_of(bench, law, ()) if asks_why else ()
        return Result(law.name, "fail", culprits=culprits, remark=_told(error))
    measured = finding.difference, finding.allowed
    if finding.holds:
        return Result(law.name, "pass", *measured, remark=finding.remark)
    culprits = culprits_of(bench, law, finding.culprits) if asks_why else finding.culprits
    return Result(law.name, "fail", *measured, culprits, finding.remark)


def _told(error: BaseException) -> str:
    """An error's type, text and notes: the notes say which replica it comes from."""
    notes = " ".join(map(str, getattr(error, "__notes__", ())))
    return " ".join([f"{type(error).__qualname__}: {described(error, str)}", notes]).strip()
