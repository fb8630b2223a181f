"""The Trainer: its entry points in any order, its options, callbacks, profilers and checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
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
from lightning.pytorch.utilities import CombinedLoader
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


class Normalised(Classifier):
    """With batch norm in evaluation mode, so that there are buffers that hooks may swap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.net(self.drop(self.norm(x)))


# What the entry points return and leave


class Several(Classifier):
    """Takes batches of two loaders at once, of which one may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        loss = torch.stack([self.loss(part) for part in parts if part is not None]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(parts[0][1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))
        self.log(f"of {dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"y": self.net(batch[0]), "from": f"{dataloader_idx}, {batch_idx}"}


class Writer(BasePredictionWriter):
    """Keeps what is to be written, with its indices."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, job: Any, module: Any, *what: Any) -> None:
        prediction, indices, batch, batch_idx, _ = what
        self.written.append((prediction, indices, [x.cpu() for x in batch], batch_idx))

    def write_on_epoch_end(self, job: Any, module: Any, *what: Any) -> None:
        self.written.append(what)


def in_order(order: tuple[str, ...], job: Trainer) -> Any:
    """All entry points, twice."""
    found: list[Any]
    module, found = Classifier(), []
    for turn in range(2):
        job.fit_loop.max_epochs = turn + 1
        for entry in order:
            options = {"verbose": False} if entry in ("validate", "test") else {}
            arguments = (loader(), loader()) if entry == "fit" else (loader(),)
            found.append(getattr(job, entry)(module, *arguments, **options))
            found.append(dict(job.callback_metrics))
    return found, module.state_dict(), job.global_step


def combined(how: Any, keys: Any, job: Trainer) -> Any:
    """Two loaders for training, and two of other lengths for everything else."""
    module = Several()
    loaders: Any = [loader(n=50, batch_size=10), loader(n=30, batch_size=10)]
    pair = [loader(n=53, batch_size=12), loader(n=30, batch_size=12)]
    if keys is not None:
        loaders = dict(zip(keys, loaders, strict=True))
    job.fit(module, CombinedLoader(loaders, how), pair)
    fitted, validated = dict(job.callback_metrics), job.validate(module, pair, verbose=False)
    tested = job.test(module, pair, verbose=False)
    return module.state_dict(), fitted, validated, tested, job.predict(module, pair)


def written(job: Trainer) -> Any:
    writer = Writer()
    job.callbacks.append(writer)
    job.predict(Normalised(), loader(), return_predictions=False)
    assert len(writer.written) == 3 + 1
    return writer.written


def rate_found(job: Trainer) -> Any:
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    job.callbacks.append(finder)
    module, data = Normalised(), loader(n=100, batch_size=10)
    job.fit(module, data, data)
    assert len(finder.optimal_lr.results["loss"]) == 20 and module.lr != 0.05
    return finder.optimal_lr.results, module.lr, module.state_dict(), dict(job.callback_metrics)


USES: dict[str, Callable[[Trainer], Any]] = {
    **{
        "-".join(order): partial(in_order, order)
        for order in [*itertools.permutations(["fit", "validate", "test", "predict"])][::5]
    },
    "as many batches as the shorter loader": partial(combined, "min_size", ("a", "b")),
    "the shorter loader again": partial(combined, "max_size_cycle", None),
    "the shorter loader ends": partial(combined, "max_size", ("a", "b")),
    "predictions written": written,
    "a learning rate found": rate_found,
}


