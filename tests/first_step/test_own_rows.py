"""What a step does with loggers itself is told, and is done all the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from oracle import Classifier, loader, trainer

TOLD = "expected what is logged to go through self.log, got self.logger"


class Rows(Logger):
    """Keeps what it gets."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Rows:
        return self

    def add_image(self, name: str) -> None:
        self.rows.append(name)

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows += metrics

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None are kept."""


class Draws(Classifier):
    """Each kind of step may log a picture."""

    kinds: tuple[str, ...] = ("training_step",)

    def _draw(self, kind: str, batch_idx: int) -> None:
        if kind in self.kinds and batch_idx == 0:
            logger: Any = self.logger
            assert isinstance(logger, Rows) and type(copy.deepcopy(logger)) is Rows
            assert type(pickle.loads(pickle.dumps(logger))) is Rows
            logger.experiment.add_image(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._draw("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._draw("validation_step", batch_idx)
        return super().validation_step(batch, batch_idx)


def fit(module: Classifier, devices: int, **options: Any) -> list[str]:
    logger = Rows()
    job = trainer(devices, logger=logger, max_epochs=2, num_sanity_val_steps=0, **options)
    job.fit(module, loader(), loader())
    assert job.loggers == [logger]
    return [row for row in logger.rows if row in ("training_step", "validation_step")]


@pytest.mark.parametrize(
    ("kind", "hook"),
    [("training_step", "on_train_batch_end"), ("validation_step", "on_validation_batch_end")],
)
def test_a_step_that_uses_a_logger_is_told_so_once(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Draws, "kinds", (kind,))
    with pytest.warns(UserWarning, match=f"{kind}: {TOLD}.experiment") as records:
        assert fit(Draws(), 3) == [kind] * 6  # of three replicas, in two epochs
    [told] = [str(record.message) for record in records if TOLD in str(record.message)]
    assert told.endswith(f"and log it in {hook}.")


def test_one_device_and_forward_mode_make_one_row_and_are_told_nothing() -> None:
    assert fit(Draws(), 1) == ["training_step"] * 2
    assert fit(Draws(), 3, strategy="dp_custom_forward") == ["training_step"] * 2


def test_what_is_logged_through_the_module_is_told_nothing(tmp_path: Any) -> None:
    job = trainer(3, logger=CSVLogger(tmp_path), max_epochs=1, log_every_n_steps=1)
    job.fit(Classifier(), loader(), loader())
    assert job.logged_metrics


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise KeyError("own")


def test_loggers_are_the_trainers_own_again_after_an_error() -> None:
    logger = Rows()
    job = trainer(3, logger=logger, max_epochs=1)
    with pytest.raises(KeyError, match="own"):
        job.fit(Fails(), loader(), loader())
    assert job.loggers == [logger] and type(job.loggers[0]) is Rows
