"""`python -m lightning_dp doctor`: verbs, options, the table, the file, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from oracle import devices_of
from patience import quickest
from places import SIM_DEVICES, on_separate
from program_runs import ROOT, read_json
from test_doctor_proof import OneDeviceIsWrong
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import __main__ as program
from lightning_dp import sim
from lightning_dp.app.devices import cpu_replicas
from lightning_dp.app.doctor import command as doctor
from lightning_dp.app.doctor.own_workload import own_workloads
from lightning_dp.doctor import OWN_TWO, Law, Plan, Report, Result, examine
from lightning_dp.doctor.advice import NO_TIME, Timing, advice, first_steps, timings
from lightning_dp.doctor.aside import Aside
from lightning_dp.doctor.bandwidth import Link, measured_links
from lightning_dp.doctor.ddp import DdpProcesses, NoDdpError, why_no_ddp
from lightning_dp.doctor.environment import environment
from lightning_dp.doctor.law import Finding
from lightning_dp.doctor.machine import machine
from lightning_dp.doctor.report import show_timings
from lightning_dp.doctor.timing import times_in_one_process
from lightning_dp.doctor.watchdog import Watchdog

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
on_sim = pytest.mark.sim_only("It is about what the doctor says of simulated devices.")


def enable(*names: str) -> None:
    """Simulated devices, where they are named."""
    if any("sim" in name for name in names):
        sim.enable(SIM_DEVICES)


class Tiny(LightningModule):
    """A user's module, with its data in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(48.0).view(16, 3), batch_size=8)


