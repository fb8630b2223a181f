"""Ordinary user code in several processes: callbacks, hooks, loaders that nobody wrote for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from support import oracle
from support.oracle import Classifier, assert_equal_trees, loader
from support.processes import run_in_processes

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`weights_only` was not set"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

Job = Callable[[int, Path], Any]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    """One that gives the same on one device and in several processes."""
    JOBS[function.__name__] = function
    return function


Net = Classifier


def trained(devices: int, module: Any = None, *data: Any, **options: Any) -> Any:
    """A Trainer after a fit, and all that it left on the module."""
    module = Net() if module is None else module
    strategy = options.pop("strategy", {})
    own = DataParallelStrategy(**strategy) if devices > 1 else "auto"
    trainer = oracle.trainer(devices, own, **options)
    trainer.fit(module, *(data or (loader(), loader())))
    return trainer


def left(trainer: Any, *more: Any) -> Any:
    module = trainer.lightning_module
    counts = trainer.global_step, trainer.current_epoch
    return dict(module.state_dict()), dict(trainer.callback_metrics), counts, *more


class Outputs(Net):
    """Hooks read what steps return and what has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "count": torch.tensor(float(len(batch[1])))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.log("hook", outputs["loss"] * 2, on_step=True)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["train/loss_epoch"] + 1)
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.broadcast(self.current_epoch) == self.current_epoch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


@job
def outputs_in_hooks(devices: int, folder: Path) -> Any:
    module = Outputs()
    trainer = trained(devices, module, logger=CSVLogger(folder))
    return left(trainer, module.losses)


class Resumed(Net):
    """Keeps more in its checkpoints."""

    seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


@job
def gone_on(devices: int, folder: Path) -> Any:
    options: Any = {"enable_checkpointing": True, "default_root_dir": folder}
    first = trained(devices, Resumed(), max_epochs=1, **options)
    first.save_checkpoint(folder / "own.ckpt")
    strategy = DataParallelStrategy() if devices > 1 else "auto"
    saving = ModelCheckpoint(folder / "more", every_n_train_steps=2, save_top_k=-1, save_last=True)
    again = oracle.trainer(devices, strategy, max_epochs=3, callbacks=[saving], **options)
    again.fit(Resumed(), loader(), loader(), ckpt_path=folder / "own.ckpt")
    names = sorted(path.name for path in (folder / "more").iterdir())
    return left(again, again.lightning_module.seen, names)


def found_by(names: list[str], devices: int, folder: str) -> dict[str, Any]:
    """What each job gives, or the error that it comes to."""
    torch.set_default_dtype(torch.float64)
    answers: dict[str, Any] = {}
    for name in names:
        own = Path(folder, name)
        own.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        answers[name] = JOBS[name](devices, own)
    return answers


def check(names: list[str], processes: int, devices: int, folder: Path) -> None:
    one = found_by(names, 1, f"{folder}/one")
    several = run_in_processes(found_by, processes, names, processes * devices, f"{folder}/more")
    for rank, answers in enumerate(several):
        for name in names:
            what = f"{name}, process {rank}"
            assert_equal_trees(answers[name], one[name], what, atol=1e-10, rtol=0)


def test_two_processes(tmp_path: Path) -> None:
    check(["outputs_in_hooks", "gone_on"], 2, 2, tmp_path)
