"""Trains, validates after each epoch and tests the best checkpoint: ``python -m lightning_dp``."""

import hydra
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.build import begin
from lightning_dp.app.compare import compared
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.run import as_program

register_resolvers()


def train(cfg: DictConfig) -> report.Report:
    """Runs the job that ``conf/train.yaml`` describes; results go to ``cfg.paths.output_dir``."""
    job = begin(cfg)
    trainer, per_device = job.trainer, {}
    metrics: dict[str, float] = {}
    if cfg.train:
        trainer.fit(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path)
        metrics |= report.metrics_of(trainer)
        # Read before the test, whose samples are none of training's.
        per_device = report.training_of(trainer)
    if cfg.test:
        # If none was written, the weights as they are.
        best = getattr(trainer.checkpoint_callback, "best_model_path", None) or None
        ckpt_path = best if cfg.train else cfg.ckpt_path
        trainer.test(job.model, datamodule=job.data, ckpt_path=ckpt_path, verbose=False)
        metrics |= report.metrics_of(trainer)
        per_device |= report.tested_of(trainer)
    result = report.Report(metrics, report.device_names(trainer), per_device)
    report.finish(result, trainer, job.folder)
    if cfg.train and cfg.get("compare") and not cfg.trainer.get("fast_dev_run"):
        report.say(compared(cfg, job), trainer)
    return result


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
