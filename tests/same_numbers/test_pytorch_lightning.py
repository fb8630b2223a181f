"""The package `pytorch_lightning`: the same strategy, held to the same oracle."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import StrategyRegistry
from support import device_kinds, oracle

import lightning_dp
import lightning_dp.pytorch_lightning
from lightning_dp.pytorch_lightning import DataParallelStrategy
from lightning_dp.strategy import DataParallelMixin

WORDS = {
    "lightning.pytorch": "pytorch_lightning",
    "from lightning_dp import DataParallelStrategy": (
        "from lightning_dp.pytorch_lightning import DataParallelStrategy"
    ),
    "from support.oracle import": "from oracle_for_pytorch_lightning import",
}


def for_pytorch_lightning(name: str) -> ModuleType:
    """A module of the tests, with the imports of `lightning` replaced by `pytorch_lightning`."""
    translated = ModuleType(f"{name}_for_pytorch_lightning")
    (path,) = Path(__file__).parents[1].rglob(f"{name}.py")
    source = path.read_text(encoding="utf-8")
    for word, other in WORDS.items():
        source = source.replace(word, other)
    sys.modules[translated.__name__] = translated
    exec(compile(source, str(path), "exec"), translated.__dict__)
    return translated


pl_oracle = for_pytorch_lightning("oracle")
same_numbers = for_pytorch_lightning("test_same_numbers")
forward_mode = for_pytorch_lightning("test_forward_mode")

MODELS = {**same_numbers.MODELS, "whole batch": forward_mode.WholeBatch}


@pytest.fixture
def on(on: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if device_kinds.type_of(on) == "sim":
        importlib.import_module("sim_devices.pytorch_lightning")  # registers the accelerator
    monkeypatch.setattr(pl_oracle, "ON", on)
    return on


@cache
def one_device(name: str) -> Any:
    torch.set_default_dtype(torch.float64)
    return pl_oracle.run(MODELS[name], 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("weight_norms")
def test_several_devices_equal_one(name: str, on: str) -> None:
    torch.set_default_dtype(torch.float64)
    assert issubclass(MODELS[name], pl.LightningModule) and type(pl_oracle.trainer(2)) is pl.Trainer
    forward = {"mode": "forward", "parallel_modules": ["net"]}
    several = pl_oracle.run(MODELS[name], 3, strategy=forward if name == "whole batch" else {})
    oracle.assert_same(several, one_device(name))


def test_the_first_step_is_checked(on: str) -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    data = pl_oracle.loader()
    pl_oracle.trainer(3, strategy, max_epochs=1).fit(pl_oracle.Classifier(), data, data)
    assert strategy.first_step["training_step"].is_same


def test_a_checkpoint_of_one_package_goes_on_in_the_other(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)

    def fit(kind: Any, epochs: int, checkpoint: Path | None = None) -> Any:
        torch.manual_seed(0)
        module, job = kind.Classifier(), kind.trainer(3, max_epochs=epochs)
        job.fit(module, kind.loader(), kind.loader(), ckpt_path=checkpoint)
        job.save_checkpoint(tmp_path / "last.ckpt")
        return module

    expected = fit(oracle, 4)
    for before, after in ((pl_oracle, oracle), (oracle, pl_oracle)):
        fit(before, 2)
        resumed = fit(after, 4, tmp_path / "last.ckpt")
        oracle.assert_equal_trees(
            resumed.state_dict(), expected.state_dict(), "resumed", atol=1e-10, rtol=0
        )


def test_the_name_is_registered_with_the_right_class() -> None:
    assert StrategyRegistry["dp_custom"]["strategy"] is DataParallelStrategy
    DataParallelStrategy.register_strategies(StrategyRegistry)
    strategies = type(pl_oracle.trainer(2).strategy), type(oracle.trainer(2).strategy)
    assert strategies == (DataParallelStrategy, lightning_dp.DataParallelStrategy)
    assert all(issubclass(cls, DataParallelMixin) for cls in strategies)


def test_the_other_packages_strategy_is_refused_and_the_right_one_named() -> None:
    with pytest.raises(ValueError, match="for a Trainer of lightning>"):
        pl.Trainer(strategy=lightning_dp.DataParallelStrategy())
    with pytest.raises(ValueError, match="for a Trainer of pytorch_lightning>"):
        lightning.pytorch.Trainer(strategy=DataParallelStrategy())


@pytest.mark.slow
def test_one_import_registers_the_strategy_with_the_packages_that_are_there() -> None:
    alone = "import sys, lightning_dp; assert 'pytorch_lightning' not in sys.modules"
    trains = "pl.Trainer(strategy='dp_custom', accelerator='cpu', devices=2, barebones=True)"
    other = f"import pytorch_lightning as pl, lightning_dp; {trains}"
    ours = f"import pytorch_lightning as pl, lightning_dp.pytorch_lightning; {trains}"
    for code in (alone, other, ours):
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
