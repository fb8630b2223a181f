"""Tests what a training has left: ``python -m lightning_dp.app.evaluate run=FOLDER``."""

import sys
import warnings

import hydra
from omegaconf import DictConfig

from lightning_dp.app import report
from lightning_dp.app.build import begin
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.run import as_program, check_flags, composed_in_one_line, table_in_the_end
from lightning_dp.app.together import agree_on_run_folder
from lightning_dp.app.trained import as_trained, task_overrides

register_resolvers()


def evaluate(cfg: DictConfig) -> report.Report:
    """Tests ``cfg.ckpt_path``, or what the training in the folder ``cfg.run`` has left."""
    cfg = as_trained(cfg, task_overrides())
    job = begin(cfg)
    trainer = job.trainer
    with warnings.catch_warnings():
        # A test needs none of the training's callbacks.
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        trainer.test(job.model, datamodule=job.data, ckpt_path=cfg.ckpt_path, verbose=False)
    metrics, devices = report.metrics_of(trainer), report.device_names(trainer)
    result = report.Report(metrics, devices, report.tested_of(trainer))
    report.finish(result, trainer, job.folder)
    return result


def main() -> None:
    """Entry point of the command line."""
    check_flags(sys.argv[1:])
    agree_on_run_folder()
    with table_in_the_end(), composed_in_one_line("eval"):
        _main()


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="eval")
@as_program
def _main(cfg: DictConfig) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()