class WholeBatch(Tiny):
    """Its loss is no mean over samples."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(batch)
        return (output - output.mean()).square().sum().sqrt()


class TinyData(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(20, 3), batch_size=10)


class NoData(Tiny):
    train_dataloader = LightningModule.train_dataloader


# --- verbs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, verb, left",
    [
        ([], "train", []),
        (["trainer.max_epochs=2"], "train", ["trainer.max_epochs=2"]),
        (["-m", "strategy=ddp,single"], "train", ["-m", "strategy=ddp,single"]),
        (["--cfg", "job"], "train", ["--cfg", "job"]),
        (["~callbacks", "model=x"], "train", ["~callbacks", "model=x"]),
        (["+a=1"], "train", ["+a=1"]),
        (["train", "model=x"], "train", ["model=x"]),
        (["train", "--help"], "train", ["--help"]),
        (["evaluate", "run=x"], "evaluate", ["run=x"]),
        (["env", "--json"], "env", ["--json"]),
        (["doctor", "--devices", "cpu:4"], "doctor", ["--devices", "cpu:4"]),
        (["doctor", "experiment=gan"], "doctor", ["experiment=gan"]),
    ],
)
def test_a_first_word_is_a_verb(
    arguments: list[str], verb: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", *arguments])
    called = SimpleNamespace(main=mock.Mock(side_effect=lambda: list(sys.argv[1:])))
    imported = mock.patch("lightning_dp.__main__.importlib.import_module", return_value=called)
    with imported as module:
        assert program.main() == left
    module.assert_called_once_with(f"lightning_dp.app.{verb}")


@pytest.mark.parametrize(
    "word, meant", [("docter", "doctor"), ("evalaute", "evaluate"), ("nwe", "new"), ("xyz", None)]
)
def test_an_unknown_verb_says_which_there_are(
    word: str,
    meant: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", word])
    assert program.main() == 2
    told = capsys.readouterr().err
    assert told.startswith("error: expected one of train, ") and f"got {word!r}." in told
    assert told.count("\n") == 1
    assert told.endswith(f"Did you mean {meant!r}?\n") == (meant is not None)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cpu", ["cpu"] * cpu_replicas()),
        ("cpu:3", ["cpu"] * 3),
        ("cpu,cpu", ["cpu"] * 2),
        ("cpu,", ["cpu"]),
        pytest.param("sim:2", ["sim:0", "sim:1"], marks=on_sim),
        pytest.param("sim", [f"sim:{k}" for k in range(SIM_DEVICES)], marks=on_sim),
        pytest.param("sim:3,", ["sim:3"], marks=on_sim),
        pytest.param("sim:0,sim:2", ["sim:0", "sim:2"], marks=on_sim),
    ],
)
def test_devices_are_named_by_kind_number_or_list(text: str, expected: list[str]) -> None:
    enable(text)
    assert list(map(str, doctor.devices_named(text))) == expected


def test_without_devices_there_are_replicas_on_the_cpu_or_all_accelerators() -> None:
    for found, expected in (([CPU], [CPU] * cpu_replicas()), ([torch.device("cuda", 0)],) * 2):
        with mock.patch("lightning_dp.app.doctor.command.all_devices", return_value=found):
            assert doctor.devices_named(None) == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--devices", "cpu:0"], "--devices: expected a number of devices after 'cpu'"),
        (["--devices", "cpu:many"], "at least 1, got 'many'"),
        pytest.param(["--devices", "sim:99,"], "--devices[0]: expected one of sim:0", marks=on_sim),
        (["--devices", "gpu"], "--devices"),
        (
            ["--only", "nonsense"],
            "expected words of a law's name, got 'nonsense'. There are 'links",
        ),
        (["--module", "test_doctor.Nothing"], "--module: expected the path of a class"),
        (["--module", "test_doctor.TinyData"], "--module: expected a LightningModule"),
        (["--data", "test_doctor.TinyData"], "--data: expected beside --module"),
        (["word"], "expected options, or KEY=VALUE such as experiment=digits, got 'word'"),
        (["experiment=nonsense"], "experiment: expected one of contrastive, denoise, digits, "),
        (["--module", "test_doctor.Tiny", "experiment=gan"], "--module: expected to be alone"),
    ],
)
def test_unusable_options_are_one_clear_line(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    enable(*arguments)
    with pytest.raises(SystemExit) as stop:
        doctor.main(list(arguments))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and words in said and said.startswith("error: ")


# --- a run ---------------------------------------------------------------------------------------


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "found" / "doctor.json"
    code = doctor.main([*arguments, "--output", str(output)])
    return code, read_json(output)


@pytest.mark.parametrize("count", [3, 1])
def test_a_healthy_machine(
    on: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = "".join(f"{device}," for device in devices_of(count))
    only = ("--only", "gather", "--only", "one step, float64", "--only", "side streams")
    code, found = run(tmp_path, "--devices", devices, *only)
    printed = capsys.readouterr().out
    assert code == 0 and found["verdict"] == "pass" and found["culprits"] == []
    laws = {law["law"]: law for law in found["proof"]}
    assert set(laws) == {"gather(scatter(x)) == x", "one step, float64", "on side streams"}
    step = laws["one step, float64"]
    assert step["verdict"] == "pass" and 0 <= step["difference"] < step["allowed"] == 1e-10
    assert found["devices"] == list(map(str, devices_of(count)))
    assert (laws["on side streams"]["verdict"] == "skip") == (on == "cpu")
    machine = found["environment"]
    assert machine["versions"]["torch"] == torch.__version__
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    assert machine["dp_custom_takes"] == (gpus or ["cpu"]) and isinstance(machine["gil"], bool)
    assert [entry["device"] for entry in machine["devices"]] == list(
        dict.fromkeys(found["devices"])
    )
    ends = set(found["devices"]) | {"cpu"}
    assert len(machine["links"]) == len(ends) * (len(ends) - 1)
    assert all(link["bytes_per_second"] > 1e5 for link in machine["links"])
    assert "Healthy: 3 laws: " in printed and "one step, float64" in printed
    assert torch.__version__ in printed


def test_a_fault_is_the_exit_status_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = Law("parts", lambda bench: Finding(float("nan"), 0.0, ("sim:5", "sim:5 -> cpu"), "odd"))
    with mock.patch("lightning_dp.app.doctor.command.LAWS", (law, law)):
        code, found = run(tmp_path, "--devices", "cpu:2", "--only", "parts")
    printed = capsys.readouterr().out
    assert code == 1 and found["verdict"] == "fail"
    assert found["culprits"] == ["sim:5", "sim:5 -> cpu"]
    assert found["proof"][0]["difference"] == "nan"
    assert "NOT HEALTHY: 2 laws: 0 hold, 2 do not" in printed
    assert "Culprits: sim:5, sim:5 -> cpu." in printed


@on_separate
def test_a_device_that_computes_wrongly_is_in_the_report(
    on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = devices_of(3)
    only = ("--only", "devices", "--only", "links")
    with OneDeviceIsWrong(devices[1], 1e-6):
        code, found = run(tmp_path, "--devices", ",".join(map(str, devices)), *only)
    assert code == 1 and found["culprits"] == [str(devices[1])]
    assert f"Culprits: {devices[1]}.\n" in capsys.readouterr().out


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(1)])
def test_ctrl_c_ends_the_doctor(stop: BaseException, tmp_path: Path) -> None:
    def examine(plan: Any) -> None:
        if isinstance(stop, SystemExit):  # as Lightning does, in the middle of a fit
            stop.__context__ = KeyboardInterrupt()
        raise stop

    with mock.patch("lightning_dp.app.doctor.command.examine", examine):
        assert doctor.main(["--devices", "cpu:2"]) == 130


def test_nothing_is_timed_where_laws_do_not_hold(tmp_path: Path) -> None:
    law = Law("broken", lambda bench: Finding(1.0))
    with mock.patch("lightning_dp.app.doctor.command.LAWS", (law,)):
        plan = doctor._plan(doctor._parser().parse_args([]), [CPU] * 2, [], 0.0)
    assert plan.workloads == OWN_TWO
    plan = Plan(plan.devices, plan.laws, plan.workloads, output=tmp_path / "doctor.json")
    with mock.patch("lightning_dp.doctor.examination.timings") as timed:
        assert not examine(plan).is_healthy
    timed.assert_not_called()


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:4", "sim:8", "cpu:1"])
def test_the_doctor_as_a_user_calls_it(devices: str, tmp_path: Path) -> None:
    assert quickest(lambda: _called(devices, tmp_path), 60) < 60


def _called(devices: str, folder: Path) -> float:
    """What it took by its own clock: from the process's begin, until other processes are to end.

    More if that is 10 s less than it took in all.
    """
    command = [sys.executable, "-m", "lightning_dp", "doctor", "--devices", devices]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_json(folder / "doctor.json")
    assert found["seconds"] <= seconds
    assert found["verdict"] == "pass" and len(found["proof"]) > 25
    by_name = {timing["workload"]: timing for timing in found["timings"]}
    assert set(by_name) == {"convnet", "transformer"}
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert "The report to attach: doctor.json" in done.stdout
    return max(float(found["seconds"]), 6 * (seconds - float(found["seconds"])))


# --- environment ---------------------------------------------------------------------------------


def test_the_environment_of_gpus_says_capability_memory_and_peers() -> None:
    properties = SimpleNamespace(name="Fast 9", total_memory=2**34, major=9, minor=0)
    fake = SimpleNamespace(
        get_device_properties=lambda device: properties,
        mem_get_info=lambda device: (2**33, 2**34),
        max_memory_allocated=None,
        memory_stats=None,
    )
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with (
        mock.patch("torch.get_device_module", return_value=fake),
        mock.patch("lightning_dp.doctor.environment.measured_links", return_value=[]),
    ):
        found = environment(devices, machine())
    assert found["devices"][1] == {
        "device": "cuda:1",
        "name": "Fast 9",
        "memory_bytes": 2**34,
        "free_bytes": 2**33,
        "compute_capability": "9.0",
    }


@on_sim
def test_peer_access_is_asked_of_cuda_alone() -> None:
    enable("sim")
    links = measured_links([torch.device("sim", 0), torch.device("sim", 1)])
    assert [(link.source, link.target) for link in links][:3] == [
        ("cpu", "sim:0"),
        ("cpu", "sim:1"),
        ("sim:0", "cpu"),
    ]
    assert all(link.peer_access is None for link in links)
    pair = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with (
        mock.patch("lightning_dp.doctor.bandwidth._bandwidth", return_value=1e9),
        mock.patch("torch.cuda.can_device_access_peer", lambda a, b: a.index < b.index),
    ):
        links = measured_links(pair)
    known = {(link.source, link.target): link.peer_access for link in links}
    assert known["cuda:0", "cuda:1"] is True and known["cuda:1", "cuda:0"] is False
    assert known["cpu", "cuda:0"] is None


# --- advice --------------------------------------------------------------------------------------


def environment_of(*links: Link, load: float = 0.0, **device: Any) -> dict[str, Any]:
    entry = {"device": "cuda:0", "name": "A", "memory_bytes": 2**34} | device
    return {
        "machine": {"cores": 4, "load": load},
        "links": [link.as_json() for link in links],
        "devices": [{"device": "cuda:1", "name": "A", "memory_bytes": 2**34}, entry],
    }


PAIR = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    "seconds, words",
    [
        ({"threads": 0.6, "inorder": 0.9}, "takes 0.60 of one device's time (threads"),
        ({"threads": 0.9, "inorder": 0.5}, "(inorder, as executor='auto' finds)"),
        ({"threads": 1.2, "inorder": 1.1}, "1.10 times one device's time: no gain at this size"),
        ({"threads": 0.6, "inorder": 0.9, "DDP": 0.4}, "strategy='ddp', which takes 0.40"),
        ({"threads": 0.6, "inorder": 0.9, "DDP": 0.58}, "Trainer(strategy='dp_custom', devices=2)"),
    ],
)
def test_advice_follows_from_the_times(seconds: dict[str, float], words: str) -> None:
    found = [Timing("net", 8, {"one device": 1.0, **seconds})]
    (line,) = advice(found, PAIR, environment_of())
    assert words in line


@pytest.mark.parametrize(
    "found, words",
    [
        (environment_of(Link("cuda:0", "cuda:1", 1e9, False)), "No peer access: cuda:0 -> cuda:1"),
        (environment_of(memory_bytes=2**33), "split='memory'"),
        (environment_of(name="B"), "split='adaptive'"),
        (environment_of(load=9.0), "The machine is busy (load 9 on 4 cores)"),
    ],
)
def test_advice_follows_from_the_machine(found: dict[str, Any], words: str) -> None:
    (line,) = advice([], PAIR, found)
    assert words in line
    assert advice([], PAIR, environment_of(Link("cuda:0", "cuda:1", 1e9, True))) == []


@on_sim
def test_times_of_simulated_devices_are_no_advice() -> None:
    enable("sim")
    devices = [torch.device("sim", 0), torch.device("sim", 1)]
    found = [Timing("net", 8, {"one device": 1.0, "threads": 0.1, "inorder": 0.1})]
    (line,) = advice(found, devices, environment_of())
    assert "say nothing of GPUs" in line


@pytest.mark.parametrize(
    "devices, words",
    [
        pytest.param(["sim:0", "sim:1"], "in one process", marks=on_sim),
        (["cpu"], "one device"),
        (["cuda:0", "cuda:0"], "once"),
        (["cpu", "cpu"], ""),
        (["cuda:0", "cuda:1"], ""),
    ],
)
def test_why_there_is_no_ddp(devices: list[str], words: str) -> None:
    enable(*devices)
    reason = why_no_ddp(list(map(torch.device, devices)))
    assert words in reason and bool(words) == bool(reason)


def test_step_times_end_when_time_does(tmp_path: Path) -> None:
    (workload,) = own_workloads("test_doctor.Tiny", None, [])
    batches = workload.batches(0)
    everything = times_in_one_process(workload, batches, [CPU] * 2, tmp_path, lambda: 60.0)
    assert set(everything) == {"one device", "threads", "inorder"}
    assert all(seconds > 0 for seconds in everything.values())
    least = times_in_one_process(workload, batches, [CPU] * 2, tmp_path, lambda: 0.0)
    assert set(least) == {"one device"}
    (none,) = timings([workload], [CPU] * 2, tmp_path, None, lambda: -1.0)
    assert none.seconds == {} and none.why_not == {"all": "no time was left"}


def test_a_compiler_that_is_ended_leaves_nothing_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves a part of a file, which would be taken for a whole one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "users"))
    program, begun = tmp_path / "compiler.py", tmp_path / "begun"
    program.write_text(
        "import os, pathlib, time\n"
        "cache = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "cache.mkdir(parents=True)\n"
        "(cache / 'kernel.so').touch()\n"
        f"pathlib.Path({str(begun)!r}).write_text(str(cache))\n"
        "time.sleep(60)\n"
    )
    aside = Aside(Law("compiles", lambda bench: Finding()), [sys.executable, str(program)])
    while not begun.exists() or not begun.read_text():
        time.sleep(0.01)
    assert aside.result(0).verdict == "skip"
    assert not (tmp_path / "users").exists() and not Path(begun.read_text()).exists()


@pytest.mark.parametrize("seconds_before", [31.0, 58.0])
def test_a_slow_machine_is_told_what_was_not_timed(
    seconds_before: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Laws are looked at all the same; nothing is started that would be too late."""
    law = Law("good", lambda bench: Finding())
    never_started = ["never started"]
    plan = Plan(
        [CPU] * 2,
        laws=[law],
        workloads=[*own_workloads("test_doctor.Tiny", None, []), OWN_TWO[0]],
        command=never_started,
        ddp_command=never_started,
        output=tmp_path / "doctor.json",
        seconds_before=seconds_before,
    )
    with (
        mock.patch("lightning_dp.doctor.examination.Aside") as aside,
        mock.patch("lightning_dp.doctor.examination.DdpProcesses") as ddp,
    ):
        found = examine(plan)
    aside.assert_not_called()
    ddp.assert_not_called()
    assert found.is_healthy and found.seconds > seconds_before
    assert {result.law: result.verdict for result in found.proof} == {
        "good": "pass",
        "compiled module": "skip",
    }
    assert [timing.seconds for timing in found.timings] == [{}, {}]
    printed = capsys.readouterr().out
    assert "Not timed, as no time was left: test_doctor.Tiny; convnet." in printed
    assert "check_first_step=True" in printed
    assert f"The start took {seconds_before:.0f} s of the minute" in printed


