"""Gradients leave devices while the backward runs: the same bits as when they leave after it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from typing import Any, cast

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, devices_of, run
from patience import soon
from places import not_on_sim, on_accelerators, on_separate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.gradients import wait_for_autograd
from lightning_dp.parallel.gradients.overlap import Overlap
from lightning_dp.parallel.links import buckets, on_streams, summing
from lightning_dp.parallel.links.lanes import Lane
from lightning_dp.parallel.step import StepParallel
from lightning_dp.sim.links import PRESETS

pytestmark = [on_accelerators, pytest.mark.usefixtures("on", "small_buckets")]

WIDTH, STEPS = 8, 4
sim_only = pytest.mark.sim_only("It goes by virtual time, and counts copies.")
PLACES = [(0, 1, 2), (0, 1, 1, 2, 0), (0, 0, 1)]
"""The devices of replicas, by their positions."""


@pytest.fixture(
    params=[
        pytest.param(2**9, id="many buckets"),
        pytest.param(2**20, id="one bucket", marks=pytest.mark.slow),
    ]
)
def small_buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are many, two are under way at once."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", request.param)
    if request.param < 2**20:
        monkeypatch.setattr(summing, "WINDOW_BYTES", 2**13)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The buckets that left early."""
    found: list[int] = []
    send = Overlap._send

    def watched(self: Overlap, j: int, *args: Any) -> None:
        found.append(j)
        send(self, j, *args)

    monkeypatch.setattr(Overlap, "_send", watched)
    return found


def dense(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), *more, nn.Linear(16, 16), nn.Linear(16, 4)
    )


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


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(16, 16)
        self.again.weight = self.net[2].weight

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        z: Tensor = d(self.again(c(b(a(x)))))
        return z


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(super().forward(x))
        return z


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].requires_grad_(False)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 10).long() % 5))


class Reentrant(Net):
    """The same layer in two nested backwards: its gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        x = b(a(x))
        for _ in range(2):
            x = checkpoint(c, x, use_reentrant=True)
        z: Tensor = d(x)
        return z


class Images(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 16, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)).mean((2, 3))
        return super().forward(y[:, :WIDTH])


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.coarse(x.bfloat16()).to(x.dtype))


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


class Large(Net):
    """A tensor that passes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDTH, 300)
        self.back = nn.Linear(300, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.back(self.large(x)))


