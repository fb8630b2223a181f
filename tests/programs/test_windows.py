"""What Windows lacks is not needed: the programs run without it. None of this has run on Windows.

Python's and PyTorch's own modules are imported first, as their editions for Windows do without.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import python

WITHOUT = """
import asyncio, ctypes, multiprocessing.util, os, pathlib, platform, signal, sys, warnings
import lightning.pytorch, matplotlib.pyplot, rich.console, sklearn.datasets, torch, torchmetrics

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # an import of it fails
for name in ("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "getuid"):
    delattr(os, name)
for name in ("SIGHUP", "SIGQUIT", "SIGALRM", "SIGCHLD", "setitimer", "pthread_kill"):
    delattr(signal, name)
platform.libc_ver = lambda *args: ("", "")

class NoLibrary:
    def __init__(self, *args, **kwargs):
        raise OSError("there is no C library of POSIX")

ctypes.CDLL = NoLibrary
# Text files are in UTF-8, which is not Windows' own encoding.
warnings.filterwarnings("error", category=EncodingWarning, module="lightning_dp")
from lightning_dp.__main__ import main
"""

REFUSED = set('<>:"|?*\\')
"""Characters that Windows takes in no name of a file; ":" also ends MLflow's metric names there."""


PROGRAM = """
def run(*arguments):
    sys.argv[1:] = arguments
    assert not main(), arguments

run("trainer.devices=2", "trainer.max_epochs=1")
[checkpoint] = [file.as_posix() for file in pathlib.Path().rglob("last.ckpt")]
run("evaluate", "run=" + checkpoint.partition("/checkpoints")[0])
run("convert", checkpoint, "weights.pt")
run("env")
run("doctor", "--devices=cpu,cpu")
"""


@pytest.mark.slow
def test_every_verb_runs_without_what_windows_lacks(tmp_path: Path) -> None:
    done = python("-X", "warn_default_encoding", "-c", WITHOUT + PROGRAM, cwd=tmp_path)
    assert done.stdout.count("test/acc") >= 2 and "Healthy" in done.stdout
    names = {part for file in tmp_path.rglob("*") for part in file.relative_to(tmp_path).parts}
    assert len(names) > 5 and not [name for name in names if REFUSED & set(name)], names
    columns = next(tmp_path.rglob("metrics.csv")).read_text().partition("\n")[0]
    assert "dp/" in columns and not REFUSED & set(columns), columns
