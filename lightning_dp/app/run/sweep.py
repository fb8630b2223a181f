"""The end of a sweep: one table over all its jobs, also where some have failed."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only

from lightning_dp.table import print_table


class JobFailed(CompactHydraException):
    """A job of a sweep that ended with one line; Hydra goes on with the next."""


@dataclass
class SweptJob:
    """A job of a sweep, and what became of it."""

    overrides: Sequence[str]
    folder: Path
    problem: str | None = None
    outcome: dict[str, Any] = field(default_factory=dict)  # metrics.json


_jobs: list[SweptJob] = []


def is_sweep() -> bool:
    """Whether the running job is one of several."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


@contextmanager
def noted_job() -> Iterator[None]:
    """Notes for the table what becomes of a sweep's job."""
    if not is_sweep():
        yield
        return
    hydra = HydraConfig.get()
    job = SweptJob(list(hydra.overrides.task), Path(hydra.runtime.output_dir))
    _jobs.append(job)
    try:
        yield
    except BaseException as error:
        said = str(error).strip().split("\n")[0]
        kind = "" if isinstance(error, JobFailed) else f"{type(error).__name__}: "
        job.problem = f"{kind}{said}"
        raise
    file = job.folder / "metrics.json"
    job.outcome = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@contextmanager
def table_in_the_end() -> Iterator[None]:
    """Prints the table when the program ends, however it ends; jobs of other processes are not in.

    A launcher of Hydra that runs jobs elsewhere leaves their numbers in their folders alone.
    """
    try:
        yield
    finally:
        jobs = [*_jobs]
        _jobs.clear()
        if jobs:
            sys.stderr.flush()
            rank_zero_only(show)(jobs)


def show(jobs: Sequence[SweptJob]) -> None:
    """Prints what the jobs differ in, what came out, and where it lies."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    logged = list(dict.fromkeys(name for job in jobs for name in job.outcome))
    tested = [name for name in logged if name.startswith("test/")]
    metrics = tested or [name for name in logged if name.startswith("val/")]
    rows = []
    for job in jobs:
        differs = " ".join(_short(o) for o in job.overrides if o not in common) or "-"
        found = [_number(job.outcome.get(name), 4) for name in metrics]
        took = _number(job.outcome.get("ms_per_step"), 1)
        if job.problem is not None:
            found = ["failed", *found[1:]] if found else found
            took = took if found else "failed"
        rows.append([differs, *found, took, job.folder.name])
    headings = ["job", *metrics, "ms per step", "folder"]
    print_table(headings, rows, right=headings[1:-1])
    for job in jobs:
        if job.problem is not None:
            print(f"job {job.folder.name} failed: {job.problem}")
    print(f"sweep folder: {jobs[0].folder.parent}")


def _short(override: str) -> str:
    """A number that a sweeper has drawn, in four digits; the folder has them all."""
    key, _, value = override.partition("=")
    is_long = re.fullmatch(r"-?\d+\.\d{4,}(e-?\d+)?", value)
    return f"{key}={float(value):.4g}" if is_long else override


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
