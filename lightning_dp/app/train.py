"""Trains, validates after each epoch and tests the best checkpoint: ``python -m lightning_dp``."""

from pathlib import Path

import hydra
import lightning as L
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.build import Job, build, settle
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.run import as_program

register_resolvers()


def train(cfg: DictConfig) -> report.Report:
    """Runs the job that ``conf/train.yaml`` describes and leaves its results in the run folder.

    Args:
        cfg: the composed configuration; results go to ``cfg.paths.output_dir``.

    Returns:
        The metrics and each device's part in the training.

    Raises:
        ValueError: an option is not usable; raised before any data is loaded.
    """
    cfg = settle(cfg)
    if cfg.seed is not None:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
    job = build(cfg)
    folder = Path(cfg.paths.output_dir)
    if job.trainer.is_global_zero:
        report.write_config(cfg, folder)
    result = _run(cfg, job)
    if job.trainer.is_global_zero:
        report.write_metrics(result, folder)
        picture = report.draw_devices(job.trainer, folder)
        report.show(result, folder, picture)
    return result


def _run(cfg: DictConfig, job: Job) -> report.Report:
    trainer = job.trainer
    metrics: dict[str, float] = {}
    usage: tuple[report.DeviceUsage, ...] = ()
    if cfg.train:
        trainer.fit(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path)
        metrics |= report.metrics_of(trainer)
        # Read before the test, whose samples are none of training's.
        usage = report.usage_of(trainer)
    if cfg.test:
        ckpt_path = _best_checkpoint(trainer) if cfg.train else cfg.ckpt_path
        trainer.test(job.model, datamodule=job.data, ckpt_path=ckpt_path, verbose=False)
        metrics |= report.metrics_of(trainer)
    tested = report.tested_of(trainer)
    return report.Report(metrics, report.device_names(trainer), usage, tested)


def _best_checkpoint(trainer: Trainer) -> str | None:
    """Returns the best checkpoint's path; None (the weights as they are) if none was written."""
    return getattr(trainer.checkpoint_callback, "best_model_path", None) or None


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="train")
@as_program
def main(cfg: DictConfig) -> float | None:
    """Entry point of the command line; returns ``optimized_metric`` to a sweeper."""
    result = train(cfg)
    if cfg.optimized_metric is None:
        return None
    if cfg.optimized_metric not in result.metrics:
        raise ValueError(
            f"optimized_metric: expected one of {sorted(result.metrics)}, "
            f"got {cfg.optimized_metric!r}. Name a metric that the model logs."
        )
    return result.metrics[cfg.optimized_metric]


if __name__ == "__main__":
    main()
