"""Trains, validates after each epoch and tests the best checkpoint: ``python -m lightning_dp``."""

import logging
from pathlib import Path

import hydra
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.build import begin
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.options import OptionError
from lightning_dp.app.run import as_program
from lightning_dp.app.together import quiet_other_processes

log = logging.getLogger(__name__)

register_resolvers()


def train(cfg: DictConfig) -> report.Report:
    """Runs the job that ``conf/train.yaml`` describes; results go to ``cfg.paths.output_dir``."""
    job = begin(cfg)
    trainer, usage = job.trainer, report.Usage()
    metrics: dict[str, float] = {}
    if cfg.train:
        trainer.fit(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path)
        metrics |= report.metrics_of(trainer)
        usage = report.usage_of(trainer)
    if cfg.test:
        ckpt_path = _best(trainer) if cfg.train else cfg.ckpt_path
        trainer.test(job.model, datamodule=job.data, ckpt_path=ckpt_path, verbose=False)
        metrics |= report.metrics_of(trainer)
    result = report.Report(metrics, report.device_names(trainer), usage)
    report.finish(result, trainer, job.folder)
    return result


def _best(trainer: Trainer) -> str | None:
    """The best checkpoint; None, for the weights as they are, if there is none.

    A resumed training that had no better epoch names the file of the run before, which may be gone.
    """
    best: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best and "://" not in best and not Path(best).exists():
        log.warning("the best checkpoint, %s, does not exist: the last weights are tested", best)
        return None
    return best or None


def main() -> None:
    """Entry point of the command line; a sweeper gets ``optimized_metric``."""
    quiet_other_processes()
    _main()


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="train")
@as_program
def _main(cfg: DictConfig) -> float | None:
    metrics = train(cfg).metrics
    if cfg.optimized_metric is None:
        return None
    if cfg.optimized_metric not in metrics:
        raise OptionError(
            f"optimized_metric: expected one of {sorted(metrics)}, got "
            f"{cfg.optimized_metric!r}. Name a metric that the model logs."
        )
    return metrics[cfg.optimized_metric]


if __name__ == "__main__":
    main()
