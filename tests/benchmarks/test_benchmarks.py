"""The benchmark: its peers train the same as one device, and its arithmetic is right."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sim_devices
import torch
from benchmarks import (
    arithmetic,
    contest,
    entries,
    figure,
    machine,
    nets,
    overhead,
    processes,
    report,
)
from benchmarks.contest import Contestant, ContestantError, Entry, Rules, Turn, Turns
from benchmarks.job import Job, share
from benchmarks.models import WORKLOADS
from benchmarks.pace import Pace
from benchmarks.peers import PEERS, comm
from benchmarks.peers.dp_custom import SimpleProfiler
from benchmarks.peers.dp_custom_processes import Rows
from benchmarks.peers.loop import run, wrapping
from benchmarks.peers.ring_ddp import Ring, buckets
from benchmarks.peers.torch_data_parallel import Known
from benchmarks.peers.trainer import model_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import gradients
from places import SIM_DEVICES
from program_runs import ROOT, read_json
from torch import Tensor, nn

RUN = ROOT / "tests" / "benchmarks" / "run.py"
EXACT = {"atol": 1e-10, "rtol": 1e-9}
STEPS = 16  # four times the same four batches
SLOW = ("transformer", "language_model", "wide")
MODELS = [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in WORKLOADS]

times = st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=9)


# --- arithmetic -----------------------------------------------------------------------------------


@given(times)
def test_a_summary_is_within_its_range(seconds: list[float]) -> None:
    middle, low, high = arithmetic.summary(seconds)
    assert low == min(seconds) <= middle <= max(seconds) == high


@given(times, st.floats(0.1, 10))
def test_a_ratio_is_that_of_the_rounds_however_busy_each_was(busy: list[float], k: float) -> None:
    twice = arithmetic.ratios([2 * k * s for s in busy], [k * s for s in busy])
    assert twice == pytest.approx((2, 2, 2))


@given(times, st.integers(1, 16))
def test_efficiency_is_1_where_nothing_is_lost(seconds: list[float], k: int) -> None:
    linear = [s / k for s in seconds]
    separate = arithmetic.efficiency(seconds, linear, k, separate=True)
    shared = arithmetic.efficiency(seconds, seconds, k, separate=False)
    assert separate == pytest.approx((1, 1, 1)) and shared == pytest.approx((1, 1, 1))


def test_overhead_is_what_one_share_does_not_take() -> None:
    found = arithmetic.overhead([3.0, 5.0, 4.0], [1.0, 6.0, 1.0])
    assert found == (2.0, -1.0, 3.0)


@pytest.mark.parametrize("function", [arithmetic.ratios, arithmetic.overhead])
def test_rounds_that_do_not_match_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="as many rounds of both, got 2 and 1"):
        function([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one number"):
        arithmetic.summary([])


@given(st.integers(1, 6))
def test_each_comes_once_in_a_round_and_is_first_as_often(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = [arithmetic.in_turns(names, i) for i in range(2 * count)]
    assert all(sorted(turns) == names for turns in rounds)
    assert Counter(turns[0] for turns in rounds) == dict.fromkeys(names, 2)


def test_a_turn_has_steps_for_its_time_and_bounds() -> None:
    assert [arithmetic.steps_for(0.5, s) for s in (0.1, 0.3, 9.0, 1e-9, 0.0)] == [5, 2, 2, 500, 500]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_buckets_hold_all_parameters_from_the_last_to_the_first(sizes: list[int], m: int) -> None:
    found = buckets(sizes, first=5, most=m)
    assert [i for bucket in found for i in bucket] == list(reversed(range(len(sizes))))
    for limit, bucket in zip([5] + [m] * len(found), found, strict=False):
        assert sum(sizes[i] for i in bucket[:-1]) < limit  # it was not full before its last one


# --- models ---------------------------------------------------------------------------------------


def trained(peer: str, model: str, k: int = 1, steps: int = STEPS, **options: Any) -> list[float]:
    """The losses of a training in this process."""
    return [turn["loss"] for turn in turns_of(peer, model, k, steps, **options)]


def turns_of(peer: str, model: str, k: int, steps: int, **options: Any) -> list[dict[str, Any]]:
    """What a training in this process answers."""
    job = Job(peer, model, devices=k, samples=8, **options)
    commands, answers = io.StringIO('{"steps": 1}\n' * steps), io.StringIO()
    torch.manual_seed(0)
    PEERS[peer].train(job, Pace(job, commands, answers))
    ready, *turns = map(json.loads, answers.getvalue().splitlines())
    assert ready["ready"] and ready["parameter_bytes"] > 0 and len(turns) == steps
    return turns


def trained_in_a_loop(model: str) -> list[float]:
    job = Job("", model, samples=8)
    answers = io.StringIO()
    torch.manual_seed(0)
    module = WORKLOADS[model].make()
    pace = Pace(job, io.StringIO('{"steps": 1}\n' * STEPS), answers)
    spread = wrapping(module, lambda part: part)
    run(job, pace, module, job.batches(), torch.device("cpu"), spread)
    return [json.loads(line)["loss"] for line in answers.getvalue().splitlines()[1:]]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_learns_and_does_the_same_in_a_loop_of_plain_pytorch(
    model: str, one_thread: None
) -> None:
    losses = trained("one device", model)
    assert sum(losses[:4]) > sum(losses[-4:])
    assert trained_in_a_loop(model) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("model", ["mlp", "gan", "texts"])
def test_ours_trains_them_as_one_device_does(model: str, one_thread: None) -> None:
    losses = trained("dp_custom", model, 3, 6, options={"executor": "inorder"})
    assert losses == pytest.approx(trained("one device", model, steps=6), rel=1e-5)


@pytest.mark.parametrize("model", WORKLOADS)
def test_shares_are_all_of_a_batch(model: str) -> None:
    batch = WORKLOADS[model].batches(7)[0]
    parts = [share(batch, 3, rank) for rank in range(3)]
    keys = list(batch) if isinstance(batch, dict) else range(len(batch))
    for key in keys:
        assert torch.equal(torch.cat([part[key] for part in parts]), batch[key])
        assert [len(part[key]) for part in parts] == [3, 2, 2]


@pytest.mark.parametrize("model", WORKLOADS)
def test_rows_are_those_of_the_batches_whoever_loads_which(model: str) -> None:
    batches = WORKLOADS[model].batches(7)
    rows = Rows(batches)
    for number in (0, 3, 4, 9):
        parts = [
            rows.__getitems__(range(7 * number + a, 7 * number + b)) for a, b in ((0, 4), (4, 7))
        ]
        batch = batches[number % len(batches)]
        keys = list(batch) if isinstance(batch, dict) else range(len(batch))
        for key in keys:
            assert torch.equal(torch.cat([part[key] for part in parts]), batch[key])


def test_a_model_that_logs_its_loss_in_each_step_trains_the_same() -> None:
    plain, logging = (
        trained("one device", "mlp", steps=4, options=o) for o in ({}, {"logs": True})
    )
    assert logging == plain
    model, logged = model_of(Job("", "mlp", options={"logs": True})), []
    vars(model)["log"] = lambda name, value, **options: logged.append((name, value, options))
    loss = model.training_step(WORKLOADS["mlp"].batches(2)[0], 0)
    ((name, value, options),) = logged
    assert name == "train/loss" and torch.equal(value, loss) and not value.requires_grad
    assert options["on_step"] and options["sync_dist"]


def test_models_are_of_the_kinds_that_they_stand_for() -> None:
    assert len([m for m in nets.plain_mlp(60, 16) if isinstance(m, nn.Linear)]) == 61
    resnet = nets.TinyResNet50()
    assert [len(list(x)) for x in (resnet.parameters(), resnet.buffers())] == [161, 159]
    weights = sum(p.numel() * p.element_size() for p in WORKLOADS["wide"].make().parameters())
    assert 95e6 < weights < 110e6
    lengths = WORKLOADS["texts"].batches()[0]["lengths"]
    first, last = lengths.chunk(2)
    assert last.sum() > 4 * first.sum()


# --- nn.DataParallel and DDP's ring on simulated devices ------------------------------------------


@pytest.fixture
def devices() -> list[torch.device]:
    sim_devices.enable(SIM_DEVICES)
    return [torch.device("sim", k) for k in range(3)]


@pytest.fixture
def functions(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C functions, which are gone again afterwards."""
    for name in comm.NAMES:
        monkeypatch.setattr(torch._C, name, None, raising=False)
        monkeypatch.delattr(torch._C, name)
    comm.install()


