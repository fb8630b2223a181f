"""Gradients in step mode: those of one device, wherever they lie and whenever they leave a device.

On accelerators they leave while the backward runs, in buckets so small that several are under way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, cast

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import EXACT, inputs, update
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from support.step_twins import Around, compare_steps, step_engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.comm import buckets, chain, on_streams
from lightning_dp.parallel.reduce import reduce_gradients, wait_for_autograd

pytestmark = pytest.mark.usefixtures("on", "small_buckets")

WIDTH = 8
LAYOUTS: list[Any] = [
    ((5, 5, 4), (0, 1, 2), "threads"),
    ((0, 13, 1), (0, 1, 2), "inorder"),
    ((3, 3, 3, 3, 2), (0, 1, 1, 2, 0), "inorder"),
    ((11, 1, 1, 1, 0), (0, 1, 1, 2, 0), "threads"),
]
"""Sizes of shards; the devices of replicas, by their positions; how replicas run."""
every_layout = pytest.mark.parametrize(("sizes", "places", "executor"), LAYOUTS)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2**9)


class Net(nn.Module):
    """By whose `training_step` it is trained."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)
        self.net = nn.Sequential(*layers)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.net(x)
        return z

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


class Images(Net):
    """Weights that are channels_last, and a tensor that passes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.large, self.back = nn.Linear(16, 300), nn.Linear(300, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)).mean((2, 3))
        return super().forward(self.back(self.large(y)))


class Views(Net):
    """Its bias gets memory that the backward of what is before it reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16, 1))
        self.before = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        moved = self.before.sum(0).sin() + self.shift.view(16)
        z: Tensor = d(c(b(a(x))) * moved.cos())
        return z


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """One for all replicas on a device: some share parameters."""
    return torch.Stream(device)


class Beside(Net):
    """One layer runs on a stream of the module's own."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        x = b(a(x))
        if x.device.type == "cpu":
            return cast(Tensor, d(c(x)))
        now, beside = torch.accelerator.current_stream(x.device.index), side_stream(x.device)
        beside.wait_stream(now)
        x.record_stream(beside)
        with on_streams([beside]):
            y: Tensor = c(x)
        now.wait_stream(beside)
        y.record_stream(now)
        z: Tensor = d(y)
        return z


class Later(Net):
    """From the second step on, one layer's gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        x = b(a(x))
        for _ in range(2 if self.step else 1):
            x = checkpoint(c, x, use_reentrant=True)
        z: Tensor = d(x)
        return z


class Cached(Net):
    """A step leaves what it computes, with its graph, and the next one reads the value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.net[3].weight.exp().mean(1) + 0.1 * self.scale.detach()
        return super().forward(x) * self.scale


class Strided(Net):
    """Parameters, and gradients, whose memory is not in the order of their dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 4, 1 if kind == "1x1" else 2), nn.Linear(4, 6)
        if kind == "transposed":
            self.linear.weight = nn.Parameter(torch.randn(4, 6).t())
        elif kind == "permuted":
            self.conv.weight = nn.Parameter(torch.randn(2, 2, 4, 2).permute(2, 3, 1, 0))
        elif kind != "plain":
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.view(-1, 2, 2, 2)).mean((2, 3)) @ self.linear.weight.t().contiguous()
        return torch.tanh(h) - 0.5


# What happens between steps


def steps(net: Net, loss_of: Any, step: int) -> None:
    net.step = step


def has_gradients(net: Net, loss_of: Any, step: int) -> None:
    net.net[2].weight.grad = torch.ones_like(net.net[2].weight)


def thaws(net: Net, loss_of: Any, step: int) -> None:
    net.net[2].weight.requires_grad_(step % 2 == 0)


def accumulates(net: Net, loss_of: Any, step: int) -> None:
    """A backward before that of the step, and one more through its graph; then new replicas."""
    loss = loss_of(batch(step) + 1)
    loss.backward(retain_graph=True)
    loss.backward()
    if step == 1:
        net.net[1].register_forward_hook(lambda *_: None)


def hooked(net: Net, loss_of: Any, step: int) -> None:
    """Hooks that see the sums once, and change them."""
    if step == 1:
        net.seen = []
        net.net[0].weight.register_hook(lambda g: (2 * g).clamp(-0.01, 0.01))
        net.net[3].bias.register_post_accumulate_grad_hook(
            lambda p: net.seen.append(p.grad.cpu().clone())
        )
    if step == 3:
        assert len(net.seen) == 2 and net.net[0].weight._backward_hooks


