"""`python -m lightning_dp plan` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program_runs import command_line, read_json

from lightning_dp import __main__ as program
from lightning_dp.app.doctor.own_workload import own_workloads
from lightning_dp.app.plan import command as plan
from lightning_dp.app.plan.options import LOCAL

GIVEN = ("--step", "100ms", "--parameters", "25M", "--devices", "8")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        plan.main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def rows(text: str) -> list[list[str]]:
    found = [line.split() for line in text.splitlines() if re.match(r" *[\d,]+  ", line)]
    assert [row[0] for row in found] == [f"{2**n:,}" for n in range(11)]
    return found


def test_the_verb_is_plan(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", "plan", *GIVEN])
    assert program.main() == 0
    assert rows(capsys.readouterr().out)[0][:3] == ["1", "8", "100"]
    monkeypatch.setattr(sys, "argv", ["lightning-dp", "plans"])
    assert program.main() == 2
    assert "Did you mean 'plan'?" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_program_of_its_own(tmp_path: Path) -> None:
    text = command_line("plan", *GIVEN, cwd=tmp_path)
    assert rows(text)[0][-4:] == ["100.0%", *rows(text)[0][-3:]]
    assert not list(tmp_path.iterdir()), "a plan leaves nothing that nobody has asked for"


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--scaling", "strong", "--batch", "2048", "--fixed", "5ms", "--share", "80ms"),
        ("--noise", "9ms", "--share", "60ms", "--local", "pcie4", "--network", "1Gb"),
        ("--step", "30s", "--share", "20s", "--noise", "1s", "--network", "100Mb"),
        ("--capacity", "24GiB", "--activations", "3GiB", "--optimizer", "momentum"),
        ("--parameters", "7B", "--step", "5s", "--capacity", "80GiB", "--no-overlap"),
    ],
)
def test_what_is_printed_fits_100_columns(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *GIVEN, *more)
    assert max(map(len, text.splitlines())) <= 100
    assert len(rows(text)) == 11 and "Efficiency: " in text
    head = next(line for line in text.splitlines() if "machines  devices" in line).split()
    for row in rows(text):
        numbers = dict(zip(head, row, strict=True))
        parts = head[3 : head.index("eff.")]
        total = sum(float(numbers[part].replace(",", "")) for part in parts)
        assert total == pytest.approx(float(numbers[head[2]].replace(",", "")), rel=0.03)


def test_all_numbers_and_a_picture_go_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "new" / "plan.json", tmp_path / "new" / "plan.svg"
    text = printed(capsys, *GIVEN, "--json", str(files[0]), "--plot", str(files[1]))
    found = read_json(files[0])
    assert [row["machines"] for row in found["rows"]] == [2**n for n in range(11)]
    assert found["rows"][0]["step_seconds"] == pytest.approx(0.1)
    assert found["rows"][0]["wider"] is None and found["rows"][5]["wider_seconds"] > 0
    assert found["job"]["size"] == 1e8 and found["machine"]["local"] == vars(LOCAL["pcie4"])
    assert " ".join(found["advice"]) in " ".join(text.replace("\n- ", " ").split())
    assert files[1].read_text().startswith("<?xml")


def test_numbers_of_machines_are_those_that_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, *GIVEN, "--machines", "1", "3", "6")
    assert re.findall(r"^ +(\d+)  ", text, re.MULTILINE) == ["1", "3", "6"]


def test_a_benchmark_and_a_doctor_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"seconds": [0.2, 0.1, 0.3], "parameter_bytes": 4e6, "failure": ""}
    contestants = {"dp_custom": own, "one share": {"seconds": [0.15], "failure": ""}}
    result = {"model": "mlp", "devices": 4, "device": "cpu", "samples": 32}
    file = tmp_path / "speed.json"
    file.write_text(json.dumps({"results": [{**result, "contestants": contestants}]}))
    text = printed(capsys, "--from", str(file))
    assert text.startswith("mlp: 200 ms per step with 4 devices and 32 samples")
    assert "after the backward" in text and "python" in text
    assert rows(text)[0][1:4] == ["4", "200", "150"]
    timing = {"workload": "convnet", "samples": 32, "seconds": {"one device": 0.3, "threads": 0.1}}
    file.write_text(json.dumps({"timings": [timing], "devices": ["cuda:0", "cuda:1"]}))
    assert "--parameters: expected how many" in refused(capsys, "--from", str(file))
    text = printed(capsys, "--from", str(file), "--parameters", "94k")
    assert "convnet: 100 ms per step with 2 devices" in text and "while the backward runs" in text
    file.write_text("no json")
    assert "error: " in refused(capsys, "--from", str(file))
    assert "error: " in refused(capsys, "--from", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "expected one of --step, --from, --measure"),
        ((*GIVEN, "--from", "x.json"), "got --step and --from"),
        (("--step", "1s"), "--parameters: expected how many"),
        (("--step", "soon"), "expected a time such as 100ms"),
        ((*GIVEN, "--network", "0Gb"), "expected more than 0 bytes per second"),
        ((*GIVEN, "--local", "wire"), "expected one of memory, pcie4"),
        ((*GIVEN, "--scaling", "strong"), "--batch: expected the samples"),
        ((*GIVEN, "--backward-share", "1"), "--backward-share: expected a number from 0"),
        ((*GIVEN, "--machines", "0"), "--machines: expected at least 1, got 0"),
        ((*GIVEN, "--devices", "0"), "--devices: expected at least 1, got 0"),
        ((*GIVEN, "--exchanges", "-1"), "--exchanges: expected at least 0"),
        ((*GIVEN, "--bucket", "0"), "--bucket: expected at least 1"),
        ((*GIVEN, "--fixed", "1s"), "--fixed: expected at most"),
        ((*GIVEN, "--step", "1ms"), "step: expected more than"),
        ((*GIVEN, "--plot", "a.pdf"), "--plot: expected a file named .png or .svg"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *arguments)
    assert words in said and "error: " in said.splitlines()[-1]


def test_a_link_can_be_given_by_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "within one 26 GB/s, 2 us" in printed(capsys, *GIVEN, "--local", "26GB,2us")
    assert "within one 375 GB/s, 2 us" in printed(capsys, *GIVEN, "--local", "nvlink4")
    assert "within one 26 GB/s, 15 us" in printed(capsys, *GIVEN)


@pytest.mark.slow
def test_an_experiment_is_measured_here(tmp_path: Path) -> None:
    arguments = ("--measure", "experiment=digits", "--on", "cpu:2", "--json", "plan.json")
    text = command_line("plan", *arguments, cwd=tmp_path)
    assert "experiment=digits: " in text and "with 2 devices and 240 samples" in text
    found = read_json(tmp_path / "plan.json")
    (workload,) = own_workloads(None, None, ["experiment=digits"])
    assert found["job"]["size"] == 4 * sum(p.numel() for p in workload.make().parameters())
    assert found["rows"][0]["step"]["compute"] > 0 and not found["machine"]["refreshes"]


@pytest.mark.slow
def test_hydra_goes_on_as_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dp", "--cfg", "job", "experiment=digits"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "strategy:" in done.stdout