@pytest.mark.usefixtures("functions")
def test_the_functions_of_nn_data_parallel_move_what_they_are_given(
    devices: list[torch.device],
) -> None:
    ids = [0, 1, 2]
    tensors = [
        torch.randn(shape, dtype=dtype, device="sim:0")
        for shape in ((), (3,), (2, 5), (0, 4))
        for dtype in (torch.float32, torch.float64)
    ]
    outputs = torch._C._broadcast_coalesced(tensors, ids, 16)
    assert all(a is b for a, b in zip(outputs[0], tensors, strict=True))
    for k in ids[1:]:
        assert [t.device.index for t in outputs[k]] == [k] * len(tensors)
        for copied, tensor in zip(outputs[k], tensors, strict=True):
            assert copied.dtype == tensor.dtype and torch.equal(copied.cpu(), tensor.cpu())
    x = torch.randn(7, 4)
    for dim, source in ((0, x), (1, x.to("sim:0"))):
        chunks = torch._C._scatter(source, ids, None, dim, None)
        assert [chunk.device.index for chunk in chunks] == ids[: len(chunks)]
        joined = torch._C._gather(list(chunks), dim, 1)
        assert joined.device.index == 1 and torch.equal(joined.cpu(), x)
    sizes = torch._C._scatter(x, ids, [1, 4, 2], 0, None)
    assert [len(chunk) for chunk in sizes] == [1, 4, 2]
    assert torch._C._gather([c for c in sizes], 0, -1).device.type == "cpu"


