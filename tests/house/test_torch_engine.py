"""The private name of torch in `parallel.torch_engine` does what is said of it there."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from several_processes import in_another_process

from lightning_dp.parallel.torch_engine import renew_engine


def fork_after_a_backward() -> int:
    """How the child ends, in which the next one goes on with another engine."""
    x = torch.ones(1, requires_grad=True)
    x.sin().backward()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_right = False
    try:
        signal.alarm(60)
        renew_engine()
        x.sin().backward()
        is_right = torch.equal(x.grad, 2 * x.cos())  # type: ignore[arg-type]  # there was a backward
    finally:
        os._exit(0 if is_right else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_execution_engine_is_checkpoint_valid_in_a_forked_child() -> None:
    assert in_another_process(fork_after_a_backward) == 0
    assert renew_engine(), "outside of a backward it says yes"
