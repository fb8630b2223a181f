"""Trains and tests: ``python -m lightning_dp.app.template``."""

import hydra
from omegaconf import DictConfig

from lightning_dp.app.run import as_program
from lightning_dp.app.together import agree_on_run_folder
from lightning_dp.app.train import train


@hydra.main(version_base="1.3", config_path="conf", config_name="main")
@as_program
def main(cfg: DictConfig) -> None:
    """Runs what conf/main.yaml says, and the command line."""
    train(cfg)


if __name__ == "__main__":
    agree_on_run_folder()
    main()
