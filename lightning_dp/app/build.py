"""From a configuration to the objects that Lightning works with."""

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.callbacks import SamplesTested
from lightning_dp.app.devices import check_devices, parsed
from lightning_dp.checkpointing import load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What one training or evaluation needs."""

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule
    folder: Path


def begin(cfg: DictConfig) -> Job:
    """Checks the options before any data is loaded, seeds, builds, and writes the options down."""
    cfg = settle(cfg)
    if cfg.seed is not None:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
    job = build(cfg)
    if job.trainer.is_global_zero:
        report.write_config(cfg, job.folder)
    return job


def settle(cfg: DictConfig) -> DictConfig:
    """Checks the options that concern several groups, and returns them as the job will use them.

    ``strategy=single`` takes one device whatever ``trainer.devices`` says, so that
    ``-m strategy=dp_custom,single trainer.devices=4`` compares four devices with one.
    """
    cfg = cfg.copy()
    _check_checkpoint("ckpt_path", cfg.ckpt_path)
    _check_checkpoint("init_from", cfg.get("init_from"))
    if cfg.ckpt_path is not None and cfg.get("init_from") is not None:
        raise ValueError(
            f"init_from: expected null beside ckpt_path={cfg.ckpt_path}, whose weights would "
            f"replace these, got {cfg.init_from!r}. Give one of the two."
        )
    devices = cfg.trainer.get("devices", "auto")
    check_devices(cfg.trainer.get("accelerator", "auto"), devices)
    if cfg.get("strategy") == "auto":
        ids = parsed(devices)
        one_of_many = isinstance(ids, Sequence) and not isinstance(ids, str)
        cfg.trainer.devices = [int(ids[0])] if one_of_many else 1
        if cfg.trainer.devices != devices:
            log.info("strategy=single takes one device: trainer.devices=%s", cfg.trainer.devices)
    return cfg


def build(cfg: DictConfig) -> Job:
    """Builds trainer, data and model; the trainer first, as most mistakes are about devices."""
    if cfg.trainer.get("accelerator") == "sim":
        importlib.import_module("lightning_dp.sim")  # makes Lightning know the accelerator
    callbacks = [*_list_of(cfg.get("callbacks")), SamplesTested()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=_list_of(cfg.get("logger")))
    data = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    if cfg.get("init_from") is not None:
        try:
            load_weights(model, cfg.init_from)
        except RuntimeError as error:
            raise ValueError(
                f"init_from: expected weights of {type(model).__qualname__}, got "
                f"{cfg.init_from!r}, which does not fit. {error}"
            ) from error
    return Job(trainer, model, data, Path(cfg.paths.output_dir))


def _list_of(group: DictConfig | None) -> list[Any]:
    """Builds every entry of a group that has a ``_target_``: callbacks or loggers."""
    return [
        instantiate(entry, _convert_="all")
        for entry in (group or {}).values()
        if isinstance(entry, DictConfig) and "_target_" in entry
    ]


def _check_checkpoint(key: str, path: object) -> None:
    """Checks that an option is null, or a file or remote address that can be read."""
    problem = None if path is None else _problem(path)
    if problem is not None:
        raise ValueError(
            f"{key}: expected a checkpoint file, got {path!r}, {problem}. A run leaves its "
            "checkpoints in the folder checkpoints/ of its run folder."
        )


def _problem(path: object) -> str | None:
    """What keeps a file from being read, before anything else is done."""
    if not isinstance(path, str) or not path:
        return "which is no path"
    if "://" in path:
        try:
            files, name = fsspec.core.url_to_fs(path)
            return None if files.exists(name) else "which does not exist"
        except Exception as error:  # each kind of storage has its own
            return f"which cannot be read ({error})"
    if not Path(path).exists():
        return "which does not exist"
    return None if os.access(path, os.R_OK) else "which may not be read"
