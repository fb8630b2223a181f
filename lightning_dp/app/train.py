"""Trains, validates after each epoch and tests the best checkpoint: ``python -m lightning_dp``."""

import logging
import sys

import hydra
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.build import begin, problem_of
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.run import as_program, check_flags, composed_in_one_line, table_in_the_end
from lightning_dp.app.together import agree_on_run_folder

log = logging.getLogger(__name__)

register_resolvers()


def train(cfg: DictConfig) -> report.Report:
    """Runs the job that ``conf/train.yaml`` describes; results go to ``cfg.paths.output_dir``."""
    job = begin(cfg)
    trainer, per_device, note = job.trainer, {}, None
    metrics: dict[str, float] = {}
    if cfg.train:
        trainer.fit(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path)
        metrics |= report.metrics_of(trainer)
        # Read before the test, whose samples are none of training's.
        per_device, note = report.training_of(trainer), report.note_of(trainer)
    if cfg.test:
        ckpt_path = _best(trainer) if cfg.train else cfg.ckpt_path
        trainer.test(job.model, datamodule=job.data, ckpt_path=ckpt_path, verbose=False)
        metrics |= report.metrics_of(trainer)
        per_device |= report.tested_of(trainer)
    result = report.Report(metrics, report.device_names(trainer), per_device, note)
    report.finish(result, trainer, job.folder)
    return result


def _best(trainer: Trainer) -> str | None:
    """The best checkpoint; None, for the weights as they are, if none was written."""
    best: str | None = getattr(trainer.checkpoint_callback, "best_model_path", None) or None
    problem = best and problem_of(best)
    if not problem:
        return best
    # Of a resumed training with no epoch of its own.
    log.warning("the best checkpoint was %s, %s: the last weights are tested", best, problem)
    return None


def main() -> None:
    """Entry point of the command line; a sweeper gets ``optimized_metric``."""
    check_flags(sys.argv[1:])
    agree_on_run_folder()
    with table_in_the_end(), composed_in_one_line("train"):
        _main()


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="train")
@as_program
def _main(cfg: DictConfig) -> float | None:
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
