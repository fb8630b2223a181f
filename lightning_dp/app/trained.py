"""What a training says in its run folder about its model, its data and its checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_dp.checkpointing import files

_GROUPS = ("model", "data")


def as_trained(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Takes model, data and checkpoint of the training in ``cfg.run``, but where overrides win."""
    if cfg.run is None:
        if cfg.ckpt_path is None:
            raise ValueError(
                "ckpt_path: expected the checkpoint file to test, got nothing. Give it, or "
                "run=logs/train/runs/..., the folder of a training."
            )
        return cfg
    cfg, trained = cfg.copy(), _config_of(Path(cfg.run))
    named = [o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))]
    for group in _GROUPS:
        if not {group, "experiment"}.intersection(named):
            composed, cfg[group] = cfg[group], trained[group]
            for key in (name for name in named if name.startswith(f"{group}.")):
                inner = key.removeprefix(f"{group}.")
                value = OmegaConf.select(composed, inner)
                OmegaConf.update(cfg[group], inner, value, force_add=True)
    if cfg.ckpt_path is None:
        cfg.ckpt_path = str(_best_of(Path(cfg.run) / "checkpoints"))
    return cfg


def _best_of(folder: Path) -> Path:
    """The checkpoint that a training has tested: the best one, as the last one says, or that."""
    last = folder / "last.ckpt"
    states: Mapping[str, Any] = files.read(last).get("callbacks", {}) if last.is_file() else {}
    for state in states.values():
        # Of several ModelCheckpoints the one with a metric knows what is best.
        if isinstance(state, Mapping) and state.get("monitor") and state.get("best_model_path"):
            best = Path(state["best_model_path"])
            found = [path for path in (folder / best.name, best) if path.is_file()]
            return [*found, last][0]
    return last


def task_overrides() -> Sequence[str]:
    """What the command line says; nothing outside of a program of Hydra's."""
    if not HydraConfig.initialized():
        return ()
    return cast(Sequence[str], HydraConfig.get().overrides.task)


def _config_of(run: Path) -> DictConfig:
    file = run / "config.yaml"
    config = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    if not isinstance(config, DictConfig) or not set(_GROUPS) <= config.keys():
        raise ValueError(
            f"run: expected the folder of a training, got {str(run)!r}, where no config.yaml "
            "names a model and data. Give a folder of logs/train/runs."
        )
    return config
