"""An error in one process ends all of them soon, and all of them name it."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from several_processes import ProcessesError, run_in_processes
from started import Options, fitted


def job(folder: Path, options: Options) -> list[str]:
    """The names of the threads that stay after a fit."""
    fitted(folder, options)
    return [thread.name for thread in threading.enumerate()]


def failed(folder: Path, count: int, **options: Any) -> str:
    """What the processes say, each with its traceback."""
    with pytest.raises(ProcessesError) as error:
        run_in_processes(job, count, folder, Options(devices=count, **options))
    return str(error.value)


def first_named(text: str, rank: int) -> str:
    """The line by which another process names the first to fail."""
    lines = [line for line in text.splitlines() if "The first to fail was" in line]
    assert lines, text
    assert all(f"was process {rank} of " in line for line in lines), text
    return lines[0]


def test_an_error_and_a_process_that_hangs_are_named(tmp_path: Path) -> None:
    text = failed(tmp_path / "a", 2, fault="raise", batch=3)
    line = first_named(text, 1)
    assert "ValueError: the data are bad" in line
    assert f"machine {os.uname().nodename}, pid " in line
    assert "training, epoch 0, batch 2" in line
    text = failed(tmp_path / "b", 2, fault="kill", rank=0)
    assert "has not been heard of" in first_named(text, 0)


def test_no_thread_stays(tmp_path: Path) -> None:
    for names in run_in_processes(job, 2, tmp_path, Options()):
        assert not [name for name in names if "lightning_dp" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"), [("raise", 0), ("raise", 2), ("kill", 0), ("hang", 2), ("interrupt", 0)]
)
def test_every_kind_of_failure_of_three(fault: str, rank: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    text = failed(tmp_path, 3, fault=fault, rank=rank, timeout=6.0)
    line = first_named(text, rank)
    if fault == "hang":
        assert "in happen (" in line
        assert "is alive, but does not come" in line
    # Torchrun ends the others as soon as one has ended, maybe before they can say it.
    assert text.count("The first to fail was") in (1, 2)
    assert time.monotonic() - begin < 80


@pytest.mark.slow
@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_sigterm_ends_all_at_the_same_batch(rank: int, tmp_path: Path) -> None:
    text = failed(tmp_path, 2, fault="term", rank=rank)
    assert text.count("SIGTERMException") >= 2
    assert "The first to fail" not in text
