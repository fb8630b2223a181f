"""Trainings through Lightning's Trainer, at a pace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.job import Job
from benchmarks.models import workload
from benchmarks.pace import Pace
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset


class InTurns(IterableDataset[Any]):
    """Batches that take turns, for ever."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def loader(job: Job, batches: Sequence[Any]) -> DataLoader[Any]:
    """A loader without workers: batches are in memory already, pinned for accelerators."""
    if job.device != "cpu":
        batches = [pinned(batch) for batch in batches]
    return DataLoader(InTurns(batches), batch_size=None)


def pinned(batch: Any) -> Any:
    """The batch in memory that copies do not wait for."""
    if isinstance(batch, dict):
        return {key: pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(pinned, batch))
    return batch.pin_memory()


class Paced(Callback):
    """Waits between the steps of a fit for the pace."""

    def __init__(self, pace: Pace, devices: Sequence[torch.device]) -> None:
        self._pace = pace
        self._devices = devices

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All is prepared."""
        weights = sum(p.numel() * p.element_size() for p in pl_module.parameters())
        trainer.should_stop = not self._pace.begin(self._devices, parameter_bytes=weights)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """A step is over."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if not self._pace.step_done(loss):
            trainer.should_stop = True


def model_of(job: Job) -> LightningModule:
    """The job's model; one that logs has its loss, of all devices, logged in each step."""
    model = workload(job.model).make()
    if job.logs:
        model.__class__ = type(type(model).__name__, (_Logging, type(model)), {})
    return model


class _Logging(LightningModule):
    """Logs the loss of each step, as most modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's own."""
        returned = super().training_step(batch, batch_idx)
        loss = returned["loss"] if isinstance(returned, dict) else returned
        self.log("train/loss", loss.detach(), on_step=True, on_epoch=False, sync_dist=True)
        return returned


def fit(
    job: Job,
    pace: Pace,
    batches: Sequence[Any] | DataLoader[Any],
    own: Sequence[torch.device],
    **options: Any,
) -> None:
    """Trains the job's model by a Trainer with these options.

    Args:
        job: what is trained.
        pace: how many steps.
        batches: of this process, or what loads them.
        own: the devices of this process.
        options: of the Trainer.
    """
    trainer = Trainer(
        accelerator=job.accelerator,
        max_epochs=1,
        min_epochs=0,
        min_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Paced(pace, own)],
        **options,
    )
    loads = batches if isinstance(batches, DataLoader) else loader(job, batches)
    trainer.fit(model_of(job), loads)
