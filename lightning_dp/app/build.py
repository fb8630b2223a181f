"""From a configuration to the objects that Lightning works with."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dp.app.callbacks import StepTimes
from lightning_dp.app.options import OptionError
from lightning_dp.checkpointing import load_weights
from lightning_dp.doctor import versions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What one training or evaluation needs."""

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule
    folder: Path


def begin(cfg: DictConfig) -> Job:
    """Checks the options, seeds, builds, and writes the options to ``config.yaml``."""
    cfg = settle(cfg)
    if cfg.seed is not None:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
    job = build(cfg)
    if job.trainer.is_global_zero:
        job.folder.mkdir(parents=True, exist_ok=True)
        # Interpolations stay as they are: a resolved ${oc.env:COMET_API_KEY} would be a secret.
        OmegaConf.save(cfg, job.folder / "config.yaml")
        log.info("%s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    return job


def settle(cfg: DictConfig) -> DictConfig:
    """Checks the options before anything is built, and returns them as the job will use them.

    ``strategy=single`` takes one device whatever ``trainer.devices`` says, so that
    ``-m strategy=dp_custom,single trainer.devices=4`` compares four devices with one.
    """
    cfg = cfg.copy()
    for key in ("train", "test", "extras.quiet", "extras.print_config"):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, bool | None):  # any other text would count as true
            raise OptionError(f"{key}: expected true or false, got {value!r}. Write one of these.")
    if cfg.seed is not None and (type(cfg.seed) is not int or cfg.seed < 0):
        raise OptionError(
            f"seed: expected a whole number from 0 on or null, got {cfg.seed!r}. Try 42; null "
            "gives a new run each time."
        )
    for key in ("ckpt_path", "init_from"):
        _check_file(key, cfg.get(key))
    if cfg.ckpt_path is not None and cfg.get("init_from") is not None:
        raise OptionError(
            f"init_from: expected null beside ckpt_path={cfg.ckpt_path}, whose weights would "
            f"replace these, got {cfg.init_from!r}. Give one of the two."
        )
    if cfg.trainer.get("strategy") == "auto":
        cfg.trainer.devices = 1
    return cfg


def _check_file(key: str, path: object) -> None:
    """Refuses a path of this machine at which there is nothing."""
    if path is None or (
        isinstance(path, str) and ("://" in path or (path and Path(path).exists()))
    ):
        return
    raise OptionError(
        f"{key}: expected a checkpoint file, got {path!r}, which does not exist. A run leaves "
        "its checkpoints in the folder checkpoints/ of its run folder."
    )


def build(cfg: DictConfig) -> Job:
    """Builds trainer, data and model; the trainer first, as most mistakes are about devices."""
    callbacks, loggers = (_list_of(cfg.get(group)) for group in ("callbacks", "logger"))
    trainer = instantiate(cfg.trainer, callbacks=[*callbacks, StepTimes()], logger=loggers)
    data = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    if cfg.get("init_from") is not None:
        try:
            load_weights(model, cfg.init_from)
        except Exception as error:  # each kind of storage has its own
            raise OptionError(
                f"init_from: expected weights of {type(model).__qualname__}, got "
                f"{cfg.init_from!r}, which does not fit: {error}"
            ) from error
    return Job(trainer, model, data, Path(cfg.paths.output_dir))


def _list_of(group: DictConfig | None) -> list[Any]:
    """Builds every entry of a group that has a ``_target_``: callbacks or loggers."""
    return [
        instantiate(entry, _convert_="all")
        for entry in (group or {}).values()
        if isinstance(entry, DictConfig) and "_target_" in entry
    ]
