"""The benchmark: its peers train the same as one device, and a contest ends with a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step import plain_step
from support.processes import in_another_process
from support.programs import python

RUN = Path(__file__).with_name("run.py")


def contest(*options: str) -> tuple[str, list[float]]:
    """What a run of two devices prints, and the losses of the contestants."""
    done = python(str(RUN), "--devices", "2", *options, cwd=RUN.parent)
    return done.stdout, [float(row.split()[-1]) for row in done.stdout.splitlines()[2:]]


@pytest.mark.slow
def test_a_contest_ends_with_a_table_and_all_have_trained_the_same() -> None:
    peers = ("one device", "dp_custom", "torch DDP")
    printed, losses = contest("--only", "mlp", "--quick", "--peers", *peers)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert all(f"\n{peer}  " in printed for peer in peers)


@pytest.mark.slow
def test_on_virtual_time_a_contest_says_the_same_each_time() -> None:
    peers = ("--peers", "one device", "dp_custom", "nn.DataParallel")
    first, second = (contest("--device", "sim", "--virtual", *peers) for _ in range(2))
    assert first == second and first[1] == pytest.approx([first[1][0]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    "executor, most, of_engine", [("inorder", 168, 130), ("threads", 230, 195)]
)
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_rendezvous(
    executor: Any, most: int, of_engine: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    calls = in_another_process(plain_step, executor)
    # In threads some ten more or less: the main thread learns of the ends of several replicas at
    # once, or one by one.
    assert calls.total() <= most, calls.most_common(20)
    files = Counter(file for file, _ in calls.elements())
    engine = {name: count for name, count in files.items() if name.startswith("parallel/")}
    assert len(files) <= 14 and len(engine) <= 9, files.most_common()
    assert sum(engine.values()) <= of_engine, engine
    assert not [call for call in calls if "collectives" in call[0] or "meet" in call[1]]
