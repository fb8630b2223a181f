"""Tests what a training has left: ``python -m lightning_dp evaluate run=FOLDER``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_dp.app import report
from lightning_dp.app.build import begin
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.options import OptionError
from lightning_dp.app.run import as_program
from lightning_dp.app.together import quiet_other_processes

_GROUPS = ("model", "data")

register_resolvers()


def evaluate(cfg: DictConfig) -> report.Report:
    """Tests ``cfg.ckpt_path``, or what the training in the folder ``cfg.run`` has left."""
    is_program = HydraConfig.initialized()
    cfg = as_trained(cfg, HydraConfig.get().overrides.task if is_program else ())
    job = begin(cfg)
    trainer = job.trainer
    trainer.test(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path, verbose=False)
    result = report.Report(report.metrics_of(trainer), report.device_names(trainer))
    report.finish(result, trainer, job.folder)
    return result


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
    trained: Any = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    if not set(_GROUPS) <= {*trained}:
        raise OptionError(
            f"run: expected the folder of a training, got {str(cfg.run)!r}, where no "
            "config.yaml names a model and data. Give a folder of logs/train/runs."
        )
    named = [o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))]
    for group in _GROUPS:
        if group in named or "experiment" in named:
            continue
        composed, cfg[group] = cfg[group], OmegaConf.to_container(trained[group], resolve=True)
        for key in (name for name in named if name.startswith(f"{group}.")):
            inner = key.removeprefix(f"{group}.")
            OmegaConf.update(cfg[group], inner, OmegaConf.select(composed, inner), force_add=True)
    if cfg.ckpt_path is None:
        cfg.ckpt_path = str(_best_of(Path(cfg.run) / "checkpoints"))
    return cfg


def _best_of(folder: Path) -> Path:
    """The best checkpoint, which the training has tested, as the last one names it."""
    last = folder / "last.ckpt"
    if not last.is_file():
        return last
    states = torch.load(last, weights_only=True, mmap=True).get("callbacks", {}).values()
    # Of several ModelCheckpoints the one with a metric knows the best file.
    names = [Path(s["best_model_path"]).name for s in states if s.get("monitor")]
    best = [folder / name for name in names if name and (folder / name).is_file()]
    return [*best, last][0]


def main() -> None:
    """Entry point of the command line."""
    quiet_other_processes()
    _main()


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="eval")
@as_program
def _main(cfg: DictConfig) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()
