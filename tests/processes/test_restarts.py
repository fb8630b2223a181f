"""A fit that goes on from a checkpoint, of any step, ends as an undisturbed one."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from several_processes import run_in_processes
from started import Options
from started import fitted as fitted_script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_dp import DataParallelStrategy

SAMPLES, BATCH, STEPS = 53, 9, 6


@dataclass(frozen=True)
class Case:
    """A fit.

    Attributes:
        devices: how many, of all processes together; 0 for Lightning's own strategy.
        loader: which one, see `loader`.
        dropout: whether the module has some.
        noise: whether the step draws from Python's and NumPy's generators.
        step: after which one a checkpoint is kept, if one is.
        resume: whether the fit begins at that checkpoint.
        epochs: how many there are.
        limit: how many batches an epoch has; 0 for all.
    """

    devices: int = 1
    loader: str = "shuffled"
    dropout: bool = False
    noise: bool = False
    step: int = 0
    resume: bool = False
    epochs: int = 2
    limit: int = 0


class Keep(Callback):
    """Saves after every step, and as every epoch ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end-epoch={trainer.current_epoch}.ckpt")


class Net(LightningModule):
    """Keeps the first feature of every sample that it has been trained on."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        drop = [nn.Dropout(0.3)] if case.dropout else []
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), *drop, nn.Linear(8, 3)).double()
        self.noise = case.noise

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["a"] if isinstance(batch, dict) else batch
        loss = F.cross_entropy(self.net(x), y)
        if isinstance(batch, dict):
            other, targets = batch["b"]
            loss = loss + F.cross_entropy(self.net(other), targets)
        if self.noise:
            loss = loss * (1 + random.random() + float(np.random.rand()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def tensors(samples: int = SAMPLES) -> list[Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 10, generator=generator, dtype=torch.float64)
    return [x, torch.randint(3, (samples,), generator=generator)]


class Streamed(IterableDataset[Any]):
    """Samples in an order that is drawn as an epoch begins."""

    def __iter__(self) -> Any:
        x, y = tensors()
        for i in torch.randperm(SAMPLES).tolist():
            yield x[i], y[i]


class Noisy(Dataset[Any]):
    """Samples with noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = tensors()
        return x[index] + torch.randn(10, dtype=torch.float64), y[index]