@pytest.mark.parametrize("use", USES)
def test_what_is_done_with_a_trainer(use: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    options = {"max_epochs": 2, "default_root_dir": tmp_path}
    assert_as_one_device(lambda devices: USES[use](oracle.trainer(devices, **options)))


# Options and callbacks


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


class Resettable(Classifier):
    def train_dataloader(self) -> Any:
        return loader()

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


class Scheduled(Normalised):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return [optimizer], [schedule]


def averaging() -> Callback:
    """Exponential averages of weights and buffers, updated after every other step."""

    class Average(lightning_callbacks.WeightAveraging):
        def __init__(self) -> None:
            average = torch.optim.swa_utils.get_ema_avg_fn(0.8)
            super().__init__(use_buffers=True, avg_fn=average)

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 0

    return Average()


OPTIONS: list[dict[str, Any]] = [
    {"limit_train_batches": 2, "limit_val_batches": 1},
    {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "limit_test_batches": 0.4},
    {"overfit_batches": 2},
    {"fast_dev_run": 2},
    {"max_steps": 4, "max_epochs": -1},
    {"min_epochs": 2, "max_epochs": 3, "check_val_every_n_epoch": 2},
    {"val_check_interval": 4, "check_val_every_n_epoch": None},
    {"num_sanity_val_steps": -1},
    {"reload_dataloaders_every_n_epochs": 1},
    {"inference_mode": False},
    {"detect_anomaly": True},
]
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "stops": lambda: EarlyStopping("val/loss", patience=0, min_delta=0.02),
    "averages at the end": lambda: StochasticWeightAveraging(0.03, swa_epoch_start=1),
    "averages": averaging,
    "accumulates": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    "watches rates": lambda: LearningRateMonitor("step", log_momentum=True),
    "prunes": lambda: ModelPruning("l1_unstructured", amount=0.3),
}
if not hasattr(lightning_callbacks, "WeightAveraging"):  # Lightning averages from 2.6 on
    del CALLBACKS["averages"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    data = lambda: loader(shuffle=False)
    results = [run(Resettable, devices, data=data, **options) for devices in (3, 1)]
    assert_same(*results)
    assert results[0].trainer.global_step == results[1].trainer.global_step


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_training_and_the_callbacks_state_are_those_of_one_device(name: str, mode: str) -> None:
    """On devices of one kind: between kinds Lightning's pruning differs."""
    torch.set_default_dtype(torch.float64)
    results, left = [], []
    for devices, strategy in ((3, {"mode": mode}), (1, None)):
        kept: dict[str, Any] = {"logger": Memory(), "callbacks": [CALLBACKS[name]()]}
        where = {"accelerator": oracle.accelerator(), "strategy": strategy}
        results.append(run(Scheduled, devices, **where, **kept))
        left.append((kept["logger"].logged, kept["callbacks"][0].state_dict()))
    assert_same(*results)
    assert_equal_trees(*left, "logged and callback", **EXACT)


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_deterministic_runs_repeat_bit_by_bit(mode: str) -> None:
    """On accelerators autograd's threads add up forward mode's gradients as they arrive."""

    class Random(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(nn.functional.dropout(x, 0.3, self.training))

    runs = [run(Random, 3, deterministic=True, strategy={"mode": mode}) for _ in range(2)]
    assert_same(*runs, atol=0)


STAGES = ("scatter", "replicate", "apply", "gather", "backward", "reduce")


def test_profilers_see_the_stages() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        oracle.trainer(3, max_epochs=1).fit(Classifier(), loader(), loader())
    counts = {event.key: event.count for event in profile.key_averages()}
    assert all(counts[f"lightning_dp.{stage}"] >= 3 for stage in STAGES)


# Checkpoints


def test_checkpoints_are_the_same_files_with_the_same_contents(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)

    def saved(devices: int) -> Any:
        folder = tmp_path / str(devices)
        options = {"monitor": "val/loss", "save_top_k": 2, "save_last": True}
        best = ModelCheckpoint(folder, "{epoch}-{step}", **options)
        often = ModelCheckpoint(folder / "often", every_n_train_steps=2, save_top_k=-1)
        run(Normalised, devices, callbacks=[best, often], enable_checkpointing=True, max_epochs=3)
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*.ckpt"))
        files = {path: torch.load(folder / path, map_location="cpu") for path in paths}
        for checkpoint in files.values():
            del checkpoint["callbacks"]  # they name their folder
        return files, best.best_model_score, Path(best.best_model_path).name

    assert len(assert_as_one_device(saved)[0]) == 2 + 1 + 4


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_checkpoints_go_on_with_other_devices(before: int, after: int, tmp_path: Path) -> None:
    """Three epochs on any devices are the three epochs of one device, optimizer's state and all."""
    torch.set_default_dtype(torch.float64)

    def fit(devices: int, epochs: int, path: Path | None = None) -> tuple[Any, Path]:
        torch.manual_seed(0)
        job = oracle.trainer(devices, "dp_custom" if devices > 1 else "auto", max_epochs=epochs)
        job.fit(Classifier(), loader(), loader(), ckpt_path=path)
        saved = tmp_path / f"{devices}-{epochs}.ckpt"
        job.save_checkpoint(saved)
        return torch.load(saved, weights_only=True), saved

    expected, _ = fit(1, 3)
    resumed, _ = fit(after, 3, fit(before, 2)[1])
    assert_equal_trees(resumed, expected, "resumed", **EXACT)
