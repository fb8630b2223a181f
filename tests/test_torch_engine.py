"""The private name of torch in `parallel.torch_engine` does what is said of it there."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from lightning_dp.parallel.torch_engine import renew_engine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, beside threads
def test_a_child_has_an_engine_of_its_own_after_execution_engine_was_asked() -> None:
    torch.ones(1, requires_grad=True).sin().backward()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        x = torch.ones(1, requires_grad=True)
        renew_engine()
        x.sin().backward()
        os._exit(
            0 if x.grad is not None and x.grad.item() == torch.cos(torch.ones(1)).item() else 1
        )
    assert os.waitpid(child, 0)[1] == 0
    assert renew_engine(), "outside of a backward it says yes"
