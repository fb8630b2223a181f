"""The benchmark: its peers train the same as one device, and a contest ends with a table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sim_devices
import torch
from benchmarks.models import WORKLOADS
from benchmarks.peers import PEERS, Job, Pace, Ring, moved, share
from benchmarks.step import files_of, overheads, plain_step
from support.device_kinds import SIM_DEVICES
from support.oracle import gradients
from support.processes import in_another_process

RUN = Path(__file__).with_name("run.py")
MODELS = [name for name in WORKLOADS if name not in ("wide", "language_model", "even_layers")]


class Turns:
    """A pipe that asks for turns of three steps, and keeps the answers."""

    def __init__(self, turns: int = 2) -> None:
        self._steps: list[int | None] = [3] * turns + [None]
        self.answers: list[dict[str, float]] = []

    def recv(self) -> int | None:
        return self._steps.pop(0)

    def send(self, answer: dict[str, float]) -> None:
        self.answers.append(answer)


def losses(peer: str, model: str, **job: Any) -> list[float]:
    """The losses at the ends of turns."""
    torch.manual_seed(0)
    pipe, own = Turns(), Job(peer, model, samples=8, **job)
    PEERS[peer](own, Pace(own, pipe))  # type: ignore[arg-type]  # in place of a connection
    assert all(answer["seconds"] > 0 for answer in pipe.answers[1:])
    return [answer["loss"] for answer in pipe.answers[1:]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", MODELS)
def test_ours_trains_as_one_device_does(model: str) -> None:
    expected = losses("one device", model)
    # Statistics of batch norm are those of a device's own samples.
    tolerance = 0.3 if model in ("convnet", "resnet") else 1e-4
    actual = losses("dp_custom", model, devices=3)
    assert actual == pytest.approx(expected, rel=tolerance) and len(set(expected)) == 2


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
def test_nn_data_parallel_and_the_ring_train_as_one_device_does() -> None:
    sim_devices.enable(SIM_DEVICES)
    expected = losses("one device", "mlp", device="sim")
    for peer in ("nn.DataParallel", "DDP's ring"):
        torch.sim.set_links("pcie4_peer")
        try:
            actual = losses(peer, "mlp", device="sim", devices=4, links="pcie4_peer")
        finally:
            torch.sim.set_links(None)
            torch.sim.set_clock("wall")
        assert actual == pytest.approx(expected, rel=1e-4), peer


def test_the_ring_gives_each_device_the_mean_of_all_gradients() -> None:
    sim_devices.enable(SIM_DEVICES)
    (batch,) = WORKLOADS["wide"].batches(12, count=1)
    torch.manual_seed(0)
    one = WORKLOADS["wide"].make()
    models = [WORKLOADS["wide"].make() for _ in range(3)]
    for k, model in enumerate(models):
        model.load_state_dict(one.state_dict())
        model.to(torch.device("sim", k))
    ring = Ring(models)
    one.loss(batch).backward()
    for k, model in enumerate(models):
        model.loss(moved(share(batch, 3, k), torch.device("sim", k))).backward()
    ring.reduce()
    for model in models:
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient.cpu(), gradients(one)[name])


def contest(*options: str) -> str:
    """What a run of two devices prints."""
    command = [sys.executable, str(RUN), "--devices", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_contest_ends_with_a_table() -> None:
    peers = ("one device", "dp_custom", "torch DDP", "nn.DataParallel")
    short = ("--quick", "--rounds", "2", "--warm-up", "3")
    without, _, columns, *rows = contest("--only", "mlp", *short, "--peers", *peers).splitlines()
    assert without == "without nn.DataParallel: it does not spread on the CPU"
    assert columns.split()[-1] == "loss" and [row[:10].strip() for row in rows] == list(peers[:3])
    losses = [float(row.split()[-1]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.slow
def test_on_virtual_time_a_contest_says_the_same_each_time() -> None:
    peers = ("--peers", "one share", "dp_custom")
    first, second = (contest("--device", "sim", "--virtual", *peers) for _ in range(2))
    assert first == second and "efficiency" in first


def test_overheads_are_measured() -> None:
    found = overheads(2, steps=2)
    assert len(found) == 4 and all(0 < low <= middle for middle, low in found.values())


@pytest.mark.parametrize(
    "executor, most, of_engine", [("inorder", 168, 130), ("threads", 230, 195)]
)
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_meeting(
    executor: Any, most: int, of_engine: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    calls = in_another_process(plain_step, executor)
    # In threads some ten more or less: the main thread learns of the ends of several replicas at
    # once, or one by one.
    assert calls.total() <= most, calls.most_common(20)
    files = files_of(calls)
    engine = {name: count for name, count in files.items() if name.startswith("parallel/")}
    assert len(files) <= 14 and len(engine) <= 9, files.most_common()
    assert sum(engine.values()) <= of_engine, engine
    assert not [call for call in calls if "collectives" in call[0] or "meet" in call[1]]
