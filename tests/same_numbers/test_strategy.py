"""The strategy in the Trainer: options, refusals, failures, checkpoints, one device."""

import importlib
import threading
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from support.device_kinds import not_repeated
from support.oracle import (
    Classifier,
    assert_same,
    devices_of,
    loader,
    run,
    trainer,
)

import lightning_dp
from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on")


@not_repeated
@pytest.mark.parametrize("output_device", [1, "1", None, torch.device("cpu")])
def test_output_devices_may_be_written_in_many_ways(output_device: Any) -> None:
    strategy = trainer(3, DataParallelStrategy(output_device=output_device)).strategy
    expected = (
        torch.device("cpu")
        if isinstance(output_device, torch.device)
        else devices_of(3)[int(output_device or 0)]
    )
    assert strategy.output_device == expected


def test_the_name_is_registered_once_however_often_it_is_imported() -> None:
    importlib.reload(lightning_dp)
    assert StrategyRegistry["dp_custom"]["strategy"] is DataParallelStrategy
    assert type(trainer(2, "dp_custom").strategy) is DataParallelStrategy


def test_devices_of_the_strategy_replace_those_of_the_trainer() -> None:
    job = trainer(1, DataParallelStrategy(devices=["cpu"] * 3))
    assert job.num_devices == 3
    assert job.world_size == 1 and job.global_rank == 0


def test_one_device_is_plain_lightning() -> None:
    """Every step is the base class's own: nothing is added that could cost."""
    seen: list[tuple[str, bool]] = []

    class Watching(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            strategy = self.trainer.strategy
            assert isinstance(strategy, DataParallelStrategy)
            seen.append((threading.current_thread().name, strategy._mode is None))
            assert "log" not in self.__dict__
            return super().training_step(batch, batch_idx)

    module = Watching()
    trainer(1, max_epochs=1).fit(module, loader(), loader())
    assert set(seen) == {("MainThread", True)}
    plain, ours = run(Classifier, 1), run(Classifier, 1)
    assert_same(ours, plain, atol=0)


@pytest.mark.usefixtures("unchecked")
def test_replicas_know_their_device_and_share_the_trainer() -> None:
    class Knowing(Classifier):
        seen: ClassVar[list[Any]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.device, self.trainer.global_step, self.current_epoch))
            assert next(self.parameters()).requires_grad and self.training
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.training and not torch.is_grad_enabled()
            super().validation_step(batch, batch_idx)

    Knowing.seen.clear()
    trainer(3, max_epochs=1).fit(Knowing(), loader(), loader())
    assert {device for device, _, _ in Knowing.seen} == set(devices_of(3))
    assert [step for _, step, _ in Knowing.seen] == [0] * 3 + [1] * 3 + [2] * 3


def test_last_sizes_and_usage_tell_what_each_device_did() -> None:
    job = trainer(3, DataParallelStrategy(weights=[1, 2, 3]), max_epochs=2)
    data = loader(n=48, batch_size=24)
    job.fit(Classifier(), data, data)
    assert job.strategy.last_sizes == (4, 8, 12)
    assert [u.samples for u in job.strategy.usage] == [16, 32, 48]
    assert all(u.busy_seconds > 0 for u in job.strategy.usage)


@pytest.mark.usefixtures("unchecked")
def test_transfer_hooks_run_once_for_the_batch_and_once_per_shard() -> None:
    calls: list[tuple[str, int]] = []

    class Hooked(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("before", len(batch[0])))
            return batch

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            calls.append(("transfer", len(batch[0])))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("after", len(batch[0])))
            return [batch[0] * 2, batch[1]]

    job = trainer(2, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    job.fit(Hooked(), loader(), loader())
    assert calls[:1] == [("before", 25)]
    assert calls[1:] == [("transfer", 13), ("after", 13), ("transfer", 12), ("after", 12)]
    assert_same(run(Hooked, 3), run(Hooked, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_data_loader_workers_and_threads_live_together() -> None:
    data = lambda: loader(num_workers=2, multiprocessing_context="fork")
    assert_same(
        run(Classifier, 3, data=data, strategy={"executor": "threads"}),
        run(Classifier, 1),
        atol=1e-6,
        rtol=1e-5,
    )
