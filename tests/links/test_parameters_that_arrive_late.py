"""Replicas begin before all of their parameters are there, and compute as one device does.

Strict simulated devices refuse to read what nothing orders: each way to get at a parameter, and
each way to have had it from before, is tried on them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Tracer
from oracle import devices_of, gradients
from places import on_separate
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.contexts import Surroundings
from lightning_dp.parallel.links import buckets, packing, pipeline, relay, staging
from lightning_dp.parallel.replicas import arriving
from lightning_dp.parallel.replicas.buffer_state import BufferState
from lightning_dp.parallel.split import even
from lightning_dp.parallel.step import StepParallel
from lightning_dp.sim.links import PRESETS

WIDTH, DEPTH = 8, 5

pytestmark = on_separate
sees_races = pytest.mark.sim_only("A GPU does not say that nothing orders two accesses.")


@pytest.fixture(autouse=True)
def nothing_is_under_way(on: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each tensor is a bucket, and no other test has compiled anything: then nothing is late."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(staging, "LEAST_BYTES", 0)
    importlib.import_module("torch._dynamo.utils").counters.clear()
    yield
    for device in devices_of(3):
        torch.accelerator.synchronize(device)


@pytest.fixture(params=["chain", "relay"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether devices have access to each other's memory."""
    monkeypatch.setattr(pipeline, "have_access", lambda *_: request.param == "chain")
    return str(request.param)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each beginning, how many parameters were held by others, of how many."""
    seen: list[tuple[int, int]] = []
    find = arriving.Arriving._held

    def counted(self: arriving.Arriving) -> list[nn.Parameter]:
        found = find(self)
        seen.append((len(found), len(self._parameters)))
        return found

    monkeypatch.setattr(arriving.Arriving, "_held", counted)
    return seen


class Net(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])

    def training_step(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class LastFirst(Net):
    def training_step(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x.square().mean()


class PastTheLayer(Net):
    """A weight is used without a call of its layer."""

    def training_step(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        return self.layers(x @ last.weight + last._parameters["bias"]).square().mean()


class AllAtFirst(Net):
    def training_step(self, x: Tensor) -> Tensor:
        norms = sum(p.square().sum() for p in self.parameters())
        return self.layers(x).square().mean() + 0.1 * norms


class Table(Net):
    """Tables of parameters are read in all the ways of a dict."""

    def training_step(self, x: Tensor) -> Tensor:
        tables = [layer._parameters for layer in self.layers]
        one, two, three, four, five = tables
        found = [one["weight"], two.get("weight"), dict(three)["weight"], next(iter(four.values()))]
        found += [dict(five.items())["weight"], {**one}["bias"], five.copy()["bias"]]
        assert five.get("nothing", 3) == 3 and len(dict(one)) == 2 and [*one] == ["weight", "bias"]
        return self.layers(x).square().mean() + sum(p.square().sum() for p in reversed(found))


class Copies(Net):
    """A replica is copied, and pickled, before it is called."""

    def training_step(self, x: Tensor) -> Tensor:
        copied, again = copy.deepcopy(self.layers[-1]), copy.copy(self.layers[-2])
        read: Any = pickle.loads(pickle.dumps(self.layers[-3].cpu()))
        self.layers[-3].to(x.device)
        assert type(copied._parameters) is dict and type(read._parameters) is dict
        with torch.no_grad():
            factor = again(copied(x)).mean() + read(x.cpu()).mean().to(x.device)
        return self.layers(x).square().mean() * (1 + 0 * factor)


class Functional(Net):
    def training_step(self, x: Tensor) -> Tensor:
        weights = {name: 2 * p for name, p in self.layers.named_parameters()}
        return functional_call(self.layers, weights, (x,)).square().mean()


class Recomputed(Net):
    def training_step(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer, reentrant in zip(self.layers, itertools.cycle([True, False]), strict=False):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.square().mean()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            parametrizations.weight_norm(layer)


class WithSelfs(Net):
    """Parameters that are attributes, and a layer that comes last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shifts = nn.Parameter(torch.ones(WIDTH)), nn.ParameterList()
        self.shifts.append(nn.Parameter(torch.zeros(WIDTH)))
        self.heads = nn.ParameterDict({"one": nn.Parameter(torch.ones(WIDTH))})

    def training_step(self, x: Tensor) -> Tensor:
        return (self.layers(x * self.heads["one"] + self.shifts[0]) * self.scale).square().mean()


