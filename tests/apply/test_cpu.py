"""On the CPU: memory that steps free stays for the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, gc, resource
import torch
from lightning_dp import DataParallel

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_step(blocks=4, size=5 * MIB):
    "Pages of 4 KiB that the system maps while blocks are taken, written and freed."
    kept = [0] * blocks
    def step():
        for i in range(blocks):
            kept[i] = libc.malloc(size)
            libc.memset(kept[i], 1, size)
        for address in kept:
            libc.free(address)
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
assert faults_of_a_step() > MANY
"""

KEPT = """
nets = [wrapper(), wrapper()]
assert faults_of_a_step() < FEW
nets.pop().close()
assert faults_of_a_step() < FEW
nets.pop()  # not closed
gc.collect()
nets.append(wrapper())
assert faults_of_a_step() < FEW
nets[0].close()
nets[0].close()
assert faults_of_a_step(size=20 * MIB) > 8_000
assert faults_of_a_step(2, 20 * MIB) < FEW, "as after a block that a program has freed itself"
"""

CONFIGURED = """
net = wrapper()
assert faults_of_a_step() > MANY
net.close()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone does so")
@pytest.mark.parametrize(
    ("script", "environment"),
    [
        (KEPT, {}),
        pytest.param(CONFIGURED, {"MALLOC_TRIM_THRESHOLD_": "131072"}, marks=pytest.mark.slow),
    ],
    ids=["kept", "configured"],
)
def test_freed_memory(script: str, environment: dict[str, str]) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, env=own | environment)
    assert done.returncode == 0, done.stderr[-3000:]
