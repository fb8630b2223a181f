"""`conf/`: what composes, its defaults, what is refused, and how another app takes it."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf, open_dict
from support.programs import ROOT

import lightning_dp
from lightning_dp.app import jobs
from lightning_dp.app.jobs import as_trained, settle

CONF = ROOT / "conf"
CPU = ("trainer.accelerator=cpu", "trainer.devices=2")
FOREIGN = Path(__file__).parent / "foreign_app"


def composed(*overrides: str, name: str = "train", **options: Any) -> DictConfig:
    paths = ["paths.output_dir=nowhere", "paths.log_dir=nowhere", "paths.work_dir=."]
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        return compose(name, overrides=[*paths, *overrides], **options)


# --- what there is --------------------------------------------------------------------------------


def test_options_in_conf_are_the_arguments_of_the_strategy_and_explained() -> None:
    file = CONF / "strategy" / "dp_custom.yaml"
    options = dict(OmegaConf.load(file))
    assert options.pop("_target_") == "lightning_dp.DataParallelStrategy"
    options.pop("defaults")
    # What every Lightning strategy takes (self, accelerator, precision_plugin, ...) is no option.
    of_lightning = inspect.signature(ParallelStrategy.__init__).parameters
    arguments = inspect.signature(lightning_dp.DataParallelStrategy.__init__).parameters
    assert options == {n: p.default for n, p in arguments.items() if n not in of_lightning}
    for before, line in itertools.pairwise(file.read_text().splitlines()):
        if re.match(r"[a-z_]+:", line) and not line.startswith("_target_"):
            assert before.startswith("#"), line


GROUPS = sorted({f.parent.name for f in CONF.glob("*/*.yaml")} - {"hparams_search"})


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_a_group_composes(group: str) -> None:
    for file in (CONF / group).glob("*.yaml"):
        OmegaConf.to_container(composed(f"{group}={file.stem}"), resolve=True)


def test_the_help_names_every_group() -> None:
    text = (CONF / "hydra" / "default.yaml").read_text()
    assert {*GROUPS} - {"hydra"} <= {*text[text.index("Groups (") : text.index("Keys:")].split()}


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "cores", "overrides", "expected"),
    [
        (0, 64, "", ("cpu", 4)),
        (0, 1, "", ("cpu", 2)),
        (2, 64, "", ("gpu", -1)),
        (1, 64, "strategy.devices=[cuda:0,cuda:0]", ("gpu", "auto")),
        (2, 64, "strategy.devices=[cpu,cpu]", ("cpu", "auto")),
        (1, 64, "strategy.devices=[0,0]", ("gpu", "auto")),
    ],
)
def test_devices_are_gpus_where_there_are_some_else_replicas_on_the_cpu(
    gpus: int, cores: int, overrides: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(jobs, "cores", lambda: cores)
    trainer = composed(*overrides.split()).trainer
    assert (trainer.accelerator, trainer.devices) == expected


@pytest.mark.parametrize(
    ("options", "kind", "count"),
    [
        ("strategy=dp_custom", "DataParallelStrategy", 2),
        ("strategy.devices=[cpu,cpu,cpu] trainer.devices=auto", "DataParallelStrategy", 3),
        ("strategy=ddp", "DDPStrategy", 2),
        ("strategy=single", "SingleDeviceStrategy", 1),
    ],
)
def test_every_strategy_of_conf_makes_a_trainer(options: str, kind: str, count: int) -> None:
    cfg = settle(composed(*CPU, *options.split()))
    trainer = instantiate(cfg.trainer, logger=False)
    assert (type(trainer.strategy).__name__, trainer.num_devices) == (kind, count)


# --- evaluate: what the training's folder says, and what the command line says --------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (8, 3, "digits")),
        (("data.split_seed=5", "+data.more=1", "strategy=single"), (8, 5, "digits")),
        (("model=digits_crnn", "model.width=4"), (4, 3, "digits")),
        (("experiment=digits",), (16, 0, "digits")),
        (("experiment=tutorial",), (None, None, "tutorial")),
    ],
)
def test_evaluate_takes_the_runs_options_unless_the_command_line_has_others(
    overrides: tuple[str, ...], expected: tuple[Any, Any, str], tmp_path: Path
) -> None:
    OmegaConf.save(composed("model.width=8", "data.split_seed=3"), tmp_path / "config.yaml")
    cfg = as_trained(composed(f"run={tmp_path}", *overrides, name="eval"), overrides)
    kind = cfg.data._target_.split(".")[-2]
    assert (cfg.model.get("width"), cfg.data.get("split_seed"), kind) == expected
    assert cfg.data.get("more") == (1 if "+data.more=1" in overrides else None)
    assert cfg.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")


# --- another app, laid out as lightning-hydra-template --------------------------------------------


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Composes their `train.yaml` with our groups within reach, and runs their `train`."""
    monkeypatch.syspath_prepend(FOREIGN)

    def trained(*overrides: str) -> Any:
        from theirs import train

        paths = (f"paths.output_dir={tmp_path}", "paths.work_dir=.")
        words = ["hydra.searchpath=[pkg://lightning_dp.conf]", *paths, *overrides]
        with initialize_config_dir(str(FOREIGN / "conf"), version_base="1.3"):
            cfg = compose("train.yaml", overrides=words, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        try:
            with open_dict(cfg):
                del cfg["hydra"]
            return train(cfg)
        finally:
            HydraConfig.instance().cfg = None

    return trained


@pytest.mark.parametrize(
    ("line", "kind", "count"),
    [
        ("", "SingleDeviceStrategy", 1),
        (
            "trainer=foreign_app trainer.devices=3 trainer.accelerator=cpu",
            "DataParallelStrategy",
            3,
        ),
        ("+strategy=dp_custom trainer=cpu trainer.devices=2", "DataParallelStrategy", 2),
        ("trainer=foreign_app strategy=single trainer.accelerator=cpu", "SingleDeviceStrategy", 1),
    ],
)
def test_a_strategy_reaches_another_apps_trainer(
    line: str, kind: str, count: int, theirs: Any
) -> None:
    trainer = theirs(*line.split(), "train=false", "test=false")
    assert (type(trainer.strategy).__name__, trainer.num_devices) == (kind, count)


def test_every_option_takes_effect_in_another_app(theirs: Any) -> None:
    line = "trainer=foreign_app strategy.split=adaptive trainer.devices=2 strategy.weights=[1,2]"
    trainer = theirs(*line.split(), "+trainer.max_steps=1", "test=false", "trainer.accelerator=cpu")
    assert "split='adaptive'" in repr(trainer.strategy)
    assert trainer.strategy.last_sizes == (4, 8)
    assert trainer.max_epochs == 1, "of their own trainer/default.yaml"
