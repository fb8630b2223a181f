"""Python overhead of one training step, beyond the modules' own forward and backward.

    python tests/benchmarks/overhead.py [--devices 4] [--steps 60]

The module has the shape of a ResNet-50 (161 parameters, 159 buffers, 151 modules) with tiny
tensors, so that what is measured is bookkeeping: cutting, refreshing replicas, handing work out,
joining losses and summing gradients. "own" is the time of a step less the time that the modules'
forward and backward took in it, replica after replica, and less the time in which a bare step
frees its graphs; it is robust, since it compares nothing that takes long.
"bare" runs K copies of the module on shards that are already cut, and alternates with the engine.
For comparison: building K fresh module trees, which nn.DataParallel does in every forward.

Two more faces. On separate devices (simulated ones) weights have to travel there, and gradients
back: measured are a refresh after an optimizer's step and the sum of the gradients. From both the
time of the simulated devices' own kernels is taken, which are called bare for that. And through
Lightning's Trainer the state of 100 submodules of ten attributes each, two of them containers, has
to be looked after: what replicas leave on them is to be what one device would.

Each number is a median, with the lowest in brackets: of use where others are at work. Times of
Python alone are those of the calling thread, which do not count while others have the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dp  # noqa: F401  # registers the strategy
from lightning_dp.metrics import Journals
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel, TrainingStep

sys.path.insert(0, str(Path(__file__).parents[1]))
import sim_devices
from benchmarks.nets import TinyResNet50

CPU = torch.device("cpu")
FACES = ("engine", "trainer", "separate")
WARM_UP = 20


class Times:
    """Seconds of something, measured often."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures what this thread does meanwhile."""
        start = time.thread_time()
        yield
        self.seconds.append(time.thread_time() - start)

    def __str__(self) -> str:
        middle, best = statistics.median(self.seconds) * 1e3, min(self.seconds) * 1e3
        return f"{middle:8.2f} [{best:.2f}] ms"


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
    start = time.thread_time()
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
    return (time.thread_time() - start) / steps


def on_the_cpu(k: int, steps: int) -> dict[str, Times]:
    """The engine beside bare replicas."""
    module = TinyResNet50()
    batch = torch.randn(2 * k, 3, 8, 8)
    replicas = [module, *(copy.deepcopy(module) for _ in range(k - 1))]
    shards = list(batch.chunk(k))
    split = split_policy("even", None, [CPU] * k)
    engines = {
        how: StepParallel(module, [CPU] * k, output_device=CPU, split=split, executor=how)
        for how in ("inorder", "threads", "auto")
    }
    times = {name: Times() for name in ("bare", "freeing", "own", "rebuild", *engines)}
    for i in range(steps + WARM_UP):
        seconds = {"bare": seconds_of(lambda: bare_step(replicas, shards), replicas)}
        for how, engine in engines.items():
            seconds[how] = seconds_of(partial(engine_step, engine, batch), [module])
        seconds["freeing"] = freeing_seconds(replicas, shards)
        seconds["own"] = own_seconds(engines["inorder"], batch, module)
        seconds["rebuild"] = rebuild_seconds(module, k, 1)
        for name, value in seconds.items() if i >= WARM_UP else ():
            times[name].seconds.append(value)
    for engine in engines.values():
        engine.close()
    freeing = min(times["freeing"].seconds)
    times["own"].seconds = [seconds - freeing for seconds in times["own"].seconds]
    return times