def test_ways_that_were_not_timed_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, left_out = {"one device": 0.02}, dict.fromkeys(["inorder", "DDP"], NO_TIME)
    show_timings([Timing("net", 8, seconds, left_out)])
    text = capsys.readouterr().out
    assert f"Not timed, as {NO_TIME}: net with dp_custom, in order; net with DDP." in text
    assert "No DDP" not in text


@pytest.mark.slow
def test_a_process_knows_how_long_it_has_been_there() -> None:
    program = """if True:
        import time
        from lightning_dp.doctor.machine import seconds_of_process
        time.sleep(1)
        print(seconds_of_process(), time.process_time())
    """
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    seconds, computed = map(float, done.stdout.split())
    assert seconds <= time.monotonic() - begin + 0.1, done.stderr
    # Also when it has not computed, where the system says so.
    assert seconds > computed + (0.8 if sys.platform == "linux" else -0.1)


@pytest.mark.parametrize(
    "program, seconds, why",
    [
        ("raise OSError('no network')", 60, "no network"),
        ("import time; time.sleep(99)", 1, "longer than 1 s"),
    ],
    ids=["fails", "hangs"],
)
def test_ddp_that_gives_no_times_says_why_and_is_ended(
    program: str, seconds: float, why: str
) -> None:
    processes = DdpProcesses([sys.executable, "-c", program], [CPU] * 2)
    try:
        with pytest.raises(NoDdpError, match=why):
            processes.measure({"net": {"samples": 8, "steps": 2}}, seconds)
    finally:
        processes.close()
    assert all(process.poll() is not None for process in processes._processes)