class Changing(Net):
    """Which of its layers it uses changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        z: Tensor = d(self.ways[self.step % 2](c(b(a(x)))) if self.step % 3 else c(b(a(x))))
        return z


MODELS: list[Callable[[], Net]] = [
    Net, Shared, Unused, Frozen, Reentrant, Images, Mixed, Views, Large, Changing
]  # fmt: skip


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """One for all replicas on a device: some share parameters."""
    return torch.Stream(device)


class Beside(Net):
    """One layer runs on a stream of the module's own."""

    def is_beside(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.net
        x = b(a(x))
        if x.device.type == "cpu" or not self.is_beside():
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


class BesideLater(Beside):
    """Once it is known in which order its buckets are filled."""

    def is_beside(self) -> bool:
        return self.step >= 2


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
    engine: type[StepParallel] = StepParallel,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Parameters and gradients after each step of a training."""
    torch.manual_seed(0)
    devices = [devices_of(max(places) + 1)[k] for k in places]
    net = make().to(devices[0])
    own = {"output_device": devices[0], "split": lambda n: split(n, len(places))}
    found: list[dict[str, Tensor]] = []
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
    with closing(engine(net, devices, **{"executor": "inorder", **own, **options})) as spread:
        for step, batch in enumerate(batches()):
            net.step = step
            around(spread, net, step)
            spread.train("training_step", batch).backward()
            if not spread.reducer.accumulating:
                gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
                found.append({f"{n}.grad": g.to_dense().cpu() for n, g in gradients.items()})
                optimizer.step()
                optimizer.zero_grad()
                found[-1] |= {n: p.detach().cpu() for n, p in net.named_parameters()}
    return found


def assert_same_bits(a: Sequence[dict[str, Tensor]], b: Sequence[dict[str, Tensor]]) -> None:
    for step, (own, other) in enumerate(zip(a, b, strict=True)):
        assert own.keys() == other.keys(), step
        for name, value in own.items():
            assert value.stride() == other[name].stride(), (step, name)
            assert torch.equal(value, other[name]), (step, name)


def alone(make: Callable[[], Net], around: Callable[..., Any] = lambda *_: None) -> Any:
    return train(make, [0], lambda n, k: (n,), around)


def assert_close(a: Sequence[dict[str, Tensor]], b: Sequence[dict[str, Tensor]]) -> None:
    for own, other in zip(a, b, strict=True):
        for name, value in own.items():
            tolerance = 2e-2 if other[name].dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(value, other[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("executor", ["inorder", pytest.param("threads", marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("make", MODELS)
def test_overlap_leaves_the_same_bits(
    make: Callable[[], Net], places: Sequence[int], executor: Any
) -> None:
    on = train(make, places, executor=executor)
    assert_same_bits(on, train(make, places, overlap=False, executor=executor))
    assert_close(on, alone(make))


@not_on_sim
def test_gradients_that_are_sparse_go_as_before() -> None:
    assert_same_bits(train(Sparse, [0, 1]), train(Sparse, [0, 1], overlap=False))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("make", [Beside, BesideLater])
def test_a_module_with_streams_of_its_own(make: Callable[[], Net], places: Sequence[int]) -> None:
    assert_same_bits(train(make, places), train(make, places, overlap=False))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("places", PLACES)
def test_shards_that_are_unequal_or_missing(split: str, places: Sequence[int]) -> None:
    on = train(Net, places, SPLITS[split])
    assert_same_bits(on, train(Net, places, SPLITS[split], overlap=False))
    assert_close(on, alone(Net))


@on_separate
@pytest.mark.parametrize("make", [Net, Views, Large, Images, Mixed])
def test_every_bucket_leaves_early_once_the_order_is_known(
    make: Callable[[], Net], sent: list[int]
) -> None:
    found: list[list[int]] = []

    def around(engine: StepParallel, net: Net, step: int) -> None:
        found.append([len(engine.replicas.packing.buckets), len(sent)])
        sent.clear()

    train(make, [0, 1, 2], around=around)
    buckets = found[0][0]
    assert [count for _, count in found] == [0, 0, buckets, buckets]
    assert sorted(sent) == list(range(buckets))


@on_separate
def test_what_is_filled_twice_goes_after_the_backward(sent: list[int]) -> None:
    twice: list[int] = []

    def around(engine: StepParallel, net: Net, step: int) -> None:
        parameters = list(net.parameters())
        of = [b.positions for b in engine.replicas.packing.buckets]
        layer = {i for i, p in enumerate(parameters) if p is net.net[2].weight}
        twice[:] = [j for j, positions in enumerate(of) if layer & positions]

    train(Reentrant, [0, 1, 2], around=around)
    assert twice and not set(twice) & set(sent)


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


def accumulating(engine: StepParallel, net: Net, step: int) -> None:
    engine.reducer.accumulating = step % 2 == 0


@pytest.mark.parametrize("places", PLACES)
def test_gradients_that_accumulate(places: Sequence[int]) -> None:
    on = train(Net, places, around=accumulating)
    assert_same_bits(on, train(Net, places, around=accumulating, overlap=False))
    assert_close(on, alone(Net, accumulating))


@on_separate
def test_while_gradients_accumulate_nothing_leaves(sent: list[int]) -> None:
    counts: list[int] = []

    def around(engine: StepParallel, net: Net, step: int) -> None:
        counts.append(len(sent))
        engine.reducer.accumulating = step != 1

    train(Net, [0, 1, 2], around=around)
    assert counts[-1] == counts[0] == 0 and not sent


def hooked(engine: StepParallel, net: Net, step: int) -> None:
    """A hook that sees the sums, and changes them."""
    if step == 1:
        seen: list[Tensor] = []
        net.net[0].weight.register_hook(lambda g: g * 2)
        net.net[3].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        net.seen = seen
    if step == 3:
        assert len(net.seen) == 2


@pytest.mark.parametrize("places", PLACES)
def test_hooks_of_parameters_are_called_once_with_the_sums(places: Sequence[int]) -> None:
    on = train(Net, places, around=hooked)
    assert_same_bits(on, train(Net, places, around=hooked, overlap=False))
    assert_close(on, alone(Net, hooked))


def keeping(engine: StepParallel, net: Net, step: int) -> None:
    """Some have gradients already."""
    net.net[2].weight.grad = torch.ones_like(net.net[2].weight)


def thawing(engine: StepParallel, net: Net, step: int) -> None:
    net.net[2].weight.requires_grad_(step % 2 == 0)


def replacing(engine: StepParallel, net: Net, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            net.net[2].weight = nn.Parameter(net.net[2].weight * 0.5)


def twice(engine: StepParallel, net: Net, step: int) -> None:
    """A backward before that of the step, and one that goes through its graph again."""
    loss = engine.train("training_step", batches()[0] + 1)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("around", [keeping, thawing, replacing, twice])
@pytest.mark.parametrize("places", PLACES)
def test_what_changes_between_backwards(places: Sequence[int], around: Any) -> None:
    on = train(Net, places, around=around)
    assert_same_bits(on, train(Net, places, around=around, overlap=False))
    assert_close(on, alone(Net, around))


def test_nobody_sees_hooks_outside_of_a_backward() -> None:
    def around(engine: StepParallel, net: Net, step: int) -> None:
        for row in engine.replicas.parameters:
            assert not any([p._post_accumulate_grad_hooks for p in row])

    train(Net, [0, 1, 2], around=around)


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


@on_separate
@pytest.mark.parametrize("places", PLACES)
def test_after_an_error_in_the_middle_the_next_step_is_as_ever(
    places: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier gradients are what they were; that of the half-done backward is nowhere."""

    def around(engine: StepParallel, net: Net, step: int) -> None:
        loss = engine.train("training_step", batches()[0] + 1)
        monkeypatch.setattr(Failing, "error", ValueError("in the middle"))
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        monkeypatch.setattr(Failing, "error", None)

    assert_same_bits(train(Fragile, places, around=around), train(Fragile, places))


@on_separate
def test_an_error_while_a_bucket_is_sent_is_that_of_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def around(engine: StepParallel, net: Net, step: int) -> None:
        if step != 2:
            return
        loss = engine.train("training_step", batches()[0] + 1)
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "left", lambda *_: (_ for _ in ()).throw(ValueError("on the way")))
            with pytest.raises(ValueError, match="on the way"):
                loss.backward()

    assert_same_bits(train(Net, [0, 1, 2], around=around), train(Net, [0, 1, 2]))


