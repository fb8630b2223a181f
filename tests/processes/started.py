"""A fit as a script for torchrun: `started.py FOLDER [KEY=VALUE ...]`; the options are `Options`.

Each process writes its id to FOLDER/pid-RANK, and its parameters to FOLDER/done-RANK.pt if it comes
to the end.
"""

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

SAMPLES, BATCH = 53, 9


@dataclass
class Options:
    """What becomes of a fit.

    Attributes:
        devices: how many a machine has.
        machines: how many there are.
        epochs: how many there are.
        fault: what happens to one process: "", "raise", "hang", "kill", "term", "interrupt".
        rank: to which process; -1 for all.
        batch: at which batch of all epochs.
        timeout: of collectives, in seconds.
        dropout: whether the module has some.
        workers: of the DataLoader.
        resume: whether to go on from the last checkpoint, if there is one.
        pause: seconds that every step takes at least.
        executor: of the strategy.
    """

    devices: int = 2
    machines: int = 1
    epochs: int = 2
    fault: str = ""
    rank: int = 1
    batch: int = 4
    timeout: float = 60.0
    dropout: bool = False
    workers: int = 0
    resume: bool = False
    pause: float = 0.0
    executor: str = "inorder"


class Net(LightningModule):
    """A small classifier; something may happen to it once."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        drop = [nn.Dropout(0.3)] if options.dropout else []
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), *drop, nn.Linear(16, 3)).double()
        self.options, self.seen = options, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.options.pause)
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        at = self.trainer.fit_loop.total_batch_idx + 1
        own = self.options
        if own.fault and at == own.batch and own.rank in (-1, self.global_rank):
            happen(own.fault)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def happen(fault: str) -> None:
    """Does what is to happen."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if fault == "raise":
        raise ValueError("the data are bad")
    if fault == "hang":
        time.sleep(1000)
    names = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
    os.kill(os.getpid(), names[fault])


def loader(options: Options) -> DataLoader[Any]:
    """Of samples in an order that is drawn anew in every epoch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=options.workers)


def fitted(folder: Path, options: Options, strategy: Any = None) -> Net:
    """The module after a fit that saves after every step."""
    seed_everything(1, verbose=False)
    module = Net(options)
    saving = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)
    own = DataParallelStrategy(executor=options.executor)
    own._timeout = timedelta(seconds=options.timeout)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.machines,
        strategy=own if strategy is None else strategy,
        max_epochs=options.epochs,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(options), ckpt_path="last" if options.resume else None)
    return module


def parsed(arguments: list[str]) -> Options:
    """Options from the command line."""
    options = Options()
    kinds = {field.name: type(getattr(options, field.name)) for field in fields(options)}
    for argument in arguments:
        key, value = argument.split("=")
        setattr(options, key, value == "True" if kinds[key] is bool else kinds[key](value))
    return options


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    pid = target / f"pid-{os.environ.get('RANK', '0')}"
    pid.write_text(str(os.getpid()))
    net = fitted(target, parsed(sys.argv[2:]))
    torch.save(net.state_dict(), target / f"done-{os.environ.get('RANK', '0')}.pt")
