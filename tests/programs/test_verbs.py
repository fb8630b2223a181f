"""The programs' common face: `--help` of each, and what `env` tells and does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
from program_runs import ROOT, command_line

from lightning_dp import __main__ as program
from lightning_dp import __version__
from lightning_dp.app import env
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
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"python", "torch", "lightning", "torchmetrics", "hydra-core", "lightning-dp"}
    assert wanted <= set(found["versions"]) and found["versions"]["lightning-dp"] == __version__
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_bytes"] > 0
    assert found["devices"][0]["name"]
    assert env.main([]) == 0
    text = capsys.readouterr().out
    for value in found["versions"].values():
        assert value in text


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
        env.main(arguments)
        text = capsys.readouterr().out
        assert "MALLOC_ARENA_MAX" in text and "LOCAL_RANK" in text and "OMP_NUM_THREADS" in text
        assert not any(word in text for word in ("secret", "somebody", "WANDB", str(Path.home())))


def test_env_tells_memory_and_driver_of_gpus() -> None:
    device = {"device": "cuda:0", "name": "A GPU", "memory_bytes": 80 * 2**30}
    found = {
        "versions": {"torch": "2"},
        "machine": {"system": "Linux", "processor": "p", "cores": 4, "threads": 2}
        | {"memory_bytes": None},
        "cuda": {"built_for": "13.0", "cudnn": None, "driver": "580.1"},
        "devices": [device],
        "variables": {},
    }
    with mock.patch.multiple(env, collected=lambda: found, print=mock.DEFAULT, create=True) as own:
        env.main([])
    text = own["print"].call_args.args[0]
    assert "80.0 GiB" in text and "driver 580.1" in text and "cudnn" not in text
    assert "A GPU" in text


@pytest.mark.slow
def test_the_old_names_go_on_working(tmp_path: Path) -> None:
    for module in ("lightning_dp.convert", "lightning_dp.app.evaluate"):
        assert command_line("--help", cwd=tmp_path, module=module).startswith("usage: ")


@pytest.mark.parametrize(
    ("verb", "takes"),
    [
        ("convert", "SRC DST"),
        ("estimate", "[experiment=NAME KEY=VALUE ...]"),
        ("doctor", "[experiment=NAME KEY=VALUE ...]"),
        ("plan", None),
        ("new", "FOLDER"),
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


@pytest.mark.parametrize("verb", ["estimate", "doctor", "plan"])
@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("experiment=digit", "Did you mean digits?"),
        ("model.widht=3", "Did you mean model.width?"),
        ("experiment", "KEY=VALUE"),
    ],
)
def test_an_experiment_that_is_not_there_is_told_as_in_a_training(
    verb: str,
    option: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--measure"] if verb == "plan" else []
    monkeypatch.setattr(sys, "argv", ["lightning-dp", verb, *own, option])
    try:
        code = program.main()
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code in (1, 2) and said.startswith("error: ") and said.strip().count("\n") == 0
    assert hint in said and "Config search path" not in said, said
