"""Without any extra every verb starts, and the main job says which extra it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from program_runs import ROOT, read_json

EXTRAS = ("rich", "scikit_learn", "sklearn", "matplotlib", "mpl_toolkits")
STARTS = (
    ["--help"],
    ["train", "--help"],
    ["evaluate", "--help"],
    ["convert", "--help"],
    ["doctor", "--help"],
    ["env"],
)
NEEDED = (
    "error: expected the package scikit-learn, which is not installed. Install the extra "
    "'examples': python -m pip install 'lightning-dp[examples]'\n"
)
OWN_JOB = (
    *("model=tutorial", "model.talk=false", "data=random_rows", "test=false"),
    *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=1"),
    *("callbacks.model_checkpoint.monitor=train/loss", "~callbacks.early_stopping"),
)
"""A job that needs no extra, with the callbacks of every job: a progress bar among them."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds all that is installed here but for the extras."""
    folder = tmp_path_factory.mktemp("site-packages")
    for packages in (path for path in sys.path if path.endswith("site-packages")):
        for file in Path(packages).iterdir():
            link = folder / file.name
            if not file.name.startswith(EXTRAS) and file.suffix != ".pth" and not link.exists():
                link.symlink_to(file)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def run(
    arguments: list[str], cwd: Path, environment: Mapping[str, str], *python: str
) -> subprocess.CompletedProcess[str]:
    command = [*(python or (sys.executable, "-S")), "-m", "lightning_dp", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def test_every_verb_starts(base: dict[str, str], tmp_path: Path) -> None:
    """In one process: its imports take longer than all of them."""
    code = (
        "import sys; from lightning_dp.__main__ import main\n"
        f"for arguments in {STARTS}:\n"
        "    sys.argv = ['lightning-dp', *arguments]\n"
        "    try: status = main()\n"
        "    except SystemExit as end: status = end.code\n"
        "    print('status', status or 0)\n"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=base, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert done.stdout.count("status 0\n") == len(STARTS), done.stdout
    assert done.stdout.count("usage: ") == len(STARTS) - 1, "all but env's"


def test_the_main_job_says_which_extra_it_needs(base: dict[str, str], tmp_path: Path) -> None:
    done = run([], tmp_path, base)
    assert done.returncode == 1 and (done.stdout, done.stderr) == ("", NEEDED)


def test_a_job_of_ones_own_needs_no_extra(base: dict[str, str], tmp_path: Path) -> None:
    done = run([*OWN_JOB, "hydra.run.dir=run"], tmp_path, base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device  training samples" in done.stdout and "no devices.png" in done.stdout
    assert read_json(tmp_path / "run" / "metrics.json")["devices"] == ["cpu:0", "cpu:1"]


@pytest.mark.slow
def test_a_base_install_in_a_fresh_environment(tmp_path: Path) -> None:
    """As the README has it, without an extra. It needs a package index."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    install = [python, "-m", "pip", "install", "-q", "torch==2.13.0", str(ROOT)]
    subprocess.run(install, check=True, env=kept, cwd=tmp_path)
    absent = f"import importlib.util as u; assert not any(map(u.find_spec, {EXTRAS}))"
    subprocess.run([python, "-c", absent], check=True, cwd=tmp_path)
    for arguments in STARTS:
        done = run(arguments, tmp_path, kept, python)
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    done = run(["doctor"], tmp_path, kept, python)
    assert done.returncode == 0 and "Healthy: 8 of 8 laws" in done.stdout, done.stdout
    done = run([], tmp_path, kept, python)
    assert done.returncode == 1 and (done.stdout, done.stderr) == ("", NEEDED)
