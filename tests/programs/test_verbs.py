"""The programs' common face: `--help` of each, and what `env` tells and does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from program_runs import ROOT, command_line

from lightning_dp import __main__ as program
from lightning_dp import __version__, doctor
from lightning_dp.doctor import report
from lightning_dp.table import SCREEN, ScreenParser


def fits(text: str) -> bool:
    lines = text.rstrip("\n").split("\n")
    return len(lines) <= SCREEN[0] and max(map(len, lines)) <= SCREEN[1]


def test_the_programs_help_fits_a_screen_and_names_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", "--help"])
    assert program.main() == 0
    text = capsys.readouterr().out
    assert fits(text) and all(f"\n  {verb} " in text for verb in program.VERBS)


@pytest.mark.parametrize("verb", program.VERBS)
def test_the_help_of_every_verb_fits_a_screen(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", verb, "--help"])
    try:
        program.main()
    except SystemExit as end:
        assert not end.code
    text = capsys.readouterr().out
    assert text.startswith("usage: ") and fits(text), text


def test_the_help_of_train_names_every_group() -> None:
    text = (ROOT / "conf" / "hydra" / "default.yaml").read_text()
    named = set(text[text.index("Groups (") : text.index("Keys:")].split())
    groups = {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    assert groups - {"hydra", "__pycache__"} <= named


def test_a_help_that_is_too_long_names_all_options_and_where_they_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = ScreenParser("tool", description="Does it.")
    for number in range(30):
        parser.add_argument(f"--option-{number}", help=f"the meaning of {number}")
    assert fits(parser.format_help()) and "the meaning" not in parser.format_help()
    assert all(f"--option-{number}" in parser.format_help() for number in range(30))
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help-all"])
    assert "the meaning of 29" in capsys.readouterr().out


def test_env_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.env(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"python", "torch", "lightning", "torchmetrics", "hydra-core", "lightning-dp"}
    assert wanted | {"GIL", "system", "cpu"} <= set(found)
    assert found["lightning-dp"] == __version__ and "cores" in found["cpu"]
    assert doctor.env([]) == 0
    text = capsys.readouterr().out
    for name in wanted:
        assert found[name] in text


def test_env_tells_variables_that_matter_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("MALLOC_CONF", "prof_prefix:/home/somebody/x")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    monkeypatch.setenv("SLURM_JOB_USER", "somebody")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for arguments in ([], ["--json"]):
        doctor.env(arguments)
        text = capsys.readouterr().out
        assert "MALLOC_ARENA_MAX" in text and "LOCAL_RANK" in text and "OMP_NUM_THREADS" in text
        assert not any(word in text for word in ("secret", "somebody", "WANDB", str(Path.home())))


def test_env_tells_name_memory_and_capability_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = mock.Mock(spec=["name", "major", "minor"], major=9, minor=0)
    properties.name = "A GPU"
    module = mock.Mock()
    module.get_device_properties.return_value = properties
    module.mem_get_info.return_value = (60 * 2**30, 80 * 2**30)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    told = report._accelerator(torch.device("cuda", 0))
    assert told == "A GPU, compute capability 9.0, 80.0 GiB, 60.0 GiB free"
    bare = mock.Mock(spec=["synchronize"])
    monkeypatch.setattr(torch, "get_device_module", lambda device: bare)
    assert report._accelerator(torch.device("mps", 0)) == "mps"


@pytest.mark.slow
def test_the_old_names_go_on_working(tmp_path: Path) -> None:
    for module in ("lightning_dp.app.evaluate",):
        assert command_line("--help", cwd=tmp_path, module=module).startswith("usage: ")


@pytest.mark.parametrize(
    ("verb", "takes"),
    [
        ("convert", "SRC DST"),
        ("doctor", "[--devices WHICH]"),
        ("env", "[--json]"),
    ],
)
def test_the_first_line_of_a_help_says_what_a_verb_takes_besides_options(
    verb: str,
    takes: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", verb, "--help"])
    with pytest.raises(SystemExit):
        program.main()
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.endswith(f" {takes}" if takes else f"lightning_dp {verb} [options]"), usage


@pytest.mark.parametrize("verb", ["train", "evaluate"])
@pytest.mark.parametrize("mistake", ["nonsense", "--nonsense=3", "--devices"])
def test_a_word_that_is_no_option_is_one_line(
    verb: str,
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-dp", verb, mistake])
    with pytest.raises(SystemExit) as end:
        program.main()
    said = capsys.readouterr().err + (end.value.code if isinstance(end.value.code, str) else "")
    assert said.startswith("error: ") and said.strip().count("\n") == 0, said
    assert mistake in said and "KEY=VALUE, such as trainer.devices=2" in said
    assert said.count("nonsense") <= 2 and "Error parsing" not in said
