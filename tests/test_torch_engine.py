"""The private name of torch in `parallel.torch_engine` does what is said of it there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from programs import ROOT

from lightning_dp.parallel.torch_engine import renew_engine

PROGRAM = """
import os, signal
import torch
from lightning_dp.parallel.torch_engine import renew_engine

signal.alarm(60)
x = torch.ones(1, requires_grad=True)
x.sin().backward()
child = os.fork()
renew_engine()
x.sin().backward()
assert torch.equal(x.grad, 2 * x.cos())
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_execution_engine_is_checkpoint_valid_in_a_forked_child() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert renew_engine(), "outside of a backward it says yes"