@sim_only
@pytest.mark.parametrize("overlap", [True, False])
def test_no_device_gets_more_than_one_model(overlap: bool) -> None:
    received: list[dict[tuple[str, str], int]] = []

    class Watching(StepParallel):
        def backward(self, *args: Any) -> None:
            torch.sim.reset_copy_stats()
            super().backward(*args)
            received.append({way: stats.bytes for way, stats in torch.sim.copy_stats().items()})

    net = Net()
    own = sum(p.numel() * p.element_size() for p in net.parameters())
    train(Net, [0, 1, 2, 3, 3], engine=Watching, overlap=overlap)
    for ways in received:
        large = {way: size for way, size in ways.items() if size >= own}
        assert set(large) == {("sim:3", "sim:2"), ("sim:2", "sim:1"), ("sim:1", "sim:0")}
        assert max(large.values()) < own + 256 * len(list(net.parameters()))


LAYERS, LAYER_BYTES = 20, 65 * 64 * 4


class Deep(Net):
    """Layers that are all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)])

    def training_step(self, x: Tensor) -> Any:
        return self.net(x.repeat(1, 64 // WIDTH)).square().mean()


def seconds_of_a_step(k: int, overlap: bool = True) -> float:
    """On virtual time; the weights have not changed, and are not sent."""
    devices = devices_of(k)
    net = Deep().to(devices[0])
    own = {"output_device": devices[0], "split": lambda n: SPLITS["even"](n, k)}
    with closing(StepParallel(net, devices, executor="inorder", overlap=overlap, **own)) as engine:
        for _ in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
            torch.sim.set_clock("virtual")
            engine.train("training_step", batches()[0].repeat(4, 1)).backward()
            seconds: float = torch.sim.elapsed()
            torch.sim.set_clock("wall")
            net.zero_grad()
    return seconds


@sim_only
@pytest.mark.parametrize("k", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", ["pcie4", "pcie4_peer", "nvlink4"])
def test_little_is_left_after_the_backward(
    k: int, preset: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The last bucket goes down the chain; what left before does not hold it up.

    Net and rates are small: the times are those of 100 MB of gradients, and 100 ms to compute.
    """
    if "one bucket" in request.node.name:
        pytest.skip("it is about several")
    monkeypatch.setattr(buckets, "BUCKET_BYTES", LAYER_BYTES)
    monkeypatch.setattr(summing, "WINDOW_BYTES", 8 * LAYER_BYTES)
    scale = 100e6 / (LAYERS * LAYER_BYTES)
    links, devices = PRESETS[preset], devices_of(k)
    link = links.peer or links.host
    wait = link.seconds * (1 if links.peer else 2)
    try:
        for device in devices:
            torch.sim.set_speed(device, flops_per_second=LAYERS * 6 * 56 / k * 64**2 / 100e-3)
        unhindered = seconds_of_a_step(k)
        for source, target in itertools.permutations(devices, 2):
            rate = link.bytes_per_second / scale
            torch.sim.set_link(source, target, bytes_per_second=rate, seconds=wait)
        after, during = (seconds_of_a_step(k, overlap) - unhindered for overlap in (False, True))
    finally:
        torch.sim.set_links(None)
        for device in devices:
            torch.sim.set_speed(device)
    bucket = wait + 100e6 / LAYERS / link.bytes_per_second
    assert during < (k + 2) * bucket
    if preset != "nvlink4":  # whose copies take less than the additions
        assert after > during + LAYERS / 4 * bucket


