"""Gradients leave devices while the backward runs: the same as when they leave after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from typing import Any, cast

import pytest
import torch
from support.device_kinds import on_accelerators, on_separate
from support.oracle import devices_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.comm import buckets, chain, on_streams
from lightning_dp.parallel.reduce import wait_for_autograd
from lightning_dp.parallel.step import StepParallel

pytestmark = [on_accelerators, pytest.mark.usefixtures("on", "small_buckets")]

WIDTH, STEPS = 8, 4
sim_only = pytest.mark.sim_only("It goes by virtual time, and counts copies.")
PLACES = [(0, 1, 2), (0, 1, 1, 2, 0)]
"""The devices of replicas, by their positions."""


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that two are under way at once."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2**9)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The buckets that left early."""
    found: list[int] = []
    add_up = chain.Packing.add_up

    def watched(self: chain.Packing, j: int, rows: Any, ready: Any = None) -> None:
        if ready is not None:
            found.append(j)
        add_up(self, j, rows, ready)

    monkeypatch.setattr(chain.Packing, "add_up", watched)
    return found


class Net(nn.Module):
    """By whose `training_step` it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.net(x)
        return z

    def training_step(self, x: Tensor) -> Any:
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


SPLITS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "even": lambda n, k: tuple(n // k + (i < n % k) for i in range(k)),
    "one without": lambda n, k: (n - (k - 2), *[1] * (k - 2), 0),
    "root without": lambda n, k: (0, n - (k - 2), *[1] * (k - 2)),
}


def batches(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(14, WIDTH, generator=generator) for _ in range(steps)]


def train(
    make: Callable[[], Net],
    places: Sequence[int],
    split: Callable[[int, int], tuple[int, ...]] = SPLITS["even"],
    around: Callable[[StepParallel, Net, int], Any] = lambda *_: None,
    overlap: bool = True,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Parameters and gradients after each step of a training."""
    torch.manual_seed(0)
    devices = [devices_of(max(places) + 1)[k] for k in places]
    net = make().to(devices[0])
    own = {"output_device": devices[0], "split": lambda n: split(n, len(places))}
    found: list[dict[str, Tensor]] = []
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
    with closing(StepParallel(net, devices, **{"executor": "inorder", **own, **options})) as spread:
        spread.reducer.overlaps = overlap
        for step, batch in enumerate(batches()):
            net.step = step
            around(spread, net, step)
            spread.train("training_step", batch).backward()
            gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
            found.append({f"{n}.grad": g.to_dense().cpu() for n, g in gradients.items()})
            optimizer.step()
            optimizer.zero_grad()
            found[-1] |= {n: p.detach().cpu() for n, p in net.named_parameters()}
    return found


def alone(make: Callable[[], Net], around: Callable[..., Any] = lambda *_: None) -> Any:
    return train(make, [0], lambda n, k: (n,), around)


def assert_close(a: Sequence[dict[str, Tensor]], b: Sequence[dict[str, Tensor]]) -> None:
    for own, other in zip(a, b, strict=True):
        for name, value in own.items():
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("make", [Images, Views, Beside])
def test_overlap_leaves_the_same_gradients(
    make: Callable[[], Net], places: Sequence[int], split: str
) -> None:
    on = train(make, places, SPLITS[split])
    assert_close(on, train(make, places, SPLITS[split], overlap=False))
    if make is not Beside:
        assert_close(on, alone(make))


@on_separate
@pytest.mark.parametrize("make", [Views, Images])
def test_every_bucket_leaves_early(make: Callable[[], Net], sent: list[int]) -> None:
    found: list[list[int]] = []

    def around(engine: StepParallel, net: Net, step: int) -> None:
        found.append([len(engine.replicas.packing.buckets), len(sent)])
        sent.clear()

    train(make, [0, 1, 2], around=around)
    buckets = found[0][0]
    assert [count for _, count in found] == [0, buckets, buckets, buckets]
    assert sorted(sent) == list(range(buckets))


class Later(Net):
    """From the second step on, one layer's gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        x = b(a(x))
        for _ in range(2 if self.step else 1):
            x = checkpoint(c, x, use_reentrant=True)
        z: Tensor = d(x)
        return z

    step = 0


@pytest.mark.parametrize("places", PLACES)
def test_a_gradient_that_comes_late_is_added(places: Sequence[int]) -> None:
    def follow(engine: StepParallel, net: Net, step: int) -> None:
        for replica in engine.replicas.modules:
            replica.step = step

    assert_close(train(Later, places, around=follow), alone(Later, follow))


def hooked(engine: StepParallel, net: Net, step: int) -> None:
    """A hook that sees the sums, and changes them."""
    if step == 1:
        seen: list[Tensor] = []
        net.net[0].weight.register_hook(lambda g: g * 2)
        net.net[3].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        net.seen = seen
    if step == 3:
        assert len(net.seen) == 2


def keeping(engine: StepParallel, net: Net, step: int) -> None:
    """Some have gradients already."""
    net.net[2].weight.grad = torch.ones_like(net.net[2].weight)


def thawing(engine: StepParallel, net: Net, step: int) -> None:
    net.net[2].weight.requires_grad_(step % 2 == 0)


def twice(engine: StepParallel, net: Net, step: int) -> None:
    """A backward before that of the step, and one that goes through its graph again."""
    loss = engine.train("training_step", batches()[0] + 1)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("around", [keeping, thawing, twice, hooked])
def test_what_changes_between_backwards(around: Any) -> None:
    on = train(Net, PLACES[1], around=around)
    assert_close(on, train(Net, PLACES[1], around=around, overlap=False))
    assert_close(on, alone(Net, around))


class Failing(torch.autograd.Function):
    error: BaseException | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.error is not None and gradient.device.index in (None, 1):
            raise Failing.error
        return gradient


class Fragile(Net):
    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        z: Tensor = d(c(Failing.apply(b(a(x)))))
        return z


@sim_only
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
@pytest.mark.parametrize("places", PLACES)
def test_an_error_in_the_middle_leaves_nothing_half_summed(
    places: Sequence[int], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of an earlier backward are what they were; the step may be done again."""

    def around(engine: StepParallel, net: Net, step: int) -> None:
        engine.train("training_step", batches()[0] + 1).backward()
        before = [p.grad.clone() for p in net.parameters()]
        loss = engine.train("training_step", batches()[0] + 2)
        with monkeypatch.context() as patch:
            patch.setattr(Failing, "error", kind("in the middle"))
            with pytest.raises(kind, match="in the middle"):
                loss.backward()
        if kind is torch.OutOfMemoryError:
            wait_for_autograd(engine.devices)
            engine.undo()
        for parameter, gradient in zip(net.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)
        engine.train("training_step", batches()[0] + 2).backward()

    def undisturbed(engine: StepParallel, net: Net, step: int) -> None:
        engine.train("training_step", batches()[0] + 1).backward()
        engine.train("training_step", batches()[0] + 2).backward()

    assert_close(train(Fragile, places, around=around), train(Fragile, places, around=undisturbed))
