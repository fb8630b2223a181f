"""What one plain training step costs in Python: a bound on the functions of ours that it enters."""

import pytest
from benchmarks.steps_in_files import plain_step
from several_processes import in_another_process

from lightning_dp.parallel.apply import ExecutorName


@pytest.mark.parametrize("executor, files, most", [("inorder", 26, 320), ("threads", 28, 400)])
@pytest.mark.usefixtures("unchecked")
def test_a_plain_step_enters_few_functions_and_no_meeting(
    executor: ExecutorName, files: int, most: int
) -> None:
    # In a process of its own: pytest keeps the frames of a test that has failed, also as expected,
    # and so its replicas, which listen to all optimizers.
    step = in_another_process(plain_step, executor=executor)
    # In threads some ten more or less: of the ends of 4 replicas in 2 rounds the main thread hears
    # one by one, or of several at once.
    assert step.frames <= most, step.calls.most_common(20)
    assert len(step.files) <= files, step.files.most_common()
    assert not [call for call in step.calls if "collectives" in call[0] or "meet" in call[1]]