@sim_only
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1), (2, 0)])
def test_which_thread_sends_a_bucket_is_no_matter_on_virtual_time(
    first: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the replica whose backward comes last, by the machine's load."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", LAYER_BYTES)
    devices, senders = devices_of(4), set[int]()
    filled: list[list[int]] = [[] for _ in range(LAYERS)]
    fill, send = Overlap._fill, Overlap._send

    def late(self: Overlap, j: int, r: int, *args: Any) -> None:
        if r == (first if j >= LAYERS / 2 else then):
            assert soon(lambda: len(filled[j]) == 3)
        fill(self, j, r, *args)
        filled[j].append(r)

    def watched(self: Overlap, *args: Any) -> None:
        senders.add(threading.get_ident())
        send(self, *args)

    try:
        for device in devices:
            torch.sim.set_speed(device, flops_per_second=1e9)
        for source, target in itertools.permutations(devices, 2):
            torch.sim.set_link(source, target, bytes_per_second=1e9, seconds=1e-6)
        expected = seconds_of_a_step(4)
        monkeypatch.setattr(Overlap, "_fill", late)
        monkeypatch.setattr(Overlap, "_send", watched)
        assert seconds_of_a_step(4) == expected and len(senders) > 1
    finally:
        torch.sim.set_links(None)
        for device in devices:
            torch.sim.set_speed(device)


class Manual(ByHand, Classifier):
    pass


class Clipped(Classifier):
    """It sees what is left of its gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm)


FITS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "clipping": (Clipped, {"gradient_clip_val": 0.1}),
    "accumulating": (Classifier, {"accumulate_grad_batches": 2}),
    "manual": (Manual, {}),
}


@pytest.mark.parametrize("case", FITS)
@pytest.mark.parametrize("executor", ["threads", pytest.param("inorder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("streams", ["default", "side"])
def test_a_fit(
    case: str, executor: str, streams: str, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    if streams == "side":
        request.getfixturevalue("on_side_streams")
    make, options = FITS[case]
    spread = {"max_epochs": 1, "strategy": {"executor": executor}, **options}
    result = run(make, 3, **spread)
    assert_same(result, run(make, 1, max_epochs=1, accelerator="cpu", **options), atol=1e-4)
    monkeypatch.setattr(Overlap, "begin", lambda *_: None)
    other = run(make, 3, **spread)
    for name, value in result.module.state_dict().items():
        assert torch.equal(value.cpu(), other.module.state_dict()[name].cpu()), name


@sim_only
@pytest.mark.parametrize("places", PLACES)
def test_a_step_that_runs_out_of_memory_in_the_middle_is_done_again(
    places: Sequence[int], monkeypatch: pytest.MonkeyPatch, sent: list[int]
) -> None:
    """With gradients of an earlier backward, which nothing half-done is added to."""

    def around(engine: StepParallel, net: Net, step: int) -> None:
        engine.train("training_step", batches()[0] + 1).backward()
        sent.clear()
        loss = engine.train("training_step", batches()[0] + 2)
        with monkeypatch.context() as patch:
            patch.setattr(Failing, "error", torch.OutOfMemoryError("no room"))
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
        wait_for_autograd(engine.devices)
        engine.undo()
        assert not engine.reducer._overlap.is_open
        engine.train("training_step", batches()[0] + 2).backward()

    def undisturbed(engine: StepParallel, net: Net, step: int) -> None:
        engine.train("training_step", batches()[0] + 1).backward()
        engine.train("training_step", batches()[0] + 2).backward()

    assert_same_bits(
        train(Fragile, places, around=around), train(Fragile, places, around=undisturbed)
    )