def double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: double(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(double, batch))
    return batch.double() if batch.is_floating_point() else batch


def gradients_of_a_loop_step(module: Any, batch: Any, spread: Any) -> dict[str, Tensor | None]:
    """By SGD of rate 0: nothing moves, and each backward's gradients are there in the end."""
    kept: dict[str, Tensor | None] = {}

    def backward(loss: Tensor) -> None:
        loss.backward()
        kept.update({n: g for n, g in gradients(module).items() if g is not None})

    optimizers = [torch.optim.SGD(module.parameters(), 0.0) for _ in range(2)]
    here = {"device": next(module.parameters()).device}
    moved = (
        {k: v.to(**here) for k, v in batch.items()}
        if isinstance(batch, dict)
        else tuple(x.to(**here) for x in batch)
    )
    module.loop_step(
        spread, batch if here["device"].type == "sim" else moved, moved, optimizers, backward
    )
    return kept


@pytest.mark.parametrize("model", ["mlp", "transformer", "texts", "gan"])
@pytest.mark.usefixtures("functions")
@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
def test_nn_data_parallel_on_simulated_devices_has_one_devices_gradients(
    model: str, devices: list[torch.device], one_thread: None
) -> None:
    torch.manual_seed(0)
    one = WORKLOADS[model].make().double()
    several = copy.deepcopy(one).to("sim:0")
    batch = double(WORKLOADS[model].batches(7)[0])
    expected = gradients_of_a_loop_step(one, batch, wrapping(one, lambda part: part))
    spread = wrapping(several, lambda part: Known(part, [0, 1, 2]), always=True)
    found = gradients_of_a_loop_step(several, batch, spread)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].cpu(), gradient, msg=name, **EXACT)


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_the_ring_gives_each_device_one_devices_gradients(
    model: str, devices: list[torch.device], one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.ring_ddp.buckets", lambda sizes: buckets(sizes, 99, 999))
    torch.manual_seed(0)
    one: Any = WORKLOADS[model].make().double()
    models: list[Any] = [copy.deepcopy(one).to(device) for device in devices]
    batch = double(WORKLOADS[model].batches(6)[0])
    ring = Ring(models)
    for _ in range(2):
        for k, (own, device) in enumerate(zip(models, devices, strict=True)):
            own.zero_grad()
            part = tuple(x.to(device) for x in share(batch, 3, k))
            own.training_step(part, 0).backward()
        ring.reduce()
    one.training_step(batch, 0).backward()
    expected = gradients(one)
    for own in models:
        for name, gradient in gradients(own).items():
            torch.testing.assert_close(gradient.cpu(), expected[name], msg=name, **EXACT)


# --- the contest ----------------------------------------------------------------------------------


def test_a_pace_counts_steps_and_ends_with_its_commands() -> None:
    answers = io.StringIO()
    pace = Pace(Job("", "mlp"), io.StringIO('{"steps": 2}\n{"steps": 1}\n'), answers)
    assert pace.begin([torch.device("cpu")], parameter_bytes=4)
    goes_on = [pace.step_done(loss) for loss in (3.0, torch.tensor(2.0), [torch.tensor(0.5), 1.5])]
    assert goes_on == [True, True, False]
    ready, *turns = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True, "parameter_bytes": 4}
    assert [(turn["steps"], turn["loss"]) for turn in turns] == [(2, 2.0), (1, 1.0)]
    assert all(turn["seconds"] > 0 and turn["device_bytes"] == [] for turn in turns)


