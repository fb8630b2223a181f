"""Python overhead of one training step, measured against the bare modules' own work.

    python tests/benchmarks/overhead.py [--devices 4] [--steps 50] [--rounds 7]

The module has the shape of a ResNet-50 (161 parameters, 159 buffers, about 150 submodules) with
tiny tensors, so that what is measured is bookkeeping. "bare" runs K copies of the module forward
and backward, one after another, on shards that are already cut. Everything beyond that time is
the engine's: cutting, refreshing replicas, handing work out, gathering, and summing gradients.
Rounds of both alternate, and the medians are compared, because machines are noisy.
`torch.nn.parallel.replicate` alone is timed for comparison where the machine has a GPU; elsewhere
its Python part is: building K fresh module trees, as nn.DataParallel does in every forward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_dp.parallel.data_parallel import StepParallel
from lightning_dp.parallel.split import split_policy

CPU = torch.device("cpu")


class Bottleneck(nn.Module):
    """A residual block of three convolutions with batch norm."""

    def __init__(self, width: int, downsample: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        skip = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.downsample = skip if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        """Adds the block's answer to its input."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class TinyResNet50(nn.Module):
    """The modules and parameters of a ResNet-50 at a width of a few channels."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.layers = nn.Sequential(
            *(
                nn.Sequential(*(Bottleneck(width, i == 0) for i in range(depth)))
                for depth in (3, 4, 6, 3)
            )
        )
        self.fc = nn.Linear(width, 10)

    def training_step(self, batch: Tensor) -> Tensor:
        """A loss that is a mean over the samples."""
        logits = self.fc(self.layers(self.stem(batch)).mean((2, 3)))
        return logits.square().mean()


def bare_step(replicas: list[TinyResNet50], shards: list[Tensor]) -> None:
    """Forward and backward of every replica, one after another."""
    losses = [replica.training_step(x) for replica, x in zip(replicas, shards, strict=True)]
    for loss in losses:
        loss.backward()


def engine_step(engine: StepParallel, batch: Tensor) -> None:
    """The same work through the engine."""
    engine.train("training_step", engine.scatter(batch)).backward()


def seconds_per_step(step: Callable[[], None], module: nn.Module, steps: int) -> float:
    """Mean seconds of a step, gradients cleared and weights changed in between, not counted."""
    total = 0.0
    for _ in range(steps):
        module.zero_grad()
        with torch.no_grad():  # as an optimizer would: every parameter gets a new version
            torch._foreach_mul_(list(module.parameters()), 0.999)
        start = time.perf_counter()
        step()
        total += time.perf_counter() - start
    return total / steps


def rebuild_seconds(module: nn.Module, k: int, steps: int) -> float:
    """Python time of building K module trees, as `torch.nn.parallel.replicate` does per forward."""
    start = time.perf_counter()
    for _ in range(steps):
        for _ in range(k):
            twins = [m._replicate_for_data_parallel() for m in module.modules()]
            index = {id(m): i for i, m in enumerate(module.modules())}
            for original, twin in zip(module.modules(), twins, strict=True):
                for name, child in original._modules.items():
                    if child is not None:
                        setattr(twin, name, twins[index[id(child)]])
                for name, parameter in original._parameters.items():
                    if parameter is not None:
                        setattr(twin, name, parameter.detach())
                for name, buffer in original._buffers.items():
                    setattr(twin, name, buffer)
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    k = options.devices
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    module = TinyResNet50()
    batch = torch.randn(2 * k, 3, 8, 8)
    replicas = [module, *(copy.deepcopy(module) for _ in range(k - 1))]
    shards = list(batch.chunk(k))
    print(
        f"{len(list(module.modules()))} modules, {len(list(module.parameters()))} parameters, "
        f"{len(list(module.buffers()))} buffers, K={k}, {torch.get_num_threads()} threads"
    )
    engines = {
        how: StepParallel(
            module, [CPU] * k, output_device=CPU, split=split_policy("even", None, k), executor=how
        )
        for how in ("inorder", "threads", "auto")
    }
    steps: dict[str, Callable[[], None]] = {"bare": lambda: bare_step(replicas, shards)}
    for how, engine in engines.items():
        steps[how] = lambda engine=engine: engine_step(engine, batch)
    for step in steps.values():
        seconds_per_step(step, module, 10)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(seconds_per_step(step, module, options.steps))
    bare = statistics.median(times["bare"])
    print(f"bare forward and backward  {bare * 1e3:7.2f} ms per step")
    for name in engines:
        beyond = statistics.median(t - b for t, b in zip(times[name], times["bare"], strict=True))
        print(
            f"executor={name:<8} {statistics.median(times[name]) * 1e3:17.2f} ms per step, "
            f"{beyond * 1e3:+6.2f} ms beyond bare"
        )
    rebuilt = rebuild_seconds(module, k, options.steps)
    print(f"rebuilding {k} module trees {rebuilt * 1e3:7.2f} ms per forward (nn.DataParallel)")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
