"""Memory that steps on the CPU free stays for the next one; each case in a new process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_dp.parallel.workers import freed_memory

SCRIPT = """
import ctypes, gc, resource
import torch
from lightning_dp import DataParallel
from lightning_dp.parallel.workers import KeptMemory
from lightning_dp.parallel.workers.freed_memory import is_decided

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_step(blocks=10, size=20 * MIB):
    "Pages that the system maps while blocks, 200 MiB in all, are taken, written and freed."
    kept = [0] * blocks
    def step():
        for i in range(blocks):
            kept[i] = libc.malloc(size)
            libc.memset(kept[i], 1, size)
        for address in kept:
            libc.free(address)
    for _ in range(4):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def wrapper():
    net = DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    net(torch.ones(4, 2))
    return net

MANY, FEW = 20_000, 1_000  # of 4 KiB in 200 MiB there are 51,200
"""

on_glibc = pytest.mark.skipif(not freed_memory.is_glibc(), reason="glibc alone does so")


def run(script: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name in (*freed_memory.VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@on_glibc
def test_while_an_engine_is_open_a_step_takes_the_memory_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = """
assert faults_of_a_step() > MANY
net = wrapper()
assert faults_of_a_step() < FEW
used = resident()
net.close()
assert resident() < used - 150 * MIB, (resident(), used)  # given back
assert faults_of_a_step() > MANY
"""
    run(script, monkeypatch)


@on_glibc
def test_it_ends_with_the_last_of_several_and_with_one_that_nobody_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = """
nets = [wrapper(), wrapper()]
nets.pop().close()
assert faults_of_a_step() < FEW
nets.pop()
gc.collect()
assert faults_of_a_step() > MANY
net = wrapper()  # again
assert faults_of_a_step() < FEW
net.close()
net.close()
assert faults_of_a_step() > MANY
"""
    run(script, monkeypatch)


@on_glibc
@pytest.mark.parametrize("how", ["ours", "a freed block of 32 MiB", "nothing"])
def test_afterwards_thresholds_are_as_after_a_freed_block_of_32_mib(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {
        "ours": "KeptMemory().close()",
        "a freed block of 32 MiB": "torch.empty(32 * MIB - 8192, dtype=torch.uint8)",
        "nothing": "",
    }
    stays = how != "nothing"
    script = f"""
{ways[how]}
assert (faults_of_a_step(blocks=2) < FEW) is {stays}
assert faults_of_a_step() > MANY
"""
    run(script, monkeypatch)


@on_glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_TOP_PAD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_environment_says_of_malloc_stays(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
assert is_decided()
net = wrapper()
assert faults_of_a_step() > MANY
net.close()
"""
    run(script, monkeypatch, **{name: value})


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "is_glibc", lambda: False)
    monkeypatch.setattr(freed_memory, "_libc", None)
    freed_memory.KeptMemory().close()
