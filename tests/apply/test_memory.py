"""Memory that steps on the CPU free stays for the next one; each case in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest

from lightning_dp.parallel.apply import memory

SCRIPT = """
import ctypes, gc, resource
import torch
from lightning_dp import DataParallel
from lightning_dp.parallel.apply import KeptMemory

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_step(blocks=4, size=20 * MIB):
    "Pages that the system maps while blocks, 80 MiB in all, are taken, written and freed."
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

MANY, FEW = 8_000, 1_000  # of 4 KiB in 80 MiB there are 20,480
"""

KEPT = """
MANY, FEW = 2_000, 500  # of 4 KiB in 20 MiB there are 5,120
faults = lambda: faults_of_a_step(size=5 * MIB)
assert faults() > MANY
nets = [wrapper(), wrapper()]
assert faults() < FEW
nets.pop().close()
assert faults() < FEW
nets.pop()  # not closed
gc.collect()
nets.append(wrapper())
assert faults() < FEW
nets[0].close()
nets[0].close()
assert faults_of_a_step() > 8_000
"""

AS_GLIBC_ITSELF = """
{first}
assert (faults_of_a_step(blocks=2) < FEW) is {stays}
assert faults_of_a_step() > MANY
"""

CONFIGURED = """
net = wrapper()
assert faults_of_a_step() > MANY
net.close()
"""
BLOCK = "torch.empty(32 * MIB - 8192, dtype=torch.uint8)"


def slow(script: str, environment: dict[str, str]) -> Any:
    """A variant that takes long and adds little to the first ones."""
    return pytest.param(script, environment, marks=pytest.mark.slow)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone does so")
@pytest.mark.parametrize(
    ("script", "environment"),
    [
        (KEPT, {}),
        slow(AS_GLIBC_ITSELF.format(first=BLOCK, stays=True), {}),
        slow(AS_GLIBC_ITSELF.format(first="KeptMemory().close()", stays=True), {}),
        slow(CONFIGURED, {"MALLOC_TRIM_THRESHOLD_": "131072"}),
        slow(CONFIGURED, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}),
    ],
    ids=["kept", "after a block", "after KeptMemory", "trim", "tunables"],
)
def test_freed_memory(
    script: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in memory.VARIABLES:
        monkeypatch.delenv(f"MALLOC_{name}_", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_adjustable", lambda: False)
    monkeypatch.setattr(memory, "_libc", None)
    memory.KeptMemory().close()
