"""The six laws: several devices give the numbers of one device, whatever happens in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightning_dp import DataParallel, gather, scatter
from lightning_dp.parallel.devices import memory_capacity, replica_names
from lightning_dp.parallel.split import even, weighted
from lightning_dp.parallel.step import StepParallel, TrainingStep

Devices: TypeAlias = Sequence[torch.device]
Batch: TypeAlias = tuple[Tensor, Tensor]
# The difference up to which numbers count as equal, relative to the largest of a tensor.
ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5}


class LawSkipped(Exception):
    """Says why these devices cannot try a law."""


class Net(nn.Module):
    """A small classifier; one of its layers is never used."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(12, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.LayerNorm(256)
        self.layers = nn.Sequential(*inner, nn.Linear(256, 5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        """Returns the logits."""
        return self.layers(x)

    def training_step(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class SplitNet(StepParallel):
    """Runs a net's `training_step` in every replica, again where memory runs out."""

    def __init__(self, net: Net, devices: Devices, weights: Any = None, how: Any = "threads"):
        sizes = partial(weighted, weights=weights) if weights else partial(even, k=len(devices))
        super().__init__(net, devices, output_device=devices[0], split=sizes, executor=how)

    def training_step(self, batch: Batch) -> Any:
        """Returns the loss of the whole batch."""
        return self.run(TrainingStep(self, "training_step"), batch)


def copies_are_exact(devices: Devices) -> str:
    """Every device sends to every device and to the host, and each element arrives unchanged."""
    names, places = [*replica_names(devices), "host"], [*devices, torch.device("cpu")]
    counted = torch.arange(6_000) * 2_654_435_761 % 2**31
    messages = {"int64": counted, "bool": counted % 3 == 0, "float32": counted.float() / 7}
    messages |= {"bfloat16": counted.bfloat16(), "float16": (counted % 2_000).half()}
    messages |= {"transposed": counted.view(60, 100).t(), "strided": counted.view(300, 20)[::3]}
    for (i, source), (j, target) in product(enumerate(places), repeat=2):
        for name, message in messages.items():
            sent, way = message.to(source), f"{name}, {names[i]} -> {names[j]}"
            check({way: scatter(sent, [target])[0]}, {way: message}, 0.0)
            check({way: gather([sent[:7], sent[7:]], target)}, {way: message}, 0.0)
    return f"{len(places) ** 2} pairs, {len(messages)} kinds of tensors"


def as_one_device(
    devices: Devices, dtype: torch.dtype, steps: int = 1, **options: Any
) -> tuple[int, ...]:
    """Losses, gradients and weights of a training are those of the root alone; returns sizes."""
    if dtype == torch.float64 and float_dtype(devices) != dtype:
        raise LawSkipped(f"{devices[0].type} has no float64")
    n = options.pop("n", 6 * len(devices) + 1)
    batches = [make_batch(n, dtype, seed) for seed in range(steps)]
    expected = train(make_net(devices, dtype), batches)
    with closing(SplitNet(make_net(devices, dtype), devices, **options)) as engine:
        got = train(engine.module, batches, engine.training_step)
    check(got, expected, ALLOWED[dtype])
    return engine.last_sizes


def uneven_batches(devices: Devices) -> str:
    """Unequal shares; then an idle root; then one sample for all devices."""
    dtype, k = float_dtype(devices), len(devices)
    unequal = as_one_device(devices, dtype, weights=[*range(1, k + 1)])
    idle = as_one_device(devices, dtype, weights=[*range(k)])
    if idle[0] or not all([*unequal, *idle[1:]]):
        raise AssertionError(f"expected only the root idle, and that once, got {unequal}, {idle}")
    return f"sizes {unequal}, {idle}, {as_one_device(devices, dtype, n=1)}"


def forward_mode(devices: Devices) -> str:
    """`DataParallel` returns the outputs of the whole batch, for a loss over all its samples."""

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        logits = net(batch[0])
        return nn.functional.cross_entropy(logits * (1 + logits.mean(0)), batch[1])

    dtype = float_dtype(devices)
    batches = [make_batch(4 * len(devices) + 1, dtype, seed) for seed in range(3)]
    with closing(DataParallel(make_net(devices, dtype), devices)) as net:
        got = train(net.module, batches, partial(loss, net))
    alone = make_net(devices, dtype)
    check(got, train(alone, batches, partial(loss, alone)), ALLOWED[dtype])
    return "three steps, a loss over the whole batch"


def out_of_memory(devices: Devices) -> str:
    """The last replica runs out of memory once; the step is done again, or raises and harms none.

    A device that counts its memory and has one replica is asked for more than it has. Elsewhere
    the error is raised by hand, which is no reason to do the step again.
    """
    dtype, last = float_dtype(devices), devices[-1]
    batch = make_batch(6 * len(devices) + 1, dtype, 0)
    marked, pending = float(batch[0][-1, 0]), iter([True])
    is_real = memory_capacity(last) > 0 and devices.count(last) == 1

    class Hungry(Net):
        def training_step(self, batch: Batch) -> Tensor:
            if float(batch[0][-1, 0]) == marked and next(pending, False):
                if is_real:
                    torch.empty(2 * memory_capacity(last), dtype=torch.uint8, device=last)
                raise torch.OutOfMemoryError("raised on purpose")
            return super().training_step(batch)

    with closing(SplitNet(make_net(devices, dtype, Hungry), devices)) as engine:
        net, step = engine.module, engine.training_step
        try:
            got, remark = train(net, [batch], step), "the step was done again"
        except torch.OutOfMemoryError:
            if any(p.grad is not None for p in net.parameters()):
                raise AssertionError("expected no gradients of a failed step, got some") from None
            got, remark = train(net, [batch], step), "raised; the next step was right"
    if next(pending, False):
        raise AssertionError("expected the last replica to run out of memory, got no error")
    check(got, train(make_net(devices, dtype), [batch]), ALLOWED[dtype])
    return remark if is_real else f"{remark} (error raised by hand)"


LAWS: dict[str, Callable[[Devices], object]] = {
    "copies are exact": copies_are_exact,
    "one float64 step": partial(as_one_device, dtype=torch.float64),
    "ten float32 steps": partial(as_one_device, dtype=torch.float32, steps=10),
    "uneven batches": uneven_batches,
    "forward mode": forward_mode,
    "out of memory": out_of_memory,
}
"""Each returns a remark, and raises `LawSkipped` where it cannot be tried, else where it fails."""


def make_net(devices: Devices, dtype: torch.dtype, make: type[Net] = Net, seed: int = 0) -> Net:
    """Makes a net on the root device, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(devices[0], dtype)


def make_batch(n: int, dtype: torch.dtype, seed: int) -> Batch:
    """Makes a batch of `n` samples on the host."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(5, (n,), generator=generator)


def train(net: Any, batches: Sequence[Batch], loss_of: Any = None) -> dict[str, Tensor]:
    """Trains with SGD; returns losses, the last step's gradients and the weights, on the host."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), []
    root = next(net.parameters()).device
    for x, y in batches:
        optimizer.zero_grad()
        loss = (loss_of or net.training_step)((x.to(root), y.to(root)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    found = {"loss": torch.stack(losses), **gradients, **net.state_dict()}
    return {name: value.cpu().clone() for name, value in found.items() if value is not None}


def float_dtype(devices: Devices) -> torch.dtype:
    """Returns float64, or float32 where a device has no float64 (mps)."""
    try:
        for device in devices:
            torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def check(got: dict[str, Tensor], expected: dict[str, Tensor], allowed: float) -> None:
    """Raises an AssertionError unless both have the same names, shapes, dtypes and values."""
    if got.keys() != expected.keys():
        raise AssertionError(f"expected {sorted(expected)}, got {sorted(got)}")
    for name, value in expected.items():
        theirs, mine = value.detach().cpu(), got[name].detach().cpu()
        near = allowed * float(theirs.double().abs().max())
        assert_close(mine, theirs, rtol=0, atol=near, msg=f"{name}: {{}}".format)
