"""From a configuration to the objects that Lightning works with."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from omegaconf import DictConfig, OmegaConf

from lightning_dp.app import report
from lightning_dp.app.callbacks import GoesOn, SamplesTested, StepTimes
from lightning_dp.app.devices import check_devices, parsed
from lightning_dp.app.option_types import check_options
from lightning_dp.app.options import check_at_least, check_flag, check_seed
from lightning_dp.app.run import few_keys, note_machine
from lightning_dp.app.together import has_restarted
from lightning_dp.app.trained import task_overrides
from lightning_dp.checkpointing import load_weights

log = logging.getLogger(__name__)

_FLAGS = ("train", "test", "extras.quiet", "extras.print_config")
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "log_every_n_steps": 0}
"""Of what the Trainer does not check itself."""

_LOGGER_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "aim": "aim",
    "comet": "comet-ml",
}


@dataclass(frozen=True)
class Job:
    """What one training or evaluation needs."""

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule
    folder: Path


def begin(cfg: DictConfig) -> Job:
    """Checks the options before any data is loaded, seeds, builds, and writes the options down."""
    cfg = settle(_gone_on(cfg))
    if cfg.seed is not None:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
    job = build(cfg)
    if job.trainer.is_global_zero:
        if (job.folder / "metrics.csv").exists() and not has_restarted():
            log.warning(
                "%s has the files of an earlier run: metrics.csv and metrics.json are replaced; "
                "without hydra.run.dir every run has a folder of its own",
                job.folder,
            )
        report.write_config(cfg, job.folder)
        note_machine(job.trainer)
    return job


def _gone_on(cfg: DictConfig) -> DictConfig:
    """The options, with the latest checkpoint of a training that torchrun has started again."""
    last = Path(cfg.paths.output_dir, "checkpoints", "last.ckpt")
    if not (has_restarted() and cfg.get("train") and last.exists()):
        return cfg
    log.info("started again: the training goes on from %s", last)
    cfg = cfg.copy()
    cfg.ckpt_path = str(last)
    return cfg


def settle(cfg: DictConfig) -> DictConfig:
    """Checks the options that concern several groups, and returns them as the job will use them.

    ``strategy=single`` takes one device whatever ``trainer.devices`` says, so that
    ``-m strategy=dp_custom,single trainer.devices=4`` compares four devices with one.
    """
    cfg = cfg.copy()
    _check_values(cfg)
    _check_effect(cfg)
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


def _check_values(cfg: DictConfig) -> None:
    """Checks what would fail late or in words of Lightning's inside, or would count as true."""
    for key in _FLAGS:
        value = OmegaConf.select(cfg, key)
        if value is not None:
            check_flag(key, value)
    check_seed("seed", cfg.seed)
    check_options(cfg)
    for name, least in _LEAST.items():
        if cfg.trainer.get(name) is not None:
            check_at_least(f"trainer.{name}", cfg.trainer[name], least)


def build(cfg: DictConfig) -> Job:
    """Builds trainer, data and model; the trainer first, as most mistakes are about devices."""
    # The first one, as it speaks before a progress bar is drawn.
    goes_on = [GoesOn(cfg.ckpt_path)] if cfg.get("train") and cfg.ckpt_path is not None else []
    callbacks = [*goes_on, *_list_of(cfg.get("callbacks")), SamplesTested(), StepTimes()]
    own: dict[str, Any] = {"callbacks": callbacks, "logger": loggers_of(cfg.get("logger"))}
    if isinstance(cfg.trainer.get("profiler"), str):
        own["profiler"] = profiler_of(cfg.trainer.profiler, Path(cfg.paths.output_dir))
    trainer = instantiate(cfg.trainer, **own)
    data = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    if cfg.get("init_from") is not None:
        try:
            load_weights(model, cfg.init_from)
        except RuntimeError as error:
            raise ValueError(
                f"init_from: expected weights of {type(model).__qualname__}, got "
                f"{cfg.init_from!r}, which does not fit: {few_keys(str(error))}"
            ) from error
    return Job(trainer, model, data, Path(cfg.paths.output_dir))


def _list_of(group: DictConfig | None) -> list[Any]:
    """Builds every entry of a group that has a ``_target_``: callbacks or loggers."""
    return [
        instantiate(entry, _convert_="all")
        for entry in (group or {}).values()
        if isinstance(entry, DictConfig) and "_target_" in entry
    ]


def loggers_of(group: DictConfig | None) -> list[Any]:
    """Builds the loggers; refuses one whose package is missing with the line that installs it."""
    try:
        return _list_of(group)
    except InstantiationException as error:
        for name, package in _LOGGER_PACKAGES.items():
            if f"full_key: logger.{name}" in str(error) and _is_missing(error):
                raise ValueError(
                    f"logger={name}: expected the package {package}, which is not installed. "
                    f"Install it: pip install {package}"
                ) from error
        raise


def _is_missing(error: BaseException | None) -> bool:
    """Whether an import has failed, however many errors have been made of that."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None


def profiler_of(name: str, folder: Path) -> Profiler:
    """Lightning's profiler of a name; what it tells goes to files `profile...` of the folder."""
    kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    if name not in kinds:
        raise ValueError(
            f"trainer.profiler: expected one of {', '.join(kinds)}, got {name!r}. Or give a "
            "_target_ of your own."
        )
    profiler: Profiler = kinds[name](dirpath=folder, filename=report.PROFILE)
    return profiler


def _check_effect(cfg: DictConfig) -> None:
    """Refuses choices that would have no effect."""
    if not (cfg.get("train", True) or cfg.get("test", True)):
        raise ValueError(
            "train: expected train=true or test=true, got false for both, which leaves nothing to "
            "do. Leave one of them out."
        )
    for group in ("callbacks", "logger"):
        given = [o for o in task_overrides() if o.startswith(f"{group}=")]
        if given and cfg.get(group) is None and given[-1] not in (f"{group}=null", f"{group}=none"):
            raise ValueError(
                f"{given[-1]}: expected a run that takes {group}, got one without, as debug=... "
                "leaves them out. Leave out one of the two."
            )


def _check_checkpoint(key: str, path: object) -> None:
    """Checks that an option is null, or a file or remote address that can be read."""
    problem = None if path is None else problem_of(path)
    if problem is not None:
        raise ValueError(
            f"{key}: expected a checkpoint file, got {path!r}, {problem}. A run leaves its "
            "checkpoints in the folder checkpoints/ of its run folder."
        )


def problem_of(path: object) -> str | None:
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