def test_a_pace_without_commands_does_not_begin() -> None:
    assert not Pace(Job("", "mlp"), io.StringIO(), io.StringIO()).begin([])


def test_stages_do_not_count_what_is_inside_of_them() -> None:
    seconds: dict[str, float] = {}
    profiler = SimpleProfiler(seconds)
    start = time.perf_counter()
    names = ("[LightningModule]X.optimizer_step", "lightning_dp.apply")
    backward = ("[Strategy]DataParallelStrategy.backward", "lightning_dp.reduce")
    profiler.start(names[0])
    for nested in (names[1:], backward):
        with contextlib.ExitStack() as stack:
            for name in nested:
                stack.enter_context(profiler.profile(name))
            time.sleep(0.02)
    profiler.stop(names[0])
    assert seconds.keys() == {"optimizer", "apply", "backward", "reduce"}
    assert min(seconds["apply"], seconds["reduce"]) >= 0.02
    assert sum(seconds.values()) <= time.perf_counter() - start


@pytest.mark.parametrize("model", ["mlp", "gan"])
def test_a_step_of_ours_is_told_by_stage(model: str, one_thread: None) -> None:
    options = {"executor": "inorder", "stages": True}
    *_, turn = turns_of("dp_custom", model, 2, 4, options=options)
    stages = {"plan", "scatter", "replicate", "apply", "gather"}
    assert turn["stages"].keys() >= {*stages, "optimizer", "loader", "lightning"}
    assert min(turn["stages"].values()) >= 0
    assert 0.3 * turn["seconds"] < sum(turn["stages"].values()) <= turn["seconds"]


def test_who_cannot_take_part_says_why() -> None:
    job = Job("", "gan", "sim", 2)
    found, why_not = entries.entries(job, list(PEERS), entries.Ours())
    assert [e.name for e in found] == ["one device", "one share", "dp_custom", "nn.DataParallel"]
    assert len(why_not) == 5 and all(": " in reason for reason in why_not)
    assert [e.job.devices for e in found] == [1, 2, 2, 2]


def test_ours_takes_part_in_each_of_its_ways(tmp_path: Path) -> None:
    ours = entries.Ours(("even", "chunk"), ("auto", "threads"), also=[tmp_path])
    found, _ = entries.entries(Job("", "texts"), ["dp_custom"], ours)
    names = [entry.name for entry in found]
    assert names[:3] == ["dp_custom", "dp_custom threads", "dp_custom chunk"]
    assert len(names) == len(set(names)) == 12  # "cost" is the text's own
    assert names[6] == f"dp_custom of {tmp_path.name}" and found[6].package == tmp_path
    assert found[2].job.options == {"split": "chunk", "executor": "auto", "mode": "step"}


def turns(*seconds: float, loss: float = 1.0, failure: str = "") -> Turns:
    own = Turns(loss=loss, failure=failure)
    for value in () if failure else seconds:
        own.add(Turn(value, loss, [2**20, 3 * 2**20], 2**30, 0.001, {"apply": value / 2}))
    return own


def held(devices: int = 2) -> dict[str, Any]:
    return report.result(
        "mlp",
        "small",
        "sim",
        devices,
        8,
        {
            "one device": turns(4.0, 6.0, 8.0),
            "one share": turns(1.5, 2.5, 3.5, loss=7.0),
            "dp_custom": turns(2.0, 3.0, 4.0),
            "slow": turns(8.0, 6.0, 16.0, loss=1.1),
            "gone": turns(failure="it ended"),
        },
    )


