"""Nothing is started besides threads: notebooks, Windows, and CUDA that was used before."""

import multiprocessing
import os
import subprocess
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors import accelerator_connector
from support.oracle import Classifier, assert_same, devices_of, run


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.usefixtures("on")
def test_no_process_is_started_where_devices_have_been_used_before(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA in a notebook: whoever forks then cannot go on."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a process was about to be started")

    for name in ("fork", "posix_spawn", "system"):
        monkeypatch.setattr(os, name, refuse, raising=False)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    for device in devices_of(3):
        torch.ones(2, device=device, requires_grad=True).sum().backward()
    options = {"mode": mode, "executor": "threads"}
    assert_same(run(Classifier, 3, strategy=options), run(Classifier, 1), atol=1e-6, rtol=1e-5)