class Writes(Net):
    """A step writes to a weight that may not be there yet."""

    def training_step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[-1].weight.clamp_(-0.1, 0.1)
            self.layers[-2].weight.data.mul_(0.5)
        return super().training_step(x)


class Binds(Net):
    """A step binds, adds and removes parameters: of its replica alone."""

    def training_step(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        weight = last._parameters.pop("weight")
        last.weight = weight
        self.layers[0].added = nn.Parameter(torch.ones(1, device=x.device))
        del self.layers[0].added
        return super().training_step(x)


class OnAnotherStream(Net):
    """Half of the layers compute on a stream of their own, made before the first has computed."""

    def training_step(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # the oracle
            y = self.layers[:2](x)
            return self.layers[2:](y + y.detach()).square().mean()
        home, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
        side.wait_stream(home)
        y = self.layers[:2](x)
        torch.accelerator.set_stream(side)
        x.record_stream(side)
        with torch.no_grad():  # of gradients on two streams torch itself has a warning
            z = self.layers[:2](x)
        torch.accelerator.set_stream(home)
        home.wait_stream(side)
        z.record_stream(home)
        return self.layers[2:](y + z).square().mean()


class InLists(Net):
    """Weights are kept in a list of the module's, which replicas have their own of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.weight for layer in self.layers]

    def training_step(self, x: Tensor) -> Tensor:
        for weight in reversed(self.weights):
            x = x @ weight
        return x.square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unsqueeze(1))[0]).square().mean()


class Kept(Net):
    """From one step to the next a replica keeps what `keep` makes of its last weight."""

    keep: Callable[[Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[torch.device, Any] = {}

    def training_step(self, x: Tensor) -> Tensor:
        kept = self.kept.get(x.device)
        factor = 0.0 if kept is None else x @ kept.detach()
        self.kept[x.device] = type(self).keep(self.layers[-1].weight)
        return (self.layers(x) + factor).square().mean()


class KeptItself(Kept):
    keep = staticmethod(lambda weight: weight)


class KeptView(Kept):
    keep = staticmethod(lambda weight: weight[:].detach())


class KeptData(Kept):
    keep = staticmethod(lambda weight: weight.data)


NETS: list[Callable[[], nn.Module]] = [
    *[Net, LastFirst, PastTheLayer, AllAtFirst, Table, Copies, Functional, Recomputed, Tied],
    *[Normed, WithSelfs, Writes, Binds, OnAnotherStream, InLists, Recurrent],
    *[KeptItself, KeptView, KeptData],
]


def one_step(call: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor, optimizer: Any) -> Tensor:
    loss = call(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()


def engine_of(net: nn.Module, k: int = 3) -> StepParallel:
    devices = devices_of(k)
    return StepParallel(net, devices, output_device=devices[0], split=partial(even, k=k))


def both(make: Callable[[], nn.Module], k: int = 3) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make()
    return one, copy.deepcopy(one).to(devices_of(k)[0])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("apart", [0, 2**20])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("make", NETS)
def test_parameters_are_there_when_they_are_used(
    make: Callable[[], nn.Module], k: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_BYTES", apart)
    one, net = both(make, k)
    engine = engine_of(net, k)
    runs = [(one, one.training_step), (net, partial(engine.train, "training_step"))]
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.05) for own, _ in runs]
    for seed in range(4):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        losses = [
            one_step(call, own, x, optimizer)
            for (own, call), optimizer in zip(runs, optimizers, strict=True)
        ]
        torch.testing.assert_close(*losses)
        for name, right in gradients(one).items():
            own = gradients(net)[name]
            assert (own is None) == (right is None), name
            if own is not None and right is not None:
                torch.testing.assert_close(own.cpu(), right)
    for weight, right in zip(net.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(weight.cpu(), right, atol=1e-4, rtol=1e-4)
    engine.close()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("make", "expected"),
    [(Net, 0), (Tied, 0), (Normed, 0), (WithSelfs, 0), (Copies, 0), (Recurrent, 8), (InLists, 5)],
)
def test_what_the_module_keeps_elsewhere_counts_as_held(
    make: Callable[[], nn.Module], expected: int, held: list[tuple[int, int]]
) -> None:
    """And nothing else does, in any step."""
    _, net = both(make)
    engine, optimizer = engine_of(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        one_step(partial(engine.train, "training_step"), net, torch.ones(6, WIDTH), optimizer)
    assert len(held) >= 3
    assert {found for found, _ in held[-3:]} == {expected}
    engine.close()


@pytest.mark.parametrize(("least", "expected"), [(256, True), (257, False)])
def test_small_parameters_are_waited_for(
    least: int, expected: bool, held: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, each has 256 bytes of its bucket."""
    monkeypatch.setattr(arriving, "LEAST_BYTES", least)
    net = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH, bias=False), "two": nn.Linear(WIDTH, 1)})
    step = lambda self, x: self["two"](self["one"](x)).square().mean()
    net.__class__ = type("Two", (nn.ModuleDict,), {"training_step": step})
    net.to(devices_of(1)[0])
    engine, optimizer = engine_of(net, 2), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        one_step(partial(engine.train, "training_step"), net, torch.ones(6, WIDTH), optimizer)
    assert bool(held) == expected
    engine.close()