@pytest.mark.slow
def test_ddp_is_timed_in_processes_of_its_own() -> None:
    command = [sys.executable, "-m", "lightning_dp.app.doctor.process", "--devices", "cpu:2"]
    processes = DdpProcesses(command, [CPU] * 2)
    try:
        tasks = {name: {"samples": 8, "steps": 2} for name in ("convnet", "transformer")}
        times = processes.measure(tasks, 200)
    finally:
        processes.close()
    assert set(times) == set(tasks) and all(0 < seconds < 60 for seconds in times.values())


# --- the user's own ------------------------------------------------------------------------------


def test_a_users_module_is_timed_with_its_own_batches(tmp_path: Path) -> None:
    (workload,) = own_workloads("test_doctor.Tiny", None, [])
    assert [len(batch) for batch in workload.batches(0)] == [8, 8]
    (other,) = own_workloads("test_doctor.NoData", "test_doctor.TinyData", [])
    assert [len(batch) for batch in other.batches(0)] == [10, 10]
    (found,) = timings([workload], [CPU] * 2, tmp_path, None, lambda: 60.0)
    assert found.samples == 8 and set(found.seconds) == {"one device", "threads", "inorder"}
    (told,) = first_steps([workload], [CPU] * 2, tmp_path, lambda: 60.0)
    assert "give the step of the root alone" in told
    (workload,) = own_workloads("test_doctor.WholeBatch", None, [])
    (told,) = first_steps([workload], [CPU] * 2, tmp_path, lambda: 60.0)
    assert "do not give the step of the root alone" in told


