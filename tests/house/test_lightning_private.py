"""Each private name of Lightning and torchmetrics does what `lightning_private` says of it.

The names stand in the tests, so that a new release tells which one it changed.
"""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities import distributed
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from support.processes import run_in_processes
from torch import nn
from torchmetrics import MeanMetric

from lightning_dp import lightning_private as private


def _trainer(**options: Any) -> Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(quiet, False)}
    return Trainer(**{**defaults, **options})


def test_a_name_that_is_gone_is_told_with_the_release() -> None:
    release = f"lightning {lightning.__version__}"
    with pytest.raises(RuntimeError, match=f"Trainer to have _gone, got {release} without it"):
        private.found(_trainer(), "_gone")


def test_device_of_a_lightning_module() -> None:
    module = BoringModel()
    vars(module).update(private.own_device(module, torch.device("meta")))
    assert module.device == torch.device("meta")
    assert private.own_device(nn.Linear(1, 1), torch.device("meta")) == {}


@pytest.mark.parametrize("name", ["_defaults", "_update_count", "_computed", "_forward_cache"])
def test_an_unused_state_has_what_a_used_metric_has(name: str) -> None:
    used = MeanMetric()
    used(3.0)
    used.compute()
    assert private.found(used, "_forward_cache") == 3
    state = private.unused_state(used, torch.device("cpu"))
    assert name in vars(used) and name in state
    vars(used).update(state)
    assert not used.update_called
    used.update(5.0)
    assert used.compute() == 5


class _Logs(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.seen: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(private.running_hook(self))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean.update(1.0)
        private.keep_batch_value(self.mean, torch.tensor(7.0))
        self.log("mean", self.mean, on_step=True)
        self.log("loss", output["loss"])
        self.seen += [private.running_hook(self), [*private.results_of(self.trainer)]]
        return output


def test_forward_cache_results_and_current_fx_name_are_those_of_a_step() -> None:
    module, trainer = _Logs(), _trainer(limit_train_batches=1, limit_val_batches=0)
    assert private.running_hook(module) is None
    trainer.fit(module)
    assert trainer.callback_metrics["mean"] == 7
    logged = ["training_step.mean", "training_step.loss"]
    assert module.seen == ["on_train_batch_start", "training_step", logged]


def test_layer_sync_and_checkpoint_io_of_a_strategy() -> None:
    strategy = _trainer(strategy=DDPStrategy(), sync_batchnorm=True).strategy
    assert type(private.layer_sync(strategy)) is TorchSyncBatchNorm
    plugin = TorchSyncBatchNorm()
    private.set_layer_sync(strategy, plugin)
    assert private.layer_sync(strategy) is plugin
    assert private.layer_sync(_trainer(strategy=DDPStrategy()).strategy) is None
    plain, other = TorchCheckpointIO(), TorchCheckpointIO()
    assert private.given_io(SingleDeviceStrategy("cpu")) is None
    strategy = SingleDeviceStrategy("cpu", checkpoint_io=plain)
    assert private.given_io(strategy) is plain is strategy.checkpoint_io
    private.set_io(strategy, other)
    assert strategy.checkpoint_io is other


class _Steps(Callback):
    """Notes what Lightning tells of each batch."""

    def __init__(self) -> None:
        self.accumulating: list[bool] = []
        self.due: list[bool] = []
        self.steps: list[int] = []

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self.accumulating.append(private.is_accumulating(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.due.append(private.is_time_to_log(trainer))
        self.steps.append(private.logged_step(trainer))


class _Rows(Logger):
    """Keeps the numbers of the steps that Lightning logs."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.steps.append(-1 if step is None else step)


def _fit(**options: Any) -> tuple[_Steps, _Rows]:
    steps, rows = _Steps(), _Rows()
    _trainer(callbacks=[steps], logger=rows, limit_val_batches=0, **options).fit(_Logs())
    return steps, rows


def test_should_accumulate_and_batches_that_stepped() -> None:
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    steps, rows = _fit(limit_train_batches=5, **options)
    assert steps.accumulating == [True, False, True, False, False]
    assert rows.steps == [0, 1, 2] and steps.steps == [0, 0, 1, 1, 2], "as when a batch ends"


def test_logger_connector_tells_when_logs_are_due() -> None:
    steps, rows = _fit(limit_train_batches=6, log_every_n_steps=3)
    assert steps.due == [False, False, True, False, False, True]
    assert rows.steps == [2, 5]


def _ranks() -> tuple[int, int, bool]:
    private.join_process_group(TorchElasticEnvironment(), "gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    distributed._destroy_dist_connection()  # as at exit
    return rank, size, torch.distributed.is_initialized()


@pytest.mark.slow
def test_init_dist_connection_makes_the_process_group_and_destroy_dist_connection_ends_it() -> None:
    assert run_in_processes(_ranks, 2) == [(0, 2, False), (1, 2, False)]


@pytest.mark.parametrize(("devices", "count"), [(3, 3), ("3", 3), ("auto", None), (1, None)])
def test_accelerator_connector_devices_flag_is_what_was_asked_for(
    devices: Any, count: int | None
) -> None:
    """On the CPU 1 is what "auto" comes to."""
    assert private.devices_asked_for(_trainer(devices=devices, strategy="ddp")) == count


def test_IndexBatchSamplerWrapper_notes_the_indices_of_predict() -> None:
    seen: list[Any] = []

    class Looking(Callback):
        def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
            sampler = trainer.predict_dataloaders.batch_sampler
            assert private.is_index_sampler(sampler)
            seen.append(list(sampler.seen_batch_indices))

    _trainer(limit_predict_batches=2, callbacks=[Looking()]).predict(BoringModel())
    assert seen[0][0] == [0] and not private.is_index_sampler(seen)