@pytest.mark.parametrize(("make", "expected"), [(KeptItself, 1), (KeptView, 10), (KeptData, 10)])
def test_what_a_step_keeps_counts_as_held_from_then_on(
    make: Callable[[], nn.Module], expected: int, held: list[tuple[int, int]]
) -> None:
    """Of a view it is not known whose it is: all are."""
    _, net = both(make, 2)
    engine, optimizer = engine_of(net, 2), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        one_step(partial(engine.train, "training_step"), net, torch.ones(6, WIDTH), optimizer)
    most = 1 if make is not KeptItself else expected  # a bucket is a tensor here
    assert [found for found, _ in held] == [0, max(most, expected), expected]
    engine.close()


def has_arrived(module: nn.Module) -> bool:
    """Whether what the current stream gets from here on comes after the arrival of a weight."""
    table: dict[str, Any] = module._parameters
    try:
        dict.__getitem__(table, "weight").data + 1
    except torch.sim.RaceError:
        return False
    return True


class Asking(Net):
    """Which layers are there as each begins, on each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.device, list[list[bool]]] = {}

    def training_step(self, x: Tensor) -> Tensor:
        seen = self.seen[x.device] = [list(map(has_arrived, self.layers))]
        for layer in self.layers:
            x = layer(x)
            seen.append(list(map(has_arrived, self.layers)))
        return x.square().mean()


@sees_races
@pytest.mark.usefixtures("way")
def test_a_layer_waits_for_its_own_parameters_and_for_no_later_ones() -> None:
    """And until these have been passed on."""
    _, net = both(Asking)
    engine, optimizer = engine_of(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        one_step(partial(engine.train, "training_step"), net, torch.ones(6, WIDTH), optimizer)
    stairs = [[j < i for j in range(DEPTH)] for i in range(DEPTH + 1)]
    root, *others = (net.seen[device] for device in engine.devices)
    assert root == [[True] * DEPTH] * (DEPTH + 1)
    assert others == [stairs, stairs]
    engine.close()


def test_what_comes_on_different_ways_comes_in_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last replica has not worked while a frozen layer changed: it gets that from the root."""
    monkeypatch.setattr(pipeline, "have_access", lambda *_: True)
    nothing = lambda *_: contextlib.nullcontext()  # takes a frozen layer's parameters first
    monkeypatch.setattr(BufferState, "noticed", nothing)
    one, net = both(LastFirst)
    for own in (one, net):
        own.layers[2].requires_grad_(False)
    devices, sizes = devices_of(3), [(2, 2, 2), (3, 3, 0), (2, 2, 2)]
    engine = StepParallel(net, devices, output_device=devices[0], split=lambda _: now)
    runs = [(one, one.training_step), (net, partial(engine.train, "training_step"))]
    optimizers = [
        torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1) for own, _ in runs
    ]
    for now in sizes:
        if 0 in now:
            for own in (one, net):
                own.layers[2].weight.data.mul_(2)
                increment_version(own.layers[2].weight)
        losses = [
            one_step(call, own, torch.ones(6, WIDTH), optimizer)
            for (own, call), optimizer in zip(runs, optimizers, strict=True)
        ]
        torch.testing.assert_close(*losses)
    engine.close()