def test_a_result_has_ratios_overhead_and_efficiency() -> None:
    own = held()["contestants"]
    assert own["dp_custom"]["to_one_device"]["median"] == 0.5
    assert own["dp_custom"]["efficiency"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert own["dp_custom"]["overhead"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert own["slow"]["ours_to_it"] == {"median": 0.25, "low": 0.25, "high": 0.5}
    assert "overhead" not in own["one device"] and "efficiency" not in own["one share"]
    assert "step" not in own["gone"]
    assert json.loads(json.dumps(held())) == held()


def test_a_table_has_a_line_for_each_and_says_who_trains_something_else() -> None:
    title, header, *lines = report.table(held())
    assert title.startswith("mlp (small), 2 x sim, 8 samples") and "to one device" in header
    assert [line.split("  ")[0] for line in lines] == list(held()["contestants"])
    assert "3e+03 [2e+03 to 4e+03]" in lines[2] and "3.0" in lines[2]
    assert lines[4].endswith("failed: it ended")
    (other,) = report.other_losses(held())
    assert other.startswith("slow: a loss of 1.1")
    (text,) = report.stages("dp_custom", turns(0.5))
    assert "apply 250.00" in text and "between them 250.00" in text


def test_processes_are_set_beside_ddp_and_failures_are_told() -> None:
    own = {
        name: turns(s) for name, s in {"1 x 4": 0.4, "shares alone": 0.2, "torch DDP": 0.3}.items()
    }
    found = processes.result({**own, "2 x 2": Turns(failure="it ended")})
    assert found["1 x 4"]["to torch DDP"]["median"] == pytest.approx(4 / 3)
    lines = processes.table(found)
    assert len(lines) == 5 and any("failed: it ended" in line for line in lines)


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_figure_has_a_curve_for_each(name: str, tmp_path: Path) -> None:
    results = [held(4), held(1)]
    assert figure.curves(results)["mlp"]["dp_custom"][0][:2] == (1, 2.0)
    assert [point[0] for point in figure.curves(results)["mlp"]["slow"]] == [1, 4]
    figure.draw(results, tmp_path / "new" / name)
    assert (tmp_path / "new" / name).stat().st_size > 5_000
    with pytest.raises(ValueError, match="Expected results of several devices"):
        figure.draw([], tmp_path / name)


def test_the_machine_is_told_where_git_knows_nothing(tmp_path: Path) -> None:
    found = machine.machine(tmp_path)
    assert found["commit"] == "unknown" and found["versions"]["torch"] and found["cores"] > 0
    json.dumps(found)


# --- the program ----------------------------------------------------------------------------------


def program(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the benchmark writes and prints, with few small steps."""
    file = tmp_path / "speed.json"
    small = ["--samples", "8", "--rounds", "2", "--steps", "2", "--warm-up", "6", "--cores", "2"]
    done = subprocess.run(
        [sys.executable, str(RUN), *small, "--json", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_json(file), done.stdout


@pytest.mark.slow
def test_on_the_cpu_all_peers_train_the_same_in_turns(tmp_path: Path) -> None:
    found, text = program(
        tmp_path,
        *("--only", "mlp", "gan", "--devices", "2", "--breakdown"),
        *("--figure", str(tmp_path / "speed.svg"), "--timeline", str(tmp_path)),
    )
    assert found["machine"]["versions"]["torch"] == torch.__version__ and "load_after" in found
    for result in found["results"]:
        own = result["contestants"]
        assert {"one device", "dp_custom", "torch DDP", "Lightning ddp"} <= own.keys()
        assert not [name for name in own if own[name]["failure"]], text
        losses = {name: own[name]["loss"] for name in own if name != "one share"}
        expected = dict.fromkeys(losses, losses["one device"])
        assert losses == pytest.approx(expected, rel=1e-4)
        assert all(len(turns["seconds"]) == 2 for turns in own.values())
        # Who waits for his turn does not compute: all of them together wait for seconds.
        assert max(turns["idle_cpu_seconds"] for turns in own.values()) < 0.5
        stages = {"plan", "scatter", "replicate", "apply", "gather", "backward", "optimizer"}
        # By hand the module calls for it within "apply", on a thread that nobody asks.
        by_engine = {"reduce"} if result["model"] == "mlp" else set()
        assert result["stages"].keys() >= stages | by_engine
    assert (tmp_path / "speed.svg").is_file()
    for name in ("mlp-1-one_device", *(f"mlp-2-{who}" for who in ("dp_custom", "torch_DDP"))):
        assert json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_on_virtual_time_two_runs_have_the_same_numbers(tmp_path: Path) -> None:
    arguments = ("--device", "sim", "--virtual", "--only", "mlp", "--devices", "2")
    again = ["dp_custom", "nn.DataParallel"]
    (first,) = program(tmp_path, *arguments)[0]["results"]
    (second,) = program(tmp_path, *arguments, "--peers", *again)[0]["results"]
    names = ["one device", "one share", "dp_custom", "nn.DataParallel", "DDP's ring"]
    assert list(first["contestants"]) == names
    losses = {name: first["contestants"][name]["loss"] for name in names if name != "one share"}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["one device"]))
    for name in again:
        one, two = (result["contestants"][name] for result in (first, second))
        assert one["seconds"] == two["seconds"] and one["loss"] == two["loss"]
        assert all(one["last"]["device_bytes"])


@pytest.mark.slow
def test_ours_in_several_processes_trains_the_same(tmp_path: Path) -> None:
    file = tmp_path / "processes.json"
    few = ["--rounds", "2", "--steps", "2", "--warm-up", "4", "--cores", "2", "--samples", "8"]
    options = ["--only", "mlp", "--logs", "yes", *few]
    command = [sys.executable, str(RUN.with_name("processes.py")), *options]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_json(file)["results"]
    assert [result["logs"] for result in found] == [True]
    for result in found:
        own = result["contestants"]
        assert not [name for name in own if own[name]["failure"]], done.stdout
        losses = {name: own[name]["loss"] for name in own if name != "shares alone"}
        assert losses == pytest.approx(dict.fromkeys(losses, losses["1 x 4"]), rel=1e-4)


@pytest.mark.slow
def test_who_fails_is_left_out_and_says_why() -> None:
    good, bad = Job("one device", "mlp", samples=4), Job("dp_custom", "mlp", samples=4)
    found = [Entry("good", good), Entry("bad", Job(**{**vars(bad), "options": {"split": "?"}}))]
    said: list[str] = []
    held = contest.hold(found, Rules(rounds=1, warm_up=1, steps=1), said.append)
    assert len(held["good"].seconds) == 1 and not held["good"].failure
    assert "split" in held["bad"].failure and not held["bad"].seconds
    assert said == [f"bad failed: {held['bad'].failure}"]


@pytest.mark.slow
def test_another_version_is_what_its_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightning_dp").mkdir()
    (tmp_path / "lightning_dp" / "__init__.py").write_text("raise ImportError('that version')")
    monkeypatch.chdir(contest.PACKAGE)  # where a version lies, too
    entry = Entry("other", Job("dp_custom", "mlp", samples=4), package=tmp_path)
    held = contest.hold([entry], Rules(rounds=1, warm_up=1, steps=1), [].append)
    assert "that version" in held["other"].failure


@pytest.mark.slow
def test_who_does_not_answer_has_failed_and_is_ended() -> None:
    contestant = Contestant(Entry("one", Job("one device", "mlp", samples=4)), patience=0.01)
    try:
        with pytest.raises(ContestantError, match="no answer"):
            contestant.wait_until_ready()
    finally:
        contestant.close(patience=0.0)
    assert [process.poll() for process in contestant._processes] != [None]


@pytest.mark.slow
@pytest.mark.parametrize("face", ["on_the_cpu", "on_separate_devices", "in_a_trainer"])
def test_every_face_of_the_overhead_is_measured(face: str) -> None:
    if face == "on_separate_devices":
        sim_devices.enable(SIM_DEVICES)
    with pytest.warns() if face == "in_a_trainer" else contextlib.nullcontext():
        found = getattr(overhead, face)(2, 3)
    assert found and all(times.seconds for times in found.values())