def keeps_strides(net: Net, loss_of: Any, step: int) -> None:
    """On which fused optimizers rely."""
    loss_of(batch(step)).backward()
    for p in net.parameters():
        dims = [d for d, length in enumerate(p.shape) if length > 1]
        assert p.grad is None or [p.grad.stride(d) for d in dims] == [p.stride(d) for d in dims]
    net.zero_grad()


LAWS: dict[str, tuple[Callable[[], Net], Around]] = {
    "in pieces": (Images, steps),
    "views": (Views, steps),
    "on a stream of its own": (Beside, steps),
    "comes late": (Later, steps),
    "through a buffer": (Cached, steps),
    **{around.__name__: (Net, around) for around in (has_gradients, thaws, accumulates, hooked)},
    **{
        f"strides, {kind}": (partial(Strided, kind), keeps_strides)
        for kind in ("plain", "channels_last", "transposed", "permuted", "1x1")
    },
}


def batch(step: int) -> Tensor:
    return inputs(14, WIDTH, seed=step)


@every_layout
@pytest.mark.parametrize("law", LAWS)
def test_steps_are_those_of_one_device(law: str, sizes: Any, places: Any, executor: Any) -> None:
    make, around = LAWS[law]
    batches = [batch(step) for step in range(4)]
    compare_steps(make, batches, sizes, around, places=places, executor=executor)


@on_separate
@pytest.mark.parametrize("make", [Views, Images])
def test_every_bucket_leaves_early(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on."""
    early: list[int] = []
    add_up = chain.Packing.add_up

    def watched(self: chain.Packing, j: int, rows: Any, ready: Any = None) -> None:
        early.extend([j] * (ready is not None))
        add_up(self, j, rows, ready)

    monkeypatch.setattr(chain.Packing, "add_up", watched)
    net = make().double()
    del net.unused
    with step_engine(net, (5, 5, 4)) as engine:
        for step in range(3):
            early.clear()
            engine.train("training_step", batch(step)).backward()
            found = range(len(engine.replicas.packing.buckets))
            assert step == 0 or sorted(early) == list(found)


class Failing(torch.autograd.Function):
    """Its backward fails once: on accelerators, on the second device."""

    error: ClassVar[BaseException | None] = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.error is not None and gradient.device.index in (None, 1):
            error, Failing.error = Failing.error, None
            raise error
        return gradient


class Fragile(Net):
    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        z: Tensor = d(c(Failing.apply(b(a(x)))))  # the last layers have their gradients then
        return z


@every_layout
def test_an_error_in_the_middle_leaves_nothing_half_summed(
    sizes: Any, places: Any, executor: Any
) -> None:
    """On accelerators gradients of an earlier backward are what they were."""
    torch.manual_seed(0)
    net = Fragile().double()
    one = copy.deepcopy(net)
    on_cpu = accelerator() == "cpu"
    with step_engine(net, sizes, places, executor=executor) as engine:
        for step in range(4):
            kind = ValueError if on_cpu or step % 2 else torch.OutOfMemoryError
            if step > 1:
                engine.train("training_step", batch(step) + 1).backward()
                one.training_step(batch(step) + 1).backward()
            before = copy.deepcopy(gradients(net))
            loss = engine.train("training_step", batch(step))
            Failing.error = kind("in the middle")
            with pytest.raises(kind, match="in the middle"):
                loss.backward()
            if kind is torch.OutOfMemoryError:
                wait_for_autograd(engine.devices)
                engine.undo()
            if on_cpu:
                net.zero_grad(), one.zero_grad()
            else:
                assert_equal_trees(gradients(net), before, "gradients", atol=0, rtol=0)
            engine.train("training_step", batch(step)).backward()
            one.training_step(batch(step)).backward()
            assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
            update(net), update(one)


def test_gradients_that_torch_conjugates_or_negates_only_as_it_reads_them() -> None:
    """A copy of their memory would not have it."""
    root, other = devices_of(2)
    values = torch.complex(*torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    rows = [[nn.Parameter(torch.zeros_like(v).to(root)) for v in (values, values.imag)]]
    rows.append([nn.Parameter(p.detach().to(other)) for p in rows[0]])
    rows[1][0].grad = values.to(other).conj()
    rows[1][1].grad = rows[1][0].grad.imag
    for p, value in zip(rows[0], (values, values.imag), strict=True):
        p.grad = value.to(root).clone()
    reduce_gradients(rows)
    assert_equal_trees(rows[0][0].grad, 2 * values.real + 0j, "sum", **EXACT)
    assert_equal_trees(rows[0][1].grad, torch.zeros(3, 4), "sum", **EXACT)