LAYERS, SIDE = 24, 64
LAYER_BYTES = 4 * SIDE**2


class Deep(nn.Module):
    """Layers that take as long, and have as many bytes, as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])

    def training_step(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def seconds_of_a_forward(k: int, *, overlap: bool = True) -> float:
    """On virtual time, after an optimizer's step."""
    devices = devices_of(k)
    net = Deep().to(devices[0])
    options = {"output_device": devices[0], "split": partial(even, k=k), "overlap": overlap}
    x = torch.ones(8 * k, SIDE)
    with closing(StepParallel(net, devices, executor="inorder", **options)) as engine:
        for _ in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
            with torch.no_grad():
                torch._foreach_mul_(list(net.parameters()), 1.01)
            torch.sim.set_clock("virtual")
            engine.train("training_step", x)
            seconds: float = torch.sim.elapsed()
            torch.sim.set_clock("wall")
    return seconds


@pytest.mark.sim_only("A GPU has no virtual time.")
@pytest.mark.parametrize("k", [2, 3, 6])
@pytest.mark.parametrize("preset", ["pcie4", "pcie4_peer"])
def test_a_forward_is_longer_by_the_way_of_the_first_layer(
    k: int, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are small, as the net is: the times are those of 100 MB, and a forward of 33 ms."""
    monkeypatch.setattr(pipeline, "LEAST_BYTES", LAYER_BYTES)
    monkeypatch.setattr(relay, "PIECE_BYTES", LAYER_BYTES)
    links, devices = PRESETS[preset], devices_of(k)
    link = links.peer or links.host
    rate = link.bytes_per_second * LAYERS * LAYER_BYTES / 100e6
    try:
        for device in devices:
            torch.sim.set_speed(device, flops_per_second=LAYERS * 2 * 8 * SIDE**2 / 33e-3)
        alone = seconds_of_a_forward(k)
        torch.sim.set_links(preset)
        for device in devices:
            for other in {*devices} - {device} if links.peer else ():
                torch.sim.set_link(device, other, bytes_per_second=rate, seconds=link.seconds)
            if not links.peer:
                torch.sim.set_link(device, "cpu", bytes_per_second=rate, seconds=link.seconds)
                torch.sim.set_link("cpu", device, bytes_per_second=rate, seconds=link.seconds)
        late, at_once = (seconds_of_a_forward(k, overlap=on) for on in (True, False))
    finally:
        torch.sim.set_links(None)
        for device in devices:
            torch.sim.set_speed(device)
    bucket = link.seconds + LAYER_BYTES / rate
    assert 33e-3 < alone < late < alone + (k + 3) * bucket
    assert at_once > late + LAYERS / 3 * bucket


class FailsOnce(Net):
    """The last replica fails in its first layer."""

    fails = True

    def training_step(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        if FailsOnce.fails and x.device.index == 2:
            raise ValueError("once")
        return self.layers[1:](y).square().mean()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("then", ["training_step", "validation_step"])
def test_after_a_replica_has_failed_nothing_is_late_any_more(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, net = both(FailsOnce)
    for own in (one, net):
        object.__setattr__(own, "validation_step", None)
    engine, optimizer = engine_of(net), torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(6, WIDTH)
    monkeypatch.setattr(FailsOnce, "fails", False)
    monkeypatch.setattr(FailsOnce, "validation_step", Net.training_step, raising=False)
    del one.validation_step, net.validation_step
    train = partial(engine.train, "training_step")
    one_step(train, net, x, optimizer)
    monkeypatch.setattr(FailsOnce, "fails", True)
    with pytest.raises(ValueError, match="once"):
        train(x)
    monkeypatch.setattr(FailsOnce, "fails", False)
    one.load_state_dict(net.state_dict())
    call = train if then == "training_step" else partial(engine.evaluate, then)
    with torch.set_grad_enabled(then == "training_step"):
        torch.testing.assert_close(
            call(x).mean().detach().cpu(), one.training_step(x).detach(), atol=1e-6, rtol=1e-6
        )
    assert not engine.replicas.are_late
    for module in engine.replicas.modules:
        assert {type(own._parameters) for own in module.modules()} == {dict}
    engine.close()


class CompiledLater(Net):
    """What is compiled is nowhere where it would have been found before."""

    known: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = ()

    def training_step(self, x: Tensor) -> Tensor:
        for call in CompiledLater.known:
            return call(self.layers, x).square().mean()
        return super().training_step(x)


@pytest.mark.usefixtures("way")
def test_what_is_compiled_for_the_first_time_in_a_step_waits_for_all(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[int, int]]
) -> None:
    """From the next step on nothing is late."""
    torch._dynamo.reset()
    one, net = both(CompiledLater)
    engine = engine_of(net)
    runs = [(net, partial(engine.train, "training_step")), (one, one.training_step)]
    optimizers = [torch.optim.SGD(own.parameters(), lr=0.05) for own, _ in runs]
    begun = []
    for seed in range(5):
        if seed == 2:
            compiled = torch.compile(lambda layers, x: layers(x), backend="eager")
            monkeypatch.setattr(CompiledLater, "known", (compiled,))
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        losses = [
            one_step(call, own, x, optimizer)
            for (own, call), optimizer in zip(runs, optimizers, strict=True)
        ]
        torch.testing.assert_close(*losses)
        begun.append(len(held))
    assert begun[1] < begun[2] == begun[4]
    engine.close()


ROOMS = ("replicate", "weights", "arriving", "packing", "staging", "pipeline", "leaving")
"""The files of a refresh whose lines are interrupted."""


@pytest.mark.parametrize("way_out", ["chain", "relay"])
def test_after_an_interrupt_of_a_refresh_the_next_call_has_the_roots_parameters(
    way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the root's are what they were when that began."""
    monkeypatch.setattr(pipeline, "have_access", lambda *_: way_out == "chain")
    one, net = both(Net)
    x, tracer = torch.randn(6, WIDTH), Tracer()
    engine = engine_of(net)

    def interrupted(tracer: Tracer) -> None:
        with torch.no_grad():
            for own in (net, one):
                torch._foreach_mul_(list(own.parameters()), 1.01)
        with contextlib.suppress(KeyboardInterrupt), Surroundings():
            tracer.run(partial(engine.train, "training_step", x))

    interrupted(tracer)
    lines = [line for line in tracer.visits if Path(line[0]).stem in ROOMS]
    assert len(lines) > 50
    for line in lines:
        interrupted(Tracer(line, 1))
        loss = engine.train("training_step", x)
        torch.testing.assert_close(
            loss.detach().cpu(),
            one.training_step(x).detach(),
            msg=lambda t, line=line: f"{line} {t}",
        )
    engine.close()
