"""Which kinds of devices a process tests on: as its command line asks, and as the machine has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import device_kinds
from support.programs import ROOT

TESTS = Path(__file__).parents[1]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """To say how many GPUs there are; what is chosen is forgotten again."""
    monkeypatch.setattr(device_kinds, "kinds", device_kinds.kinds)
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "markers", "count", "kinds"),
    [
        (None, "not slow", 0, ("cpu", "sim")),
        (None, "not multigpu", 2, ("cpu", "sim")),
        ("sim", "", 2, ("cpu", "sim")),
        ("cuda", "", 1, ("cpu", "cuda", "multigpu")),
        (None, "multigpu and not slow", 2, ("cpu", "cuda", "multigpu")),
    ],
)
def test_kinds_are_those_asked_for(
    asked: str | None, markers: str, count: int, kinds: tuple[str, ...], gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: count)
    device_kinds.choose(asked, markers)
    assert device_kinds.kinds == kinds
    shown = device_kinds.header()
    assert shown.startswith(f"devices: {', '.join(kinds)}")
    assert ("pytest --on cuda" in shown) == (count > 0 and "sim" in kinds)


@pytest.mark.parametrize(("asked", "markers"), [("cuda", ""), (None, "multigpu")])
def test_without_a_gpu_it_is_an_error(
    asked: str | None, markers: str, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(pytest.UsageError, match=r"expected a GPU, but torch \S+ finds none"):
        device_kinds.choose(asked, markers)


def test_devices_of_a_kind(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: 2)
    assert list(map(str, device_kinds.devices("cpu", 2))) == ["cpu", "cpu"]
    assert list(map(str, device_kinds.devices("cuda", 3))) == ["cuda:0"] * 3
    assert list(map(str, device_kinds.devices("multigpu", 2))) == ["cuda:0", "cuda:1"]
    with pytest.raises(pytest.skip.Exception, match="needs 3 GPUs, found 2"):
        device_kinds.devices("multigpu", 3)


FAKED = """
import torch

torch.cuda.device_count = lambda: 2
"""
TWO_GPUS = """
import pytest
from support.oracle import accelerator, devices_of
from support.device_kinds import on_separate


def test_three(on):
    expected = {"cpu": ["cpu"] * 3, "cuda": ["cuda:0"] * 3}
    assert list(map(str, devices_of(3))) == expected[on] and accelerator() == on


@on_separate
def test_two(on):
    assert on == "multigpu" and list(map(str, devices_of(2))) == ["cuda:0", "cuda:1"]


@pytest.mark.sim_only("It would fail.")
def test_of_simulated_devices():
    raise AssertionError


@pytest.mark.sim_only("It would fail.")
def test_on_simulated_devices(on):
    raise AssertionError
"""


def pytest_with_two_gpus(folder: Path, *arguments: str) -> str:
    """What a process of pytest prints that believes in two GPUs."""
    (folder / "two_gpus.py").write_text(FAKED)
    code = "import sys, pytest; sys.path[:0] = sys.argv[1:3]; sys.exit(pytest.main(sys.argv[3:]))"
    paths = (str(folder), str(TESTS))
    options = ("-p", "two_gpus", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    command = [sys.executable, "-c", code, *paths, *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_process_with_two_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(TWO_GPUS)
    here = ("-p", "conftest", str(tmp_path / "test_here.py"), "-v", "-n0")
    printed = pytest_with_two_gpus(tmp_path, *here, "--on", "cuda")
    assert "3 passed, 1 skipped, 2 deselected" in printed, printed
    assert "needs 3 GPUs, found 2" in printed and "devices: cpu, cuda, multigpu" in printed
    assert "sim" not in {word.strip("[]") for word in printed.split("::")}


@pytest.mark.slow
def test_cases_on_several_gpus_are_marked_and_none_is_of_simulated_devices(tmp_path: Path) -> None:
    here = ("--collect-only", "-q", "tests")
    found = pytest_with_two_gpus(tmp_path, *here, "-m", "multigpu").splitlines()
    cases = [line for line in found if "::" in line]
    assert len(cases) > 1500 and all("multigpu" in case for case in cases)
    found = pytest_with_two_gpus(tmp_path, *here, "--on", "cuda").splitlines()
    assert len(found) > 3000
    of_sim = [line for line in found if "tests/sim/" in line or re.search(r"[\[-]sim[\]-]", line)]
    named = ("test_house", "test_device_kinds")  # they are about folders, and about kinds
    assert not [line for line in of_sim if not any(name in line for name in named)]
