"""The tutorial shows the splits of nn.DataParallel's tutorials, and better ones."""

import re

import pytest
from support.programs import in_here

from lightning_dp.app import scripts
from lightning_dp.examples import tutorial


def sizes_in_forward(printed: str) -> list[list[int]]:
    """For each batch, the samples that each forward saw."""
    batches = printed.split("batch of size")[1:]
    pattern = r"in forward: input size \((\d+), 5\), output size \(\1, 2\)"
    return [[int(n) for n in re.findall(pattern, batch)] for batch in batches]


@pytest.mark.parametrize(
    ("arguments", "full", "last"),
    [
        (("--devices", "2", "--split", "chunk"), [15, 15], [5, 5]),
        (("--devices", "3", "--split", "chunk"), [10, 10, 10], [4, 4, 2]),
        (("--devices", "8", "--split", "chunk"), [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
        (("--devices", "8"), [4, 4, 4, 4, 4, 4, 3, 3], [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_batches_of_30_are_split_as_shown(
    arguments: tuple[str, ...], full: list[int], last: list[int]
) -> None:
    printed = in_here(tutorial.main, *arguments)
    assert sizes_in_forward(printed) == [full, full, full, last]
    assert printed.count("outside: output size (30, 2) on cpu") == 3
    assert "outside: noise size (10, 2), scalar 1.0" in printed


@pytest.mark.sim_only("It asks for eight devices.")
def test_ids_need_not_be_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "_ACCELERATORS", ("sim",))
    options = ("--accelerator", "sim", "--device-ids", "5,7", "--output-device", "sim:1")
    printed = in_here(tutorial.main, *options)
    assert set(re.findall(r"in forward.* on (\S+)", printed)) == {"sim:5", "sim:7"}
    assert set(re.findall(r"outside: output.* on (\S+)", printed)) == {"sim:1"}
