"""What splits have learnt in several processes is saved of all, and each goes on with its own."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Classifier, loader, trainer
from several_processes import run_in_processes

from lightning_dp import DataParallelStrategy


def learnt(devices: int, path: str, ckpt_path: str | None) -> tuple[Any, Any]:
    """What this process's split knows as it begins to fit, and at the end, when it is saved."""
    strategy = DataParallelStrategy(split="adaptive", executor="inorder")
    before: list[Any] = []

    class Looks(Classifier):
        def on_train_start(self) -> None:
            policy: Any = strategy.split_policy
            before.append(policy.state_dict())

    job = trainer(devices, strategy, max_epochs=1 if ckpt_path is None else 2)
    job.fit(Looks(), loader(100), loader(8), ckpt_path=ckpt_path)
    job.save_checkpoint(path)
    policy: Any = strategy.split_policy
    return before[0], policy.state_dict()


def both(path: str) -> list[Any]:
    rank = int(os.environ["RANK"])
    return [learnt(4, path, None), learnt(4, f"{path}-{rank}", path), learnt(3, path + "-3", path)]


def test_those_of_all_processes_are_saved_and_each_goes_on_with_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    told = run_in_processes(both, 2, path)
    saved = torch.load(path, weights_only=True)["lightning_dp"]["split"]
    assert saved["devices"] == [2, 2]
    ends = [end for (_, end), *_ in told]
    assert saved["processes"] == ends and ends[0]["steps"] != ends[1]["steps"]
    for (_, end), (start, _), (anew, _) in told:
        assert any(end["steps"]) and start == end
        assert not any(anew["steps"])  # the devices are shared out in another way
    # Nor does one process go on with what two have learnt, though it has as many devices.
    start, _ = learnt(4, str(tmp_path / "one.ckpt"), path)
    assert not any(start["steps"])


@pytest.mark.parametrize("devices", [2, 3])
def test_one_process_saves_and_loads_as_before(tmp_path: Path, devices: int) -> None:
    path = str(tmp_path / "saved.ckpt")
    _, end = learnt(devices, path, None)
    assert torch.load(path, weights_only=True)["lightning_dp"]["split"] == end
    assert learnt(devices, path, path)[0] == end
