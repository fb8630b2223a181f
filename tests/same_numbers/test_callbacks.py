"""Callbacks do what they do with one device; what they change in a module reaches its replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from support import oracle
from support.oracle import (
    Classifier,
    assert_as_one_device,
    assert_equal_trees,
    assert_same,
    loader,
    run,
)
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode at the start of training"),
]

EXACT = {"atol": 1e-10, "rtol": 0.0}


class Memory(Logger):
    """Keeps what is logged."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Normalised(Classifier):
    """With batch norm in evaluation mode, so that there are buffers that hooks may swap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.net(self.drop(self.norm(x)))


class Scheduled(Normalised):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return [optimizer], [schedule]


def counts(mode: str) -> list[tuple[int, dict[str, Any]]]:
    """The numbers of devices to compare and their options, on devices of the same kind.

    With one device, too, random numbers drawn on it and Lightning's pruning differ between kinds.
    """
    options = {"accelerator": oracle.accelerator()}
    return [(3, {"strategy": {"mode": mode}, **options}), (1, options)]


def averaging() -> list[Callback]:
    """Exponential averages of weights and buffers, updated after every other step."""

    class Average(lightning_callbacks.WeightAveraging):
        def __init__(self) -> None:
            average = torch.optim.swa_utils.get_ema_avg_fn(0.8)
            super().__init__(use_buffers=True, avg_fn=average)

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 0

    return [Average()]


CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "stops": lambda: [EarlyStopping("val/loss", patience=0, min_delta=0.02)],
    "averages at the end": lambda: [StochasticWeightAveraging(0.03, swa_epoch_start=1)],
    "averages": averaging,
    "accumulates": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
    "watches rates": lambda: [LearningRateMonitor("step", log_momentum=True)],
    "prunes": lambda: [ModelPruning("l1_unstructured", amount=0.3)],
}


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_training_and_the_callbacks_state_are_those_of_one_device(name: str, mode: str) -> None:
    if name == "averages" and not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("Lightning averages weights from 2.6 on")
    torch.set_default_dtype(torch.float64)
    results, logs, states = [], [], []
    for devices, options in counts(mode):
        logger, callbacks = Memory(), CALLBACKS[name]()
        job = run(Scheduled, devices, callbacks=callbacks, logger=logger, **options)
        results.append(job)
        logs.append(logger.logged)
        states.append([callback.state_dict() for callback in callbacks])
    assert_same(*results)
    assert_equal_trees(*logs, "logged", **EXACT)
    assert_equal_trees(*states, "callbacks", **EXACT)


def test_checkpoints_are_the_same_files_with_the_same_contents(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    found = []
    for k in (3, 1):
        folder = tmp_path / str(k)
        best = ModelCheckpoint(
            folder, "{epoch}-{step}", monitor="val/loss", save_top_k=2, save_last=True
        )
        often = ModelCheckpoint(folder / "often", every_n_train_steps=2, save_top_k=-1)
        run(Normalised, k, callbacks=[best, often], enable_checkpointing=True, max_epochs=3)
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*.ckpt"))
        saved = {path: torch.load(folder / path, map_location="cpu") for path in paths}
        for checkpoint in saved.values():
            del checkpoint["callbacks"]  # they name their folder
        found.append((saved, best.best_model_score, Path(best.best_model_path).name))
    assert len(found[1][0]) == 2 + 1 + 4
    assert_equal_trees(*found, "checkpoints", **EXACT)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_predictions_are_written_with_their_indices(interval: Any) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__(interval)
            self.written: list[Any] = []

        def write_on_batch_end(self, job: Any, module: Any, *what: Any) -> None:
            prediction, indices, batch, batch_idx, _ = what
            self.written.append((prediction, indices, [x.cpu() for x in batch], batch_idx))

        def write_on_epoch_end(
            self, job: Any, module: Any, predictions: Any, batch_indices: Any
        ) -> None:
            self.written.append((predictions, batch_indices))

    def written(devices: int) -> list[Any]:
        writer = Writer()
        job = oracle.trainer(devices, callbacks=[writer])
        job.predict(Normalised(), loader(), return_predictions=False)
        return writer.written

    torch.set_default_dtype(torch.float64)
    count = {"batch": 3, "epoch": 1, "batch_and_epoch": 4}[interval]
    assert len(assert_as_one_device(written)) == count


def test_the_learning_rate_finder_finds_the_same_rate(tmp_path: Path) -> None:
    def found(devices: int) -> Any:
        finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
        module, data = Normalised(), loader(n=100, batch_size=10)
        options = {"max_epochs": 2, "default_root_dir": tmp_path}
        job = oracle.trainer(devices, callbacks=[finder], **options)
        job.fit(module, data, data)
        results = finder.optimal_lr.results
        assert len(results["loss"]) == 20 and module.lr != 0.05
        return results, module.lr, module.state_dict(), dict(job.callback_metrics)

    torch.set_default_dtype(torch.float64)
    assert_as_one_device(found)
