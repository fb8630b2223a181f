"""``python -m lightning_dp`` trains, validates after each epoch and tests the best checkpoint.

``python -m lightning_dp evaluate run=FOLDER`` tests what a training has left.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dp.app.report import write_report
from lightning_dp.app.run import OptionError, as_program, quiet_in_other_processes
from lightning_dp.checkpointing import load_weights
from lightning_dp.doctor import versions
from lightning_dp.parallel.devices import cores

log = logging.getLogger(__name__)

Job: TypeAlias = tuple[Trainer, LightningModule, LightningDataModule]


# Devices, where the command line names none: resolvers of conf/trainer


def default_accelerator(devices: Sequence[object] | None = None) -> str:
    """Returns trainer.accelerator's default, which the first of ``strategy.devices`` decides."""
    gpus = torch.cuda.device_count()
    if not devices:
        return "gpu" if gpus >= 2 else "cpu"
    kind = str(devices[0]).split(":")[0]
    if kind.isdigit():  # an id of the machine's accelerator
        return "gpu" if gpus else "cpu"
    return "gpu" if kind == "cuda" else kind


def default_devices(accelerator: str, devices: Sequence[object] | None = None) -> int | str:
    """Returns trainer.devices' default: all GPUs, or a CPU replica for each core, 2 to 4.

    ``"auto"`` where ``strategy.devices`` names the devices, and for other accelerators.
    """
    if accelerator == "cpu" and not devices:
        return min(max(cores(), 2), 4)
    return -1 if accelerator in ("gpu", "cuda") and not devices else "auto"


for _resolver in (default_accelerator, default_devices):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)


# From a configuration to the objects that Lightning works with


def begin(cfg: DictConfig) -> Job:
    """Checks the options, seeds, builds, and writes the options to ``config.yaml``."""
    cfg = settle(cfg)
    if cfg.seed is not None:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
    job = build(cfg)
    if job[0].is_global_zero:
        folder = Path(cfg.paths.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # Interpolations stay as they are: a resolved ${oc.env:COMET_API_KEY} would be a secret.
        OmegaConf.save(cfg, folder / "config.yaml")
        log.info("%s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    return job


def settle(cfg: DictConfig) -> DictConfig:
    """Refuses files that do not exist before anything is built; returns the options to be used.

    ``strategy=single`` takes one device whatever ``trainer.devices`` says, so that
    ``-m strategy=dp_custom,single trainer.devices=4`` compares four devices with one.
    """
    cfg = cfg.copy()
    for key in ("ckpt_path", "init_from"):
        path = cfg.get(key)
        if path is not None and "://" not in str(path) and not (path and Path(path).exists()):
            raise OptionError(
                f"{key}: expected a checkpoint file, got {path!r}, which does not exist. A run "
                "leaves its checkpoints in the folder checkpoints/ of its run folder."
            )
    if cfg.ckpt_path is not None and cfg.get("init_from") is not None:
        raise OptionError(
            f"init_from: expected null beside ckpt_path={cfg.ckpt_path}, whose weights would "
            f"replace these, got {cfg.init_from!r}. Give one of the two."
        )
    if cfg.trainer.get("strategy") == "auto":
        cfg.trainer.devices = 1
    return cfg


def build(cfg: DictConfig) -> Job:
    """Builds trainer, model and data; the trainer first, as most mistakes are about devices."""
    callbacks, loggers = (
        [
            instantiate(entry, _convert_="all")
            for entry in (cfg.get(group) or {}).values()
            if isinstance(entry, DictConfig) and "_target_" in entry
        ]
        for group in ("callbacks", "logger")
    )
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if is_sweep and trainer.strategy.launcher is not None:
        raise OptionError(
            "strategy: expected one that starts no processes in a sweep, got "
            f"{type(trainer.strategy).__name__}: each of them would run the whole sweep. Run this "
            "job without -m."
        )
    data = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    if cfg.get("init_from") is not None:
        load_weights(model, cfg.init_from)
    return trainer, model, data


# Training


def train(cfg: DictConfig) -> dict[str, float]:
    """Trains and tests, as ``conf/train.yaml`` says; returns the last value of each metric."""
    trainer, model, data = begin(cfg)
    metrics: dict[str, float] = {}
    trains = cfg.get("train", False)  # conf/eval.yaml has no such options: it tests
    if trains:
        trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    if cfg.get("test", True):
        ckpt_path = _best_of(trainer) if trains else cfg.ckpt_path
        trainer.test(model, datamodule=data, ckpt_path=ckpt_path, verbose=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    write_report(trainer, metrics, Path(cfg.paths.output_dir))
    return metrics


def _best_of(trainer: Trainer) -> str | None:
    """The best checkpoint; None, for the weights as they are, if there is none.

    A resumed training that had no better epoch names the file of the run before, which may be gone.
    """
    best: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    return best if best and ("://" in best or Path(best).exists()) else None


# Evaluation


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests ``cfg.ckpt_path``, or what the training in the folder ``cfg.run`` has left."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return train(as_trained(cfg, given))


def as_trained(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Takes model, data and checkpoint of the training in ``cfg.run``.

    What the command line says of model and data (``data.batch_size=8``, ``model=...``) wins.
    """
    if cfg.run is None:
        if cfg.ckpt_path is None:
            raise OptionError(
                "ckpt_path: expected the checkpoint file to test, got nothing. Give it, or "
                "run=logs/train/runs/..., the folder of a training."
            )
        return cfg
    cfg, file = cfg.copy(), Path(cfg.run, "config.yaml")
    trained: Any = OmegaConf.load(file) if file.is_file() else {}
    if not {"model", "data"} <= {*trained}:
        raise OptionError(
            f"run: expected the folder of a training, got {str(cfg.run)!r}, where no "
            "config.yaml names a model and data. Give a folder of logs/train/runs."
        )
    named = [o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))]
    for group in ("model", "data"):
        if group in named or "experiment" in named:
            continue
        composed, cfg[group] = cfg[group], OmegaConf.to_container(trained[group], resolve=True)
        for key in [name.partition(".")[2] for name in named if name.startswith(f"{group}.")]:
            OmegaConf.update(cfg[group], key, OmegaConf.select(composed, key), force_add=True)
    if cfg.ckpt_path is None:
        cfg.ckpt_path = str(_best_in(Path(cfg.run) / "checkpoints"))
    return cfg


def _best_in(folder: Path) -> Path:
    """The best checkpoint, which the training has tested, as the last one names it."""
    last = folder / "last.ckpt"
    if not last.is_file():
        return last
    states = torch.load(last, weights_only=True, mmap=True).get("callbacks", {}).values()
    # Of several ModelCheckpoints the one with a metric knows the best file.
    names = [Path(s["best_model_path"]).name for s in states if s.get("monitor")]
    return next((folder / name for name in names if name and (folder / name).is_file()), last)


# Entry points of the command line


@quiet_in_other_processes
@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="train")
@as_program
def train_main(cfg: DictConfig) -> float | None:
    """Entry point of ``train``; a sweeper gets ``optimized_metric``."""
    metrics = train(cfg)
    return None if cfg.optimized_metric is None else metrics[cfg.optimized_metric]


@quiet_in_other_processes
@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="eval")
@as_program
def evaluate_main(cfg: DictConfig) -> None:
    """Entry point of ``evaluate``."""
    evaluate(cfg)
