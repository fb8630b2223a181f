"""On the CPU: memory that steps free stays for the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import gc, resource
import torch
from lightning_dp import DataParallel

def faults_of_a_step(blocks=4, mib=5):
    "Pages of 4 KiB that the system maps while tensors are made and freed."
    step = lambda: [torch.ones(mib * 2**18) for _ in range(blocks)]
    for _ in range(2):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def wrapper():
    net = DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    net(torch.ones(4, 2))
    return net

MANY, FEW = 2_000, 500  # in 20 MiB there are 5,120
if faults_of_a_step() <= MANY:
    raise SystemExit(9)
nets = [wrapper(), wrapper()]
assert faults_of_a_step() < FEW
nets.pop().close()
assert faults_of_a_step() < FEW
nets.pop()  # not closed
gc.collect()
assert faults_of_a_step(mib=20) > 8_000
assert faults_of_a_step(2, mib=20) < FEW, "as after a block that a program has freed itself"
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone does so")
def test_freed_memory() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT]
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 9:  # else something at the end of the heap kept its memory anyway
            break
    assert done.returncode == 0, done.stderr[-3000:]
