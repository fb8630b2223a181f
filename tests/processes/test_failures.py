"""torchrun supervises: a rank that is killed or raises ends the job."""

import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_failing_rank_ends_the_job(fault: str, tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "started.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, script, str(tmp_path), fault],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "ChildFailedError" in done.stderr
    assert {"kill": "SIGKILL", "raise": "the data are bad"}[fault] in done.stderr
    assert not list(tmp_path.glob("done-*"))
    assert time.monotonic() - begin < 90