def on_separate_devices(k: int, steps: int) -> dict[str, Times]:
    """Weights to the replicas and gradients back, and the kernels alone that nobody can do without.

    These pack the root's weights, copy them to every other device, pack the gradients there, copy
    them to the root and add them up.
    """
    devices = [torch.device("sim", i) for i in range(k)]
    module = TinyResNet50().to(devices[0])
    engine = StepParallel(
        module, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    batch = torch.randn(2 * k, 3, 8, 8)
    kernels = _Kernels(module, devices)
    times = {name: Times() for name in ("refresh", "reduce", "kernels", "both", "rebuild")}
    for i in range(steps + WARM_UP):
        if i == WARM_UP:
            times = {name: Times() for name in times}
        module.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(list(module.parameters()), 0.999)
        shards = engine.scatter(batch)
        with times["refresh"].measured():
            engine.replicate(TrainingStep(engine, "training_step"), shards)
        loss = engine.train("training_step", shards)
        reduce = partial(_measured, times["reduce"], engine.reducer.after_backward)
        with replaced(engine.reducer, after_backward=reduce):
            loss.backward()
        with times["kernels"].measured():
            kernels.run()
        times["rebuild"].seconds.append(rebuild_seconds(module, k, 1))
        pair = times["refresh"].seconds[-1] + times["reduce"].seconds[-1]
        times["both"].seconds.append(pair - times["kernels"].seconds[-1])
    engine.close()
    return times


def _measured(times: Times, function: Callable[..., None], *args: Any) -> None:
    with times.measured():
        function(*args)


class _Kernels:
    """Kernels and copies of a refresh and a sum of gradients, without any bookkeeping."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._root = [p.detach().clone() for p in module.parameters()]
        self._sums = [torch.zeros_like(p) for p in self._root]
        flat = torch.empty(sum(map(Tensor.numel, self._root)), device=devices[0])
        self._flats = [flat.to(device, copy=True) for device in devices]
        self._arrived = [torch.empty_like(flat) for _ in devices[1:]]
        sizes = list(map(Tensor.numel, self._root))
        self._views = [
            [part.view_as(p) for part, p in zip(own.split(sizes), self._root, strict=True)]
            for own in self._flats
        ]
        self._gradients = [[torch.ones_like(view) for view in views] for views in self._views]

    def run(self) -> None:
        torch._foreach_copy_(self._views[0], self._root)
        for flat, views, own, arrived in zip(
            self._flats[1:], self._views[1:], self._gradients[1:], self._arrived, strict=True
        ):
            flat.copy_(self._flats[0])
            torch._foreach_copy_(views, own)
            arrived.copy_(flat)
        for other in self._arrived[1:]:
            self._arrived[0].add_(other)
        torch._foreach_add_(self._sums, self._views[0])


class Block(nn.Module):
    """A submodule of ten attributes, two of them containers."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.index, self.name, self.rate = i, f"block {i}", 0.5
        self.is_first, self.previous, self.limits = i == 0, None, (0, i)
        self.activation, self.scale = torch.tanh, 1.0
        self.seen: list[int] = [i]
        self.cache: dict[str, int] = {"calls": i}


class Attributes(LightningModule):
    """100 blocks, and a step that keeps its outputs in a list, as epochs are often summed up."""

    def __init__(self, blocks: int = 100) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(blocks)))
        self.layer = nn.Linear(3, 1)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss that is a mean over the samples."""
        loss = self.layer(batch).square().mean()
        self.outputs.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class _StepTimes(Callback):
    """From the end of a batch to that of the next; the list is emptied in between."""

    def __init__(self) -> None:
        self.times = Times()
        self._end = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        now = time.perf_counter()
        if trainer.global_step > WARM_UP:
            self.times.seconds.append(now - self._end)
        module.outputs.clear()
        self._end = time.perf_counter()


def in_a_trainer(k: int, steps: int) -> dict[str, Times]:
    """Steps of Lightning's Trainer on one device and on K; the state of 100 submodules alone."""
    times = {name: Times() for name in ("state", "state filled", "rebuild")}
    for devices in (1, k):
        watch = _StepTimes()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=devices,
            strategy="dp_custom",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
        )
        batches = DataLoader(torch.randn(2 * k * (steps + WARM_UP), 3), batch_size=2 * k)
        trainer.fit(Attributes(), batches)
        times[f"{devices} devices"] = watch.times
    module = Attributes()
    journals = Journals(module, [CPU] * k, CPU)
    replicas = Replicas(module, [CPU] * k, journals)
    shards = Shards((2,) * k, [torch.ones(2, 3)] * k)
    for i in range(steps + WARM_UP):
        if i == WARM_UP:
            times |= {name: Times() for name in ("state", "state filled", "rebuild")}
        for name, filled in (("state", False), ("state filled", True)):
            replicas.refresh()
            around = journals.around(replicas, shards)
            with times[name].measured():
                around.__enter__()
            for replica in replicas.modules if filled else ():
                replica.outputs.append(torch.ones(()))
            start = time.thread_time()
            around.__exit__(None, None, None)
            times[name].seconds[-1] += time.thread_time() - start
        module.outputs.clear()
        times["rebuild"].seconds.append(rebuild_seconds(module, k, 1))
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--faces", nargs="*", default=FACES, choices=FACES)
    options = parser.parse_args()
    k, steps = options.devices, options.steps
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("median [lowest]; K =", k)
    if "engine" in options.faces:
        _report_engine(k, on_the_cpu(k, steps))
    if "trainer" in options.faces:
        _report_trainer(k, in_a_trainer(k, steps))
    if "separate" in options.faces:
        sim_devices.enable(k)
        _report_separate(k, on_separate_devices(k, steps))


def _report_engine(k: int, times: dict[str, Times]) -> None:
    module = TinyResNet50()
    counts = (len(list(x)) for x in (module.modules(), module.parameters(), module.buffers()))
    print("\nengine: {} modules, {} parameters, {} buffers".format(*counts))
    print(f"bare forward and backward        {times['bare']} per step")
    for how in ("inorder", "threads", "auto"):
        print(f"executor={how:<12}            {times[how]} per step")
    print(f"the engine's own time            {times['own']} per step")
    _report_rebuild(k, times["rebuild"], times["own"])


def _report_trainer(k: int, times: dict[str, Times]) -> None:
    print("\ntrainer: 100 submodules of ten attributes, two of them containers")
    print(f"a step on one device             {times['1 devices']}")
    print(f"a step on {k} devices              {times[f'{k} devices']}")
    print(f"module state, nothing changed    {times['state']} per step")
    print(f"module state, a list appended to {times['state filled']} per step")
    _report_rebuild(k, times["rebuild"], times["state filled"])


def _report_separate(k: int, times: dict[str, Times]) -> None:
    print("\nseparate: the engine's module on simulated devices")
    print(f"refresh                          {times['refresh']} per step")
    print(f"reduce                           {times['reduce']} per step")
    print(f"of both, bare kernels            {times['kernels']} per step")
    print(f"refresh and reduce beyond these  {times['both']} per step")
    _report_rebuild(k, times["rebuild"], times["both"])


def _report_rebuild(k: int, rebuild: Times, own: Times) -> None:
    """What nn.DataParallel spends on its module trees alone."""
    ratio = statistics.median(rebuild.seconds) / statistics.median(own.seconds)
    print(f"rebuilding {k} module trees        {rebuild} per forward: {ratio:.1f} times that")


if __name__ == "__main__":
    main()