def test_a_users_module_without_batches_is_told_what_to_do(tmp_path: Path) -> None:
    (workload,) = own_workloads("test_doctor.NoData", None, [])
    (found,) = timings([workload], [CPU] * 2, tmp_path, None, lambda: 60.0)
    assert found.seconds == {} and "--data" in found.why_not["all"]
    assert any("--data" in line for line in advice([found], [CPU] * 2, environment_of()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "contrastive", "gan"])
def test_an_experiment_is_timed(name: str, tmp_path: Path) -> None:
    (workload,) = own_workloads(None, None, [f"experiment={name}"])
    (found,) = timings([workload], [CPU] * 2, tmp_path, None, lambda: 60.0)
    assert found.samples and set(found.seconds) == {"one device", "threads", "inorder"}, found
    assert (workload.strategy["mode"] == "forward") == (name == "contrastive")


# --- what hangs ----------------------------------------------------------------------------------


def test_the_watchdog_knows_what_the_doctor_was_at() -> None:
    seen: list[str] = []
    called = threading.Event()

    def call(what: str) -> None:
        seen.append(what)
        called.set()

    with Watchdog(60, call) as watchdog:
        watchdog.tell("quick")
        watchdog._seconds = 0.01
        watchdog.tell("a link")
        assert called.wait(30)
        watchdog._seconds = 60
        watchdog.tell("another")
    assert seen == ["a link"]


@pytest.mark.slow
def test_a_device_that_hangs_ends_the_doctor_with_a_report(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from lightning_dp.app.doctor import command as doctor\n"
        "from lightning_dp.doctor import Law, examination\n"
        "examination.STUCK = 10.0\n"
        "doctor.LAWS = (Law('stuck', lambda bench: time.sleep(99)),)\n"
        "sys.exit(doctor.main(['--devices', 'cpu:2', '--only', 'stuck']))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1 and "no end after 10 s of: stuck" in done.stderr, done.stderr
    found = read_json(tmp_path / "doctor.json")
    assert found["verdict"] == "fail" and found["unfinished"] == "stuck"
    assert found["environment"]["versions"]


def test_the_file_is_json_whatever_was_found(tmp_path: Path) -> None:
    results = [Result("a", "fail", float("inf"), 0.0, ("x",), "é\n\x1b"), Result("b", "skip")]
    report = Report(["cpu"], {"path": Path("p")}, results, [Timing("t", None, {})], ["take care"])
    report.write(tmp_path / "doctor.json")
    found = json.loads((tmp_path / "doctor.json").read_text(), parse_constant=pytest.fail)
    assert found["proof"][0]["difference"] == "inf" and found["advice"] == ["take care"]