class Drawing:
    """A batch sampler that draws from Python's generator as an epoch begins."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        order = random.sample(range(SAMPLES), SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            yield order[start : start + BATCH]


def loader(kind: str) -> Any:
    """Of a kind."""
    data = TensorDataset(*tensors())
    if kind == "generator":
        own = torch.Generator().manual_seed(3)
        return DataLoader(data, BATCH, shuffle=True, generator=own)
    if kind == "workers":
        return DataLoader(data, BATCH, shuffle=True, num_workers=2)
    if kind == "streamed":
        return DataLoader(Streamed(), BATCH)
    if kind == "noisy":
        return DataLoader(Noisy(), BATCH, shuffle=True)
    if kind == "drawing":
        return DataLoader(data, batch_sampler=Drawing())
    if kind == "ordered":  # six even batches
        return DataLoader(TensorDataset(*tensors(48)), 8)
    if kind == "two":
        data, short = TensorDataset(*tensors(54)), TensorDataset(*tensors(27))
        loaders = {
            "a": DataLoader(data, BATCH, shuffle=True),
            "b": DataLoader(short, BATCH, shuffle=True),
        }
        return CombinedLoader(loaders, "max_size_cycle")
    return DataLoader(data, BATCH, shuffle=True)


def fitted(folder: Path, case: Case) -> dict[str, Tensor]:
    """The parameters after a fit."""
    seed_everything(7 if case.resume else 1, verbose=False)
    module = Net(case)
    own: Any = DataParallelStrategy(executor="inorder")
    trainer = Trainer(
        accelerator="cpu",
        devices=max(case.devices, 1),
        strategy=own if case.devices else "auto",
        max_epochs=case.epochs,
        limit_train_batches=case.limit or None,
        callbacks=[] if case.resume else [Keep(folder)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = None
    if case.resume:
        name = f"step={case.step}" if case.step else "end-epoch=0"
        path = folder / f"{name}.ckpt"
    trainer.fit(module, loader(case.loader), ckpt_path=path)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


KINDS = ["shuffled", "generator", "streamed", "noisy", "drawing", "two"]


def test_without_a_place_the_order_is_drawn_anew(tmp_path: Path) -> None:
    """What the others show is not so by itself."""
    case = Case(0)
    whole = fitted(tmp_path, case)
    with pytest.warns(UserWarning, match="not resumable"):
        own = fitted(tmp_path, replace(case, step=2, resume=True))
    assert (own["net.0.weight"] - whole["net.0.weight"]).abs().max() > 1e-3


def in_processes(folder: Path, case: Case, steps: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """A whole fit, and some that go on from its checkpoints."""
    whole = fitted(folder, case)
    return [whole] + [fitted(folder, replace(case, step=s, resume=True)) for s in steps]


@pytest.mark.parametrize(
    ("count", "devices", "kind"),
    [
        (2, 2, "shuffled"),
        *(
            pytest.param(count, devices, kind, marks=pytest.mark.slow)
            for count, devices, kind in (
                (2, 4, "generator"),
                (3, 3, "generator"),
                (2, 4, "noisy"),
                (3, 3, "drawing"),
            )
        ),
        pytest.param(2, 2, "workers", marks=pytest.mark.slow),
    ],
)
def test_several_processes_go_on_anywhere(
    count: int, devices: int, kind: str, tmp_path: Path
) -> None:
    """With dropout: every process has its own random states back."""
    case = Case(devices, kind, dropout=True)
    for whole, *others in run_in_processes(in_processes, count, tmp_path, case, (0, 2, 7)):
        for own in others:
            torch.testing.assert_close(own, whole, rtol=0, atol=1e-12)


# Started again by torchrun


def torchrun(folder: Path, *options: str, agents: int = 1, count: int = 2) -> list[Any]:
    """Agents of machines, which run `started.py` and start it again if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"]
    command += [f"--nnodes={agents}", f"--nproc-per-node={count // agents}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    script = [str(Path(__file__).with_name("started.py")), str(folder), *options]
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    agent = partial(subprocess.Popen, command + script, env=environ, text=True)
    with (folder / "log").open("w") as log:
        return [agent(stdout=log, stderr=subprocess.STDOUT) for _ in range(agents)]


def ended(folder: Path, agents: list[Any], seconds: float = 300) -> str:
    """What agents and processes have said, once they have ended."""
    try:
        for agent in agents:
            agent.wait(seconds)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return (folder / "log").read_text()


def kill_one(folder: Path, seconds: float) -> None:
    """Kills one of the processes that many seconds after they have begun."""
    end = time.monotonic() + 120
    while len(pids := list(folder.glob("pid-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(int(random.choice(pids).read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "moment"), [(1, 0), (2, 1)])
def test_killed_at_any_moment_and_started_again(agents: int, moment: int, tmp_path: Path) -> None:
    """The parameters are those of an undisturbed run, with dropout.

    That one takes 6 s at least, so there is still somebody to be killed.
    """
    own = Options(dropout=True, epochs=4)
    whole = run_in_processes(undisturbed, 2, tmp_path / "whole", own)
    said = [f"devices={2 // agents}", f"machines={agents}", "dropout=True", "epochs=4"]
    started = torchrun(tmp_path, *said, "resume=True", "pause=0.25", agents=agents)
    kill_one(tmp_path, random.Random(moment).uniform(0, 6))
    text = ended(tmp_path, started)
    for rank in range(2):
        assert (tmp_path / f"done-{rank}.pt").exists(), text
        done = torch.load(tmp_path / f"done-{rank}.pt")
        torch.testing.assert_close(done, whole[rank], rtol=0, atol=1e-12)


def undisturbed(folder: Path, options: Options) -> dict[str, Tensor]:
    """The parameters after a fit that nothing happens to."""
    return {k: v.clone() for k, v in fitted_script(folder, options).state_dict().items()}
