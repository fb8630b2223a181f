"""What the scripts in examples/ share: options, a quiet Trainer, tables of text."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp.monitor import Period

_ACCELERATORS = ("cpu", "gpu")
_EVERY = 5


def whole_numbers(text: str) -> list[int]:
    """The `type=` of an option that is several whole numbers, such as the ids "7,9"."""
    return [int(part) for part in text.split(",")]


class ScriptParser(argparse.ArgumentParser):
    """Parses the options of an example, `--accelerator`, `--devices` and `--epochs` among them."""

    def __init__(self, description: str, *, devices: int, epochs: int) -> None:
        super().__init__(
            description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        self.add_argument("--accelerator", default="cpu", choices=_ACCELERATORS)
        self.add_argument("--devices", type=int, default=devices, help="number of devices")
        self.add_argument("--epochs", type=int, default=epochs, help="epochs to train")


def script_trainer(*callbacks: Callback, **options: Any) -> L.Trainer:
    """A Trainer without logger, checkpoints, progress bar and summary."""
    return L.Trainer(
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train_and_test(
    make: Callable[[], L.LightningModule],
    data: L.LightningDataModule,
    callback: Callback,
    **options: Any,
) -> None:
    """Trains and tests; the same data and first weights whatever the devices."""
    L.seed_everything(42, verbose=False)
    trainer, model = script_trainer(callback, **options), make()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)


class Losses(Callback):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Notes the step's loss."""
        self.losses.append(float(outputs["loss"]))


@dataclass(frozen=True)
class ShortFit:
    """What a few steps have left: their losses, and what several devices did in them."""

    losses: list[float]
    steps: list[Period]

    @property
    def seconds_per_step(self) -> float:
        """How long the devices took, until the last of them was done."""
        total = sum(self.steps, Period())
        return (total.busy_seconds[0] + total.waiting_seconds[0]) / total.steps


def short_fits(
    make: Callable[[], L.LightningModule],
    data: L.LightningDataModule,
    splits: Sequence[str],
    *,
    accelerator: str,
    devices: int,
    steps: int,
) -> dict[str, ShortFit]:
    """Fits the same model to the same data for a few steps: on "1 device", and with each split."""
    fits = {}
    for name in ("1 device", *splits):
        L.seed_everything(42, verbose=False)
        losses, monitor = Losses(), DataParallelMonitor()
        trainer = script_trainer(
            losses,
            monitor,
            strategy=DataParallelStrategy(split=name if name in splits else "even"),
            accelerator=accelerator,
            devices=devices if name in splits else 1,
            max_steps=steps,
            limit_val_batches=0,
        )
        trainer.fit(make(), data)
        fits[name] = ShortFit(losses.losses, monitor.periods)
    return fits


def loss_rows(fits: Mapping[str, ShortFit]) -> list[list[str]]:
    """The losses of some steps of all fits, side by side, and how far they are from the first's."""
    steps = list(zip(*(fit.losses for fit in fits.values()), strict=True))
    shown = range(0, len(steps), _EVERY)
    rows = [[str(i + 1), *(f"{loss:.6f}" for loss in steps[i])] for i in shown]
    furthest = [max(abs(step[0] - step[i]) for step in steps) for i in range(len(fits))]
    return [
        ["loss in step", *fits],
        *rows,
        ["furthest off", *(f"{distance:.1e}" for distance in furthest)],
    ]


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, its columns aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
