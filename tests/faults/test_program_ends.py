"""The end of a program waits for nobody, also where replicas are at work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.programs import ROOT

PROGRAM = """
import signal, sys, threading, time
import torch
from torch import nn
from lightning_dp import DataParallel
from lightning_dp.parallel.step import StepParallel

what, how = sys.argv[1], sys.argv[2]
is_in = threading.Event()
CPU = torch.device("cpu")

class Net(nn.Linear):
    works = True

    def forward(self, x):
        if self.works and threading.current_thread().name == "dp-replica-1":
            self.work()
        return super().forward(x)

    def training_step(self, x):
        return self(x).square().mean()

    def work(self):
        is_in.set()
        if how == "waits":
            threading.Event().wait()
        x = torch.randn(200, 200, requires_grad=True)
        while how == "computes":
            (x @ x).clamp(-1, 1).sum().backward()

net = Net(4, 3)
x = torch.randn(6, 4)
executor = "threads"
wrapper = DataParallel(net, ["cpu"] * 3, executor=executor)
sizes = lambda n: (3, 2, 1)
engine = StepParallel(net, [CPU] * 3, output_device=CPU, executor=executor, split=sizes)

def use():
    if what == "call":
        wrapper(x)
    elif what == "step":
        engine.train("training_step", x).backward()

if how == "idle":
    net.works = False
    use()
else:
    threading.Thread(target=use, daemon=True).start()
    assert is_in.wait(60)
print("the end", time.monotonic(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "waits", "computes"])
@pytest.mark.parametrize("what", ["call", "step"])
def test_the_program_ends(what: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "program.py", what, how],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    said, moment = done.stdout.rsplit(maxsplit=1)
    # The same clock for all processes; an interpreter takes a moment to end.
    seconds = time.monotonic() - float(moment)
    assert (said, done.stderr, done.returncode) == ("the end", "", 0)
    assert seconds < 30
