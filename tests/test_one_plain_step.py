"""What one plain training step costs in Python: a bound on the functions of ours that it enters."""

import gc

import pytest
from benchmarks.steps_in_files import plain_step

from lightning_dp.parallel.workers import ExecutorName


@pytest.mark.parametrize("executor, most", [("inorder", 315), ("threads", 420)])
def test_a_plain_step_enters_few_functions_and_no_meeting(
    executor: ExecutorName, most: int
) -> None:
    gc.collect()  # earlier tests' replicas, which listen to all optimizers
    step = plain_step(executor=executor)
    assert step.frames <= most, step.calls.most_common(20)
    assert not [file for file, _ in step.calls if "rendezvous" in file or "collectives" in file]
