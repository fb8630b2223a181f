"""The benchmark: its peers train the same as one device, and a contest ends with a table."""

from __future__ import annotations

import io
import json
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


def losses(peer: str, model: str, turns: int = 2, **job: object) -> list[float]:
    """The losses at the ends of turns of three steps."""
    torch.manual_seed(0)
    commands, answers = io.StringIO("3\n" * turns), io.StringIO()
    own = Job(peer, model, samples=8, **job)  # type: ignore[arg-type]  # the rest of a job's fields
    PEERS[peer](own, Pace(own, commands, answers))
    ready, *found = map(json.loads, answers.getvalue().splitlines())
    assert ready["bytes"] > 0 and all(answer["seconds"] > 0 for answer in found)
    return [answer["loss"] for answer in found]


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
    machine = {"links": None, "speed": {}}
    for peer in ("nn.DataParallel", "DDP's ring"):
        torch.sim.set_links("pcie4_peer")
        try:
            actual = losses(peer, "mlp", device="sim", devices=4, machine=machine)
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


@pytest.mark.slow
def test_a_contest_ends_with_a_table(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    peers = ("one device", "dp_custom", "torch DDP", "nn.DataParallel")
    short = ("--quick", "--rounds", "2", "--warm-up", "3", "--json", str(file))
    command = [sys.executable, str(RUN), "--devices", "2", "--only", "mlp", *short]
    done = subprocess.run([*command, "--peers", *peers], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "without nn.DataParallel: it does not spread on the CPU" in done.stdout
    found = json.loads(file.read_text())["results"][0]["contestants"]
    assert list(found) == ["one device", "dp_custom", "torch DDP"]
    losses = [own["loss"] for own in found.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    for own in found.values():
        middle, low, high = own["dp_custom to it"]
        assert not own["failure"] and own["MiB"] > 0 and 0 < low <= middle <= high
    table = done.stdout.splitlines()
    assert sum(line.startswith(tuple(found)) for line in table) == 3


@pytest.mark.slow
def test_on_virtual_time_a_contest_says_the_same_each_time() -> None:
    options = ("--device", "sim", "--virtual", "--devices", "2", "--only", "mlp", "--peers")
    command = [sys.executable, str(RUN), *options, "one device", "dp_custom", "DDP's ring"]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.stdout == second.stdout and "efficiency" in first.stdout, first.stderr


def test_overheads_are_measured() -> None:
    found = overheads(2, steps=2)
    assert len(found) == 4 and all(0 < low <= middle for middle, low in found.values())


@pytest.mark.parametrize("executor, files, most", [("inorder", 24, 168), ("threads", 27, 235)])
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_meeting(
    executor: Any, files: int, most: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    calls = in_another_process(plain_step, executor)
    # In threads some ten more or less: the main thread learns of the ends of several replicas at
    # once, or one by one.
    assert calls.total() <= most, calls.most_common(20)
    assert len(files_of(calls)) <= files, files_of(calls).most_common()
    assert not [call for call in calls if "collectives" in call[0] or "meet" in call[1]]
