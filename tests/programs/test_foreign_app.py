"""A Hydra app that knows nothing of us, laid out as lightning-hydra-template, takes our groups."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig, open_dict

from lightning_dp import DataParallelStrategy
from lightning_dp.app.unread import StrategyIsRead, unread_strategy

APP = Path(__file__).parent / "foreign_app"
SEARCHPATH = "hydra.searchpath=[pkg://lightning_dp.conf]"

Configure = Callable[..., DictConfig]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Composes their `train.yaml` with our groups within reach."""
    monkeypatch.syspath_prepend(APP)
    paths = (f"paths.output_dir={tmp_path}", "paths.work_dir=.")

    def configured(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(APP / "conf"), version_base="1.3"):
            overrides = (SEARCHPATH, *paths, *overrides)
            return compose("train.yaml", overrides=list(overrides), return_hydra_config=True)

    return configured


def trained(cfg: DictConfig) -> Any:
    """What their `train` makes of it."""
    from theirs import train

    HydraConfig.instance().set_config(cfg)
    try:
        own = cfg.copy()
        with open_dict(own):
            del own["hydra"]
        return train(own)
    finally:
        HydraConfig.instance().cfg = None


def test_every_word_of_the_line_takes_effect(configure: Configure) -> None:
    line = "strategy=dp_adaptive trainer=dp_custom trainer.devices=2 strategy.weights=[1,2]"
    cfg = configure(*line.split(), "+trainer.max_steps=1", "test=false", "trainer.accelerator=cpu")
    assert unread_strategy(cfg) is None
    trainer = trained(cfg)
    assert isinstance(trainer.strategy, DataParallelStrategy)
    assert type(trainer.strategy.split_policy).__name__ == "Adaptive"
    assert trainer.strategy.split_policy(12) == (4, 8) == trainer.strategy.last_sizes
    assert trainer.max_epochs == 1, "of their own trainer/default.yaml"


@pytest.mark.parametrize("strategy", ["dp_custom", "dp_custom_forward", "dp_auto", "ddp", "single"])
def test_every_strategy_reaches_their_trainer(strategy: str, configure: Configure) -> None:
    cfg = configure(f"strategy={strategy}", "trainer=dp_custom")
    assert unread_strategy(cfg) is None
    expected = "auto" if strategy == "single" else cfg.strategy._target_
    found = cfg.trainer.strategy
    assert (found if strategy == "single" else found._target_) == expected
    assert cfg.trainer.devices == (1 if strategy == "single" else "auto")


def test_the_trainer_alone_is_enough(configure: Configure) -> None:
    cfg = configure("trainer=dp_custom", "trainer.devices=3", "trainer.accelerator=cpu")
    trainer = trained(cfg)
    assert isinstance(trainer.strategy, DataParallelStrategy)
    assert trainer.num_devices == 3


def test_without_us_it_is_as_it_was(configure: Configure) -> None:
    cfg = configure("+trainer.max_steps=1")
    assert unread_strategy(cfg) is None and "callbacks" in cfg
    assert not cfg.hydra.callbacks
    assert isinstance(trained(cfg).strategy, SingleDeviceStrategy)


def test_two_sources_of_the_strategy_are_refused(configure: Configure) -> None:
    """Hydra's own words: `strategy=` it is, as the trainer has one already."""
    with pytest.raises(ConfigCompositionException, match="Multiple values for strategy"):
        configure("+strategy=dp_adaptive", "trainer=dp_custom")
    with pytest.raises(ConfigCompositionException, match="Could not override 'strategy'"):
        configure("strategy=dp_adaptive", "trainer=cpu")


UNREAD = {
    "cpu": ["trainer=cpu"],
    "default": [],
    "ddp": ["trainer=ddp"],
    "ddp_sim": ["trainer=ddp_sim"],
    "experiment": ["experiment=on_cpu"],
    "value of a key": ["strategy.output_device=cpu"],
    "a part is read": ["+trainer.num_nodes=${oc.select:strategy.devices,1}"],
    "its own words": ["+trainer.strategy=ddp"],
}


@pytest.mark.parametrize("strategy", ["dp_adaptive", "ddp", "single"])
@pytest.mark.parametrize("case", UNREAD)
def test_a_strategy_that_no_trainer_reads_is_an_error(
    case: str, strategy: str, configure: Configure
) -> None:
    if case == "value of a key" and strategy != "dp_adaptive":
        pytest.skip("no key of this one")
    cfg = configure(f"+strategy={strategy}", *UNREAD[case])
    for look in (StrategyIsRead().on_run_start, StrategyIsRead().on_job_start):
        with pytest.raises(SystemExit) as stop:
            look(cfg)
        message = str(stop.value.code)
        assert message.startswith(f"error: strategy={strategy}: expected a Trainer that takes it")
        assert "Use trainer=dp_custom, or '++trainer.strategy=${strategy}'" in message
        assert "\n" not in message
    assert [*cfg.hydra.callbacks] == ["strategy_is_read"], "Hydra asks it"


@pytest.mark.parametrize("reads", ["${strategy}", "${..strategy}", "${oc.select:strategy,null}"])
def test_what_the_error_says_helps(reads: str, configure: Configure) -> None:
    cfg = configure("+strategy=dp_adaptive", "trainer=cpu", f"++trainer.strategy={reads}")
    assert unread_strategy(cfg) is None
    assert isinstance(trained(cfg).strategy, DataParallelStrategy)


def test_the_check_can_be_left_out(configure: Configure) -> None:
    cfg = configure("+strategy=dp_adaptive", "~hydra.callbacks.strategy_is_read")
    assert not cfg.hydra.callbacks


def test_trainers_that_are_made_in_code_are_not_known(configure: Configure) -> None:
    cfg = configure("+strategy=dp_adaptive", "trainer._target_=theirs.make")
    assert unread_strategy(cfg) is None


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path: Path) -> None:
    def run(*overrides: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(APP / "theirs.py"), *overrides, SEARCHPATH]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    line = ("trainer=dp_custom", "trainer.devices=2", "trainer.accelerator=cpu")
    done = run("strategy=dp_adaptive", *line, "strategy.weights=[1,2]")
    assert "DataParallelStrategy 2" in done.stdout, done.stderr
    swept = run("-m", "strategy=dp_custom,dp_auto", *line)
    assert swept.stdout.count("DataParallelStrategy 2") == 2, swept.stderr
    before = len([*tmp_path.glob("logs/train/runs/*")])
    refused = run("+strategy=dp_adaptive", "trainer=cpu")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and refused.stderr.startswith("error: strategy=")
    assert len([*tmp_path.glob("logs/train/runs/*")]) == before, "an empty run folder"
