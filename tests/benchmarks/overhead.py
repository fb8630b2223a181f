"""Python overhead of one training step, beyond the modules' own forward and backward.

    python tests/benchmarks/overhead.py [--devices 4] [--steps 60]

The module has the shape of a ResNet-50 (161 parameters, 159 buffers, 151 modules) with tiny
tensors, so that what is measured is bookkeeping: cutting, refreshing replicas, handing work out,
joining losses and summing gradients. "own" is the time of a step less the time that the modules'
forward and backward took in it, replica after replica, and less the time in which a bare step
frees its graphs; it is robust, since it compares nothing that takes long.
"bare" runs K copies of the module on shards that are already cut, and alternates with the engine.
For comparison: building K fresh module trees, which nn.DataParallel does in every forward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dp.parallel.split.policies import split_policy
from lightning_dp.parallel.step import StepParallel

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


def bare_step(replicas: Sequence[TinyResNet50], shards: Sequence[Tensor]) -> float:
    """Forward and backward of every replica, one after another; returns the calls' seconds."""
    start = time.perf_counter()
    losses = [replica.training_step(x) for replica, x in zip(replicas, shards, strict=True)]
    for loss in losses:
        loss.backward()
    return time.perf_counter() - start


def engine_step(engine: StepParallel, batch: Tensor) -> None:
    """The same work through the engine."""
    engine.train("training_step", engine.scatter(batch)).backward()


def seconds_of(step: Callable[[], None], modules: Sequence[nn.Module]) -> float:
    """Seconds of a step; gradients are cleared and weights changed before, and not counted."""
    for module in modules:
        module.zero_grad()
    with torch.no_grad():  # as an optimizer would: every parameter gets a new version
        torch._foreach_mul_(list(modules[0].parameters()), 0.999)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def freeing_seconds(replicas: Sequence[TinyResNet50], shards: Sequence[Tensor]) -> float:
    """Seconds of a bare step after its calls: the graphs' memory is given back."""
    inside: list[float] = []
    total = seconds_of(lambda: inside.append(bare_step(replicas, shards)), replicas)
    return total - inside[0]


def own_seconds(engine: StepParallel, batch: Tensor, module: nn.Module) -> float:
    """Seconds of an in-order step outside of the modules' forward and backward."""
    before = sum(usage.busy_seconds for usage in engine.meter.usage)
    total = seconds_of(lambda: engine_step(engine, batch), [module])
    return total - (sum(usage.busy_seconds for usage in engine.meter.usage) - before)


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
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    k, steps = options.devices, options.steps
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    module = TinyResNet50()
    batch = torch.randn(2 * k, 3, 8, 8)
    replicas = [module, *(copy.deepcopy(module) for _ in range(k - 1))]
    shards = list(batch.chunk(k))
    split = split_policy("even", None, [CPU] * k)
    engines = {
        how: StepParallel(module, [CPU] * k, output_device=CPU, split=split, executor=how)
        for how in ("inorder", "threads", "auto")
    }
    times: dict[str, list[float]] = {name: [] for name in ("bare", "own", "rebuild", *engines)}
    for i in range(steps + 20):
        seconds = {"bare": seconds_of(lambda: bare_step(replicas, shards), replicas)}
        for how, engine in engines.items():
            seconds[how] = seconds_of(partial(engine_step, engine, batch), [module])
        freeing = freeing_seconds(replicas, shards)
        seconds["own"] = own_seconds(engines["inorder"], batch, module) - freeing
        seconds["rebuild"] = rebuild_seconds(module, k, 1)
        for name, value in seconds.items() if i >= 20 else ():
            times[name].append(value)
    for engine in engines.values():
        engine.close()
    _report(k, module, {name: statistics.median(values) * 1e3 for name, values in times.items()})


def _report(k: int, module: nn.Module, ms: dict[str, float]) -> None:
    counts = (len(list(x)) for x in (module.modules(), module.parameters(), module.buffers()))
    print("{} modules, {} parameters, {} buffers, K={}; medians".format(*counts, k))
    print(f"bare forward and backward      {ms['bare']:8.2f} ms per step")
    for how in ("inorder", "threads", "auto"):
        print(f"executor={how:<12} {ms[how]:18.2f} ms per step")
    print(f"the engine's own time          {ms['own']:8.2f} ms per step")
    print(f"rebuilding {k} module trees      {ms['rebuild']:8.2f} ms per forward")
    print(f"rebuilding / own               {ms['rebuild'] / ms['own']:8.1f}")


if __name__ == "__main__":
    main()
