"""`python -m lightning_dp` as a user types it: verbs, mistakes, and without the extras.

Signals: `test_runs.py`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import ROOT, python, read_json

from lightning_dp import __main__ as program

# --- in this process ------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", *program.VERBS])
def test_every_verb_has_a_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dp", *verb.split(), "--help"])
    try:
        program.main()
    except SystemExit as end:
        assert not end.code
    text = capsys.readouterr().out
    assert text.startswith("usage: ") and text.count("\n") < 40
    assert verb or all(f"\n  {name} " in text for name in program.VERBS)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("docter", 2, "expected one of train, .* got 'docter'"),
        ("trainer.device=2", 1, r"Could not override 'trainer.device'"),
        ("strategy=dp_adaptive", 1, r"Could not find 'strategy/dp_adaptive'(?s:.*)dp_custom"),
        ("train --devices=2", 2, "unrecognized arguments: --devices=2"),
    ],
)
def test_a_mistyped_command_is_explained_and_leaves_no_folder(
    arguments: str, status: int, said: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-dp", *arguments.split()])
    try:
        code = program.main()
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr().err
    assert code == status and re.search(said, printed) and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


# --- without any extra ----------------------------------------------------------------------------

EXTRAS = ("rich", "scikit_learn", "sklearn", "matplotlib", "mpl_toolkits")
STARTS = (
    *(["--help"], ["train", "--help"], ["evaluate", "--help"], ["convert", "--help"]),
    *(["doctor", "--help"], ["env"]),
)
OWN_JOB = (
    *("experiment=tutorial", "callbacks=default", "hydra.run.dir=run"),
    *("trainer.accelerator=cpu", "trainer.devices=2", "test=false"),
    *("callbacks.model_checkpoint.monitor=train/loss", "~callbacks.early_stopping"),
)
"""A job that needs no extra, with the callbacks of every job: a progress bar among them."""
NEEDED = (
    "error: expected the package scikit-learn, which is not installed. Install the extra "
    "'examples': python -m pip install 'lightning-dp[examples]'\n"
)


@pytest.mark.slow
def test_a_base_install_starts_every_verb_and_names_a_missing_extra(tmp_path: Path) -> None:
    """In one process: its imports take longer than all of them."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for folder in (path for path in sys.path if path.endswith("site-packages")):
        for file in Path(folder).iterdir():
            link = packages / file.name
            if not file.name.startswith(EXTRAS) and file.suffix != ".pth" and not link.exists():
                link.symlink_to(file)
    code = (
        "import sys; from lightning_dp.__main__ import main\n"
        f"for arguments in {(*STARTS, [], OWN_JOB)}:\n"
        "    sys.argv = ['lightning-dp', *arguments]\n"
        "    try: status = main()\n"
        "    except SystemExit as end: status = end.code\n"
        "    print('status', status or 0)\n"
    )
    path = os.pathsep.join([str(ROOT), str(packages)])
    done = python("-S", "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert re.findall(r"status (\d)\n", done.stdout) == [*"000000", "1", "0"], done.stdout
    assert done.stdout.count("usage: ") == len(STARTS) - 1, "all but env's"
    assert NEEDED in done.stderr and "Traceback" not in done.stderr
    assert "device  samples" in done.stdout and "no devices.png" in done.stdout
    assert read_json(tmp_path / "run" / "metrics.json")["devices"] == ["cpu:0", "cpu:1"]
