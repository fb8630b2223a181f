"""What one plain training step costs beyond the modules' own work: Python frames, and time.

    python tests/benchmarks/step.py                       # frames by function and by file
    python tests/benchmarks/step.py --time  # a ResNet-50's shape with tiny tensors

Frames are calls of Python functions of lightning_dp, on all threads, from the end of a batch to the
end of the next one; of three steps the one with the fewest counts. `--time` prints medians: the
engine's own time in order (a step less the replicas' forward and backward), that of bare modules,
and what nn.DataParallel spends on building its module trees alone.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dp
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.models import WORKLOADS
from benchmarks.peers import share
from support.oracle import QUIET

PACKAGE = Path(lightning_dp.__file__).parent
WARM_UP, WATCHED = 60, 3


class SmallMLP(LightningModule):
    """Two linear layers, and one logged loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Watch(Callback):
    """Counts the calls of each function of the package, by file and name, in each step."""

    def __init__(self) -> None:
        self.steps = [Counter[tuple[str, str]]()]

    def count(self, frame: FrameType, event: str, called: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if len(self.steps) > WARM_UP and event == "call" and file.is_relative_to(PACKAGE):
            self.steps[-1][file.relative_to(PACKAGE).as_posix(), frame.f_code.co_name] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(Counter())


def plain_step(executor: Any = "auto", devices: int = 4) -> Counter[tuple[str, str]]:
    """The calls of each function, by file and name, in one step."""
    data = torch.randn(4 * devices * (WARM_UP + WATCHED), 8)
    watch, strategy = Watch(), lightning_dp.DataParallelStrategy(executor=executor)
    options = {"accelerator": "cpu", "devices": devices, "max_epochs": 1, "callbacks": [watch]}
    trainer = Trainer(strategy=strategy, **QUIET, **options)
    threading.setprofile(watch.count)  # for the workers, which start later
    sys.setprofile(watch.count)
    try:
        trainer.fit(SmallMLP(), DataLoader(data, batch_size=4 * devices))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return min(watch.steps[WARM_UP : WARM_UP + WATCHED], key=Counter.total)


def rebuild(module: nn.Module, k: int) -> None:
    """Builds K module trees, as `torch.nn.parallel.replicate` does in every forward."""
    index = {m: i for i, m in enumerate(module.modules())}
    for _ in range(k):
        trees = [m._replicate_for_data_parallel() for m in index]
        for original, tree in zip(index, trees, strict=True):
            for name, child in original.named_children():
                setattr(tree, name, trees[index[child]])
            for name, tensor in original.named_parameters(recurse=False):
                setattr(tree, name, tensor.detach())


def overheads(k: int = 4, steps: int = 60) -> dict[str, float]:
    """What the engine takes, bare modules, and nn.DataParallel's module trees, in milliseconds."""
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    module, batch = WORKLOADS["resnet"].make(), WORKLOADS["resnet"].batches(2 * k)[0]
    own_parts = [(copy.deepcopy(module), share(batch, k, i)) for i in range(k)]
    devices = [torch.device("cpu")] * k
    split, output = split_policy("even", None, devices), devices[0]
    engine = StepParallel(module, devices, output_device=output, split=split, executor="inorder")

    def own() -> float:
        before = sum(usage.busy_seconds for usage in engine.usage)
        engine.train("training_step", engine.scatter(batch), 0).backward()
        return sum(usage.busy_seconds for usage in engine.usage) - before

    def bare() -> None:
        for net, part in own_parts:
            net.loss(part).backward()

    work: dict[str, Callable[[], float | None]] = {
        "the engine's own time, in order": own,
        "bare modules, forward and backward": bare,
        f"building {k} module trees": lambda: rebuild(module.net, k),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(steps + 20):
        for name, step in work.items():  # every one finds changed parameters and no gradients
            module.zero_grad()
            with torch.no_grad():
                torch._foreach_mul_(list(module.parameters()), 0.999)
            start = time.perf_counter()
            less = step() or 0.0
            found[name].append(1e3 * (time.perf_counter() - start - less))
    engine.close()
    return {name: statistics.median(times[20:]) for name, times in found.items()}


def main() -> None:
    """Counts or measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", action="store_true", help="measure time instead")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.time:
        for name, milliseconds in overheads().items():
            print(f"{name:36}{milliseconds:8.2f} ms")
        return
    calls = plain_step()
    for (file, name), count in calls.most_common(60):
        print(f"{count:6}  {file}: {name}")
    files = Counter(file for file, _ in calls.elements())
    print("\n" + "\n".join(f"{count:6}  {file}" for file, count in files.most_common()))
    print(f"\n{len(files)} files, {calls.total()} frames")


if __name__ == "__main__":
    main()
