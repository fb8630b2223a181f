"""The tutorial shows the splits of nn.DataParallel's tutorials, and better ones."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).resolve().parent.parent / "examples" / "tutorial.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(TUTORIAL), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sizes_in_forward(printed: str) -> list[list[int]]:
    """For each batch, the samples that each forward saw."""
    batches = printed.split("batch of size")[1:]
    pattern = r"in forward: input size \((\d+), 5\), output size \(\1, 2\)"
    return [[int(n) for n in re.findall(pattern, batch)] for batch in batches]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "full", "last"),
    [
        pytest.param(
            ("--devices", "2", "--split", "chunk"), [15, 15], [5, 5], marks=pytest.mark.slow
        ),
        pytest.param(
            ("--devices", "3", "--split", "chunk"), [10, 10, 10], [4, 4, 2], marks=pytest.mark.slow
        ),
        pytest.param(
            ("--devices", "8", "--split", "chunk"),
            [4, 4, 4, 4, 4, 4, 4, 2],
            [2, 2, 2, 2, 2],
            marks=pytest.mark.slow,
        ),
        (("--devices", "8"), [4, 4, 4, 4, 4, 4, 3, 3], [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_batches_of_30_are_split_as_shown(
    arguments: tuple[str, ...], full: list[int], last: list[int]
) -> None:
    printed = run(*arguments)
    assert sizes_in_forward(printed) == [full, full, full, last]
    assert printed.count("outside: output size (30, 2) on sim:0") == 3
    assert "outside: noise size (10, 2), scalar 1.0" in printed


def test_ids_need_not_be_neighbours() -> None:
    printed = run("--device-ids", "7,9", "--device-count", "10", "--output-device", "sim:1")
    assert {device for device in re.findall(r"in forward.* on (\S+)", printed)} == {
        "sim:7",
        "sim:9",
    }
    assert set(re.findall(r"outside: output.* on (\S+)", printed)) == {"sim:1"}
