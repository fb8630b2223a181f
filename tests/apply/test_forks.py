"""A forked child has none of its parent's threads: what it calls makes them anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.programs import ROOT

from lightning_dp.parallel.apply import Executor, Task

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

PROGRAM = """
import os, signal, sys, threading, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_dp import DataParallel
from lightning_dp.parallel.step import StepParallel
from lightning_dp.parallel.apply import collectives, current_participant

signal.alarm(100)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks beside threads
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork either
CPU = torch.device("cpu")
executor, meets = sys.argv[1], sys.argv[2] == "meets"

class Net(nn.Module):
    fork_here = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3).double()

    def forward(self, x):
        if self.fork_here and current_participant().replica == 1:
            self.fork_here = False
            in_child(lambda: self.net(x) is not None and collectives.all_gather(x) is x)
        return self.net(x) + (collectives.reduce(x.mean()) if meets else x.mean())

    def training_step(self, x):
        return self(x).square().mean()

def in_child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 1
        try:
            code = 0 if check() else 2
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, status

x = torch.randn(6, 4, dtype=torch.float64)
wrapper = DataParallel(Net(), ["cpu"] * 3, executor=executor)
sizes = lambda n: (3, 2, 1)
step = StepParallel(Net(), [CPU] * 3, output_device=CPU, executor=executor, split=sizes)

def called():
    return wrapper(x)

def trained():
    step.module.zero_grad()
    loss = step.train("training_step", x)
    loss.backward()
    return loss, step.module.net.weight.grad.clone()

def evaluated():
    return step.evaluate("training_step", x)

class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return wrapper(x + i).detach()
"""

CHECKS = """
for work in (called, trained, evaluated):
    expected = work()
    same = lambda: torch.equal(torch.stack([t.sum() for t in work()]), sums)
    expected = expected if isinstance(expected, tuple) else (expected.reshape(-1),)
    sums = torch.stack([t.sum() for t in expected])
    if work is not trained:
        same = lambda: torch.equal(work().sum(), sums[0])
    for _ in range(4):  # whose workers' first forwards must not all make autograd's engine anew
        in_child(same)
    in_child(lambda: in_child(same) or True)  # and its own child
    assert same()
"""

IN_A_REPLICA = """
called()
wrapper.module.fork_here = True
expected = called()
step.train("training_step", x)
step.module.fork_here = True
step.train("training_step", x)
assert torch.equal(called(), expected)
"""

END = """
wrapper.close()
step.close()
print("all is well")
"""


def run(tmp_path: Path, program: str, *args: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + program + END)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(file), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, beside threads
def test_an_executor_has_workers_in_a_child_too() -> None:
    devices = [torch.device("cpu")] * 3
    executor = Executor(devices, "threads")
    tasks = lambda: [Task(k, device, os.getpid) for k, device in enumerate(devices)]
    assert executor.run("work", tasks()) == [os.getpid()] * 3
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if executor.run("work", tasks()) == [os.getpid()] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert executor.run("work", tasks()) == [os.getpid()] * 3
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "meets"), [("threads", "alone"), ("inorder", "meets")])
def test_a_child_computes_what_its_parent_does(executor: str, meets: str, tmp_path: Path) -> None:
    assert "all is well" in run(tmp_path, CHECKS + IN_A_REPLICA, executor, meets)
