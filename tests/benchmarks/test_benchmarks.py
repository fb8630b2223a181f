"""The benchmark: its peers train the same as one device, and a contest ends with a table."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import sim_devices
import torch
from benchmarks.peers import PEERS, Job, Pace
from benchmarks.step import plain_step
from support.device_kinds import SIM_DEVICES
from support.processes import in_another_process

RUN = Path(__file__).with_name("run.py")


def losses(peer: str, **job: Any) -> list[float]:
    """The losses at the ends of two turns of three steps."""
    torch.manual_seed(0)
    here, there = Pipe()
    for steps in (3, 3, None):
        here.send(steps)
    own = Job(peer, "mlp", "sim", samples=8, **job)
    PEERS[peer](own, Pace(own, there))
    _, *answers = (here.recv() for _ in range(3))
    return [answer["loss"] for answer in answers]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
def test_every_peer_trains_as_one_device_does() -> None:
    sim_devices.enable(SIM_DEVICES)
    expected = losses("one device")
    for peer in ("dp_custom", "nn.DataParallel"):
        actual = losses(peer, devices=4)
        assert actual == pytest.approx(expected, rel=1e-4) and len(set(actual)) == 2, peer


def contest(*options: str) -> str:
    """What a run of two devices prints."""
    command = [sys.executable, str(RUN), "--devices", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_contest_ends_with_a_table() -> None:
    peers = ("one device", "dp_custom", "torch DDP")
    _, columns, *rows = contest("--only", "mlp", "--quick", "--peers", *peers).splitlines()
    assert columns.split()[-1] == "loss" and [row[:10].strip() for row in rows] == list(peers)
    losses = [float(row.split()[-1]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.slow
def test_on_virtual_time_a_contest_says_the_same_each_time() -> None:
    peers = ("--peers", "one share", "dp_custom")
    first, second = (contest("--device", "sim", "--virtual", *peers) for _ in range(2))
    assert first == second and "efficiency" in first


@pytest.mark.parametrize(
    "executor, most, of_engine", [("inorder", 168, 130), ("threads", 230, 195)]
)
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_rendezvous(
    executor: Any, most: int, of_engine: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    calls = in_another_process(plain_step, executor)
    # In threads some ten more or less: the main thread learns of the ends of several replicas at
    # once, or one by one.
    assert calls.total() <= most, calls.most_common(20)
    files = Counter(file for file, _ in calls.elements())
    engine = {name: count for name, count in files.items() if name.startswith("parallel/")}
    assert len(files) <= 14 and len(engine) <= 9, files.most_common()
    assert sum(engine.values()) <= of_engine, engine
    assert not [call for call in calls if "collectives" in call[0] or "meet" in call[1]]
