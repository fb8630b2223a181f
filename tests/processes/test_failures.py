"""torchrun supervises: a rank that is killed or raises ends the job."""

import subprocess
import sys
import time
from pathlib import Path

import pytest


def start(fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).parent / "started.py"), str(folder), fault]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_failing_rank_ends_the_job(fault: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    done = start(fault, tmp_path)
    assert done.returncode != 0
    assert "ChildFailedError" in done.stderr
    assert {"kill": "SIGKILL", "raise": "the data are bad"}[fault] in done.stderr
    assert not list(tmp_path.glob("done-*"))
    assert time.monotonic() - begin < 90


@pytest.mark.slow
def test_the_process_group_ends_before_python_does(tmp_path: Path) -> None:
    """Else one of Gloo's threads may outlive Python, and abort a job that has succeeded."""
    done = start("none", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"group-{rank}").read_text() for rank in range(2)] == ["False", "False"]
