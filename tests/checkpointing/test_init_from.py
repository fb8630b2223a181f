"""The programs begin with weights from anywhere, and test them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_dp.app.jobs import build, evaluate, settle, train
from lightning_dp.app.run import as_program

Configure = Callable[..., DictConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Composes a job on the CPU whose run folder is `tmp_path / "run"`."""

    def configured(*overrides: str, name: str = "train") -> DictConfig:
        paths = (f"paths.output_dir={tmp_path / 'run'}", "paths.work_dir=.")
        cpu = ["trainer.accelerator=cpu", "trainer.devices=2"]
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose(name, overrides=[*paths, *cpu, *overrides])

    return configured


@pytest.fixture
def weights(configure: Configure, tmp_path: Path) -> Path:
    """What a script with nn.DataParallel left behind."""
    torch.manual_seed(3)
    model = instantiate(configure().model, _convert_="all")
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    torch.save({"model": wrapped.state_dict(), "epoch": 9}, tmp_path / "old.pt")
    return tmp_path / "old.pt"


def test_training_begins_with_them(configure: Configure, tmp_path: Path) -> None:
    begun = nn.Linear(5, 2)
    torch.save(nn.DataParallel(nn.ModuleDict({"layer": begun})).state_dict(), tmp_path / "old.pt")
    cfg = settle(configure("experiment=tutorial", f"init_from={tmp_path / 'old.pt'}"))
    assert torch.equal(build(cfg)[1].layer.weight, begun.weight)


def test_they_are_tested(configure: Configure, weights: Path) -> None:
    tested = as_program(evaluate)(configure(f"ckpt_path={weights}", name="eval"))
    begun = as_program(train)(configure(f"init_from={weights}", "train=false"))
    assert tested == begun and tested
