"""How much of the package one plain training step enters: files, functions and Python frames.

    python tests/benchmarks/steps_in_files.py [--devices 4] [--on cpu] [--most 40]
    python tests/benchmarks/steps_in_files.py --max-files 16 --max-frames 300
    torchrun --nproc-per-node 2 tests/benchmarks/steps_in_files.py --devices 4

A small MLP is trained through Lightning's Trainer. After a warm-up a step is watched on all
threads, from the end of a batch to the end of the next one. Counted are the calls of Python
functions in lightning_dp alone, also those in which a generator goes on. Of a few steps the one
with the fewest counts. Of several processes the first one tells what it has entered, and by which
messages it has waited for the others. With bounds, the exit code tells whether they hold.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dp
from lightning_dp.parallel.apply import ExecutorName

PACKAGE = Path(lightning_dp.__file__).parent
MESSAGES = frozenset({"allgather", "_allgather_base", "allreduce", "broadcast", "barrier"})
"""Methods of torch's process groups that the package, Lightning or torchmetrics call."""
WATCHED = 3
"""Steps; the one of the fewest frames counts."""


class SmallMLP(LightningModule):
    """The module of the step: two linear layers, and one logged loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss that is a mean over the samples."""
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Entered:
    """The functions of the package that were called, and how often.

    Attributes:
        calls: how often each function was called, by its file and its name.
        messages: how often each kind of message went to other processes, whoever has sent it.
    """

    def __init__(self, calls: Counter[tuple[str, str]], messages: Counter[str]) -> None:
        self.calls, self.messages = calls, messages

    @property
    def frames(self) -> int:
        """Calls of all functions."""
        return self.calls.total()

    @property
    def files(self) -> Counter[str]:
        """Calls of the functions of each file."""
        files: Counter[str] = Counter()
        for (file, _), calls in self.calls.items():
            files[file] += calls
        return files


class _Watch(Callback):
    """Counts what the steps after a warm-up enter."""

    def __init__(self, warm_up: int) -> None:
        self.steps: list[Entered] = []
        self._warm_up = warm_up
        self._calls: Counter[Any] | None = None
        self._messages: Counter[str] = Counter()

    def count(self, frame: FrameType, event: str, called: Any) -> None:
        if self._calls is None:
            return
        if event == "call":
            self._calls[frame.f_code] += 1
        elif event == "c_call" and called.__name__ in MESSAGES:
            self._messages[called.__name__] += 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            self.steps.append(Entered(_of_package(calls), self._messages))
        if self._warm_up <= trainer.global_step < self._warm_up + WATCHED:
            self._calls, self._messages = Counter(), Counter()


def _of_package(calls: Counter[Any]) -> Counter[tuple[str, str]]:
    own: Counter[tuple[str, str]] = Counter()
    for code, count in calls.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short one
            own[path.relative_to(PACKAGE).as_posix(), name] += count
    return own


def plain_step(
    devices: int = 4,
    on: str = "cpu",
    warm_up: int = 60,
    executor: ExecutorName = "auto",
    split: str = "even",
) -> Entered:
    """What one training step enters.

    Args:
        devices: how many replicas.
        on: their type, such as `"cpu"`, `"sim"` or `"cuda"`.
        warm_up: steps before, in which the engine learns how to run them.
        executor: how replicas run.
        split: how samples are shared out.
    """
    batches = DataLoader(torch.randn(4 * devices * (warm_up + WATCHED), 8), batch_size=4 * devices)
    watch = _Watch(warm_up)
    trainer = Trainer(
        max_epochs=1,
        accelerator=on,
        devices=devices,
        strategy=lightning_dp.DataParallelStrategy(executor=executor, split=split),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    threading.setprofile(watch.count)  # for the workers, which are started later
    sys.setprofile(watch.count)
    try:
        trainer.fit(SmallMLP(), batches)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return min(watch.steps, key=lambda step: step.frames)


def main() -> int:
    """Counts, prints, and holds the bounds against it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--on", default="cpu", help="cpu, sim or cuda")
    parser.add_argument("--most", type=int, default=40, help="so many functions are listed")
    parser.add_argument("--max-files", type=int, default=sys.maxsize)
    parser.add_argument("--max-frames", type=int, default=sys.maxsize)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.on == "sim":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import sim_devices

        sim_devices.enable()
    entered = plain_step(options.devices, options.on)
    if int(os.environ.get("RANK", "0")):
        return 0
    for (file, name), calls in entered.calls.most_common(options.most):
        print(f"{calls:6}  {file}: {name}")
    print("\n" + "\n".join(f"{calls:6}  {file}" for file, calls in entered.files.most_common()))
    for message, calls in entered.messages.items():
        print(f"{calls:6}  messages: {message}")
    print(f"\n{len(entered.files)} files, {len(entered.calls)} functions, {entered.frames} frames")
    fits = len(entered.files) <= options.max_files and entered.frames <= options.max_frames
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
