"""What one plain training step costs in Python: a bound on the functions of ours that it enters."""

from typing import Any

import pytest
from benchmarks.step import files_of, plain_step
from support.processes import in_another_process


@pytest.mark.parametrize("executor, files, most", [("inorder", 29, 290), ("threads", 31, 370)])
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_meeting(
    executor: Any, files: int, most: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    calls = in_another_process(plain_step, executor)
    # In threads some ten more or less: the main thread learns of the ends of several replicas at
    # once, or one by one.
    assert calls.total() <= most, calls.most_common(20)
    assert len(files_of(calls)) <= files, files_of(calls).most_common()
    assert not [call for call in calls if "collectives" in call[0] or "meet" in call[1]]
