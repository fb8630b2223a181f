"""Parameters go out down a chain of devices, or by the host: on strict devices, on virtual time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, devices_of, run
from places import on_separate
from torch import Tensor

from lightning_dp.parallel.links import Packing, buckets, packing, pipeline, relay, staging
from lightning_dp.parallel.links.routes import have_access

SHAPES = [(64, 32), (32,), (8, 3, 4, 4), (16, 16), (), (0,)]
RATE = 1e9  # bytes per second, of each link
LATENCY = 1e-6
TOTAL = 25 * 2**20

pytestmark = on_separate


@pytest.fixture(autouse=True)
def nothing_is_under_way(on: str) -> Iterator[None]:
    yield
    for device in devices_of(8 if on == "sim" else 2):
        torch.accelerator.synchronize(device)
    if on == "sim":
        torch.sim.set_links(None)
        torch.sim.set_clock("wall")
        for k in range(8):
            torch.sim.set_speed(k)


@pytest.fixture(params=[(2**25, 2**20, 0), (4096, 4, 0), (4096, 4, 4096), (1, 4, 2**20)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one bucket and piece; in several, also the last apart; each tensor alone and apart."""
    monkeypatch.setattr(packing, "MOST_BYTES", request.param[2])
    monkeypatch.setattr(staging, "LEAST_BYTES", 0)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", request.param[0])
    monkeypatch.setattr(pipeline, "LEAST_BYTES", request.param[1])
    monkeypatch.setattr(relay, "PIECE_BYTES", max(512, request.param[1]))


@pytest.fixture(params=["chain", "relay"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether devices have access to each other's memory."""
    monkeypatch.setattr(pipeline, "have_access", lambda *_: request.param == "chain")
    return str(request.param)


def tensors_on(device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


class Copies:
    """Tensors on the first of some devices, and memory for copies on each other entry."""

    def __init__(self, places: Sequence[int]) -> None:
        every = devices_of(max(places) + 1)
        self.devices = [every[k] for k in places]
        self.sources = tensors_on(self.devices[0], 0)
        self.bundle = Packing(self.sources)
        self.memory = [self.bundle.memory(self.sources, device) for device in self.devices[1:]]

    def write(self, seed: int) -> None:
        for source, new in zip(self.sources, tensors_on(self.devices[0], seed), strict=True):
            source.copy_(new)

    def send(self, left_out: Sequence[int] = ()) -> None:
        rows = [packed for k, (packed, _) in enumerate(self.memory) if k not in left_out]
        self.bundle.send(self.sources, list(zip(*rows, strict=True)), joined=True)

    def check(self, seed: int, left_out: Sequence[int] = ()) -> None:
        for k, (_, tensors) in enumerate(self.memory):
            if k not in left_out:
                for own, right in zip(tensors, tensors_on(torch.device("cpu"), seed), strict=True):
                    assert torch.equal(own.cpu(), right)


@pytest.mark.usefixtures("sizes", "way")
@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2, 3), (2, 0, 1), (0, 1, 1, 2, 2), (1, 0, 2, 0)])
def test_all_that_is_sent_arrives_and_nothing_that_is_in_use_is_written_to(
    places: tuple[int, ...],
) -> None:
    copies = Copies(places)
    for seed in (1, 2, 3):
        copies.write(seed)
        copies.send()
        read = [tensors[0] * 2 for _, tensors in copies.memory]
        for _, tensors in copies.memory:
            for own in tensors:
                own.mul_(2)  # as an embedding of limited norm does, in a forward
        right = tensors_on(torch.device("cpu"), seed)[0]
        for own in read:
            assert torch.equal(own.cpu(), 2 * right)
    copies.write(4)
    copies.send()
    copies.check(4)


@pytest.mark.usefixtures("sizes", "way")
def test_chains_of_some_devices_only() -> None:
    """Each next one writes to what the one before may still be passing on."""
    copies = Copies((0, 1, 2, 3))
    for seed, left_out in enumerate([(), (0,), (1,), (2,), (0, 1), (), (1, 2)]):
        copies.write(seed)
        copies.send(left_out)
    copies.send((1, 2))
    copies.check(seed, (1, 2))
    copies.send()
    copies.check(seed)


@pytest.mark.usefixtures("sizes", "way")
def test_some_buckets_go_to_some_devices() -> None:
    copies = Copies((0, 1, 2, 3))
    for seed in range(4):
        copies.write(seed)
        rows = [
            [packed[j] for k, (packed, _) in enumerate(copies.memory) if (j + k + seed) % 3]
            for j in range(len(copies.bundle.buckets))
        ]
        copies.bundle.send(copies.sources, rows)
    copies.send()
    copies.check(seed)


@pytest.mark.usefixtures("on_side_streams", "sizes", "way")
def test_on_the_callers_streams() -> None:
    test_chains_of_some_devices_only()


def seconds_to_send(k: int, preset: str | None = None) -> float:
    """On virtual time, 25 MiB."""
    copies = [torch.ones(2**18, device="sim:0") for _ in range(25)]
    bundle = Packing(copies)
    rows = [bundle.memory(copies, torch.device("sim", i))[0] for i in range(1, k)]
    targets = list(zip(*rows, strict=True))
    bundle.send(copies, targets)  # which makes memory
    for i in range(k):
        torch.sim.synchronize(i)
    if preset is None:
        for i in range(k):
            for j in {*range(k)} - {i}:
                torch.sim.set_link(i, j, bytes_per_second=RATE, seconds=LATENCY)
    else:
        torch.sim.set_links(preset)
    torch.sim.set_clock("virtual")
    bundle.send(copies, targets)
    return float(torch.sim.elapsed())


def bound(k: int, pieces: int, piece: float, rate: float, latency: float) -> float:
    """Down a chain whose links are always busy: the last device is as many pieces behind."""
    return (pieces + k - 2) * (piece / rate + latency) + 1e-8  # of rounding


@pytest.mark.sim_only("A GPU's time is no bound.")
@pytest.mark.parametrize("k", [2, 4, 8])
def test_what_goes_out_takes_its_bytes_and_a_piece_for_each_device(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the root to each, one after another, it would take k - 1 times as long."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 5 * 2**20)
    monkeypatch.setattr(buckets, "FIRST_BYTES", 5 * 2**20)
    monkeypatch.setattr(pipeline, "LEAST_BYTES", 2**18)
    seconds = seconds_to_send(k)
    assert TOTAL / RATE < seconds <= bound(k, 40, TOTAL / 40, RATE, LATENCY)


@pytest.mark.sim_only("A GPU's time is no bound.")
@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize(("preset", "rate", "latency"), [("pcie4_peer", 26e9, 2e-6)])
def test_with_the_sizes_that_are_used(k: int, preset: str, rate: float, latency: float) -> None:
    seconds = seconds_to_send(k, preset)
    assert seconds <= bound(k, 25, pipeline.LEAST_BYTES, rate, latency)


@pytest.mark.sim_only("A GPU's time is no bound.")
@pytest.mark.parametrize("k", [3, 4, 8])
def test_without_access_all_leaves_once_and_is_read_by_all_at_once(k: int) -> None:
    """What is read of the first pieces while others leave costs nothing but one more piece."""
    seconds, pieces = seconds_to_send(k, "pcie4"), 7
    assert seconds > TOTAL / 26e9
    assert seconds <= bound(3, pieces, TOTAL / pieces + 2**20, 26e9, 7.5e-6)


@pytest.mark.sim_only("It has links that can be set.")
def test_access_follows_the_links() -> None:
    sim = [torch.device("sim", k) for k in range(3)]
    assert have_access([sim[0], sim[1]])
    assert not torch.sim.can_device_access_peer(0, 0)
    torch.sim.set_links("pcie4")
    assert not have_access([sim[0], sim[1]])
    torch.sim.set_link(0, 1, bytes_per_second=1e9)
    assert have_access([sim[0], sim[1]])
    assert not have_access([sim[1], sim[0]])
    assert not have_access(sim)
    torch.sim.set_links("nvlink4")
    assert have_access(sim)
    assert have_access([sim[1], sim[2]])


@pytest.mark.sim_only("It has links that can be set.")
@pytest.mark.parametrize("k", [2, 3, 5])
def test_devices_without_access_train_as_one_does(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_carried, carry = [], relay.Relay.carry

    def counted(self: relay.Relay, here: Tensor, targets: Sequence[Tensor]) -> list[torch.Event]:
        bytes_carried.append(here.nbytes)
        return carry(self, here, targets)

    monkeypatch.setattr(relay.Relay, "carry", counted)
    oracle = run(Classifier, 1)
    torch.sim.set_links("pcie4")
    assert_same(run(Classifier, k), oracle, atol=1e-6)
    assert bool(bytes_carried) == (k > 2)


@pytest.mark.sim_only("It has links that can be set.")
def test_a_default_device_changes_nothing() -> None:
    torch.sim.set_links("pcie4")
    copies = Copies((0, 1, 2))
    with torch.device("sim:1"):
        copies.send()
    copies.check(0)


def test_where_nothing_can_be_pinned_it_goes_down_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, asked = torch.empty, []

    def refusing(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            asked.append(args)
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(pipeline, "have_access", lambda *_: False)
    monkeypatch.setattr(torch, "empty", refusing)
    copies = Copies((0, 1, 2))
    with pytest.warns(UserWarning, match="Expected to pin.*CUDA error: out of memory"):
        copies.send()
    for seed in (1, 2, 3):
        copies.write(seed)
        copies.send()
        copies.check(seed)
    assert len(asked) == 1


@pytest.mark.usefixtures("sizes", "way")
def test_tensors_that_lie_in_the_memory_of_another() -> None:
    copies = Copies((0, 1, 2))
    flat = torch.arange(1000.0).to(copies.devices[0])
    copies.sources = [flat[3:99].view(8, 12).T, flat[99:].as_strided([4], [5]), flat[:0], flat[7]]
    copies.bundle = Packing(copies.sources)
    copies.memory = [copies.bundle.memory(copies.sources, there) for there in copies.devices[1:]]
    copies.send()
    for _, tensors in copies.memory:
        for own, source in zip(tensors, copies.sources, strict=True):
            assert torch.equal(own.cpu(), source.cpu())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.complex64])
def test_any_dtype(dtype: torch.dtype) -> None:
    devices = devices_of(4)
    sources = [torch.arange(12).reshape(3, 4).to(dtype).to(devices[0]) for _ in range(2)]
    bundle = Packing(sources)
    memory = [bundle.memory(sources, device) for device in devices[1:]]
    for _, tensors in memory:
        for tensor in tensors:
            tensor.zero_()
    bundle.send(sources, list(zip(*(packed for packed, _ in memory), strict=True)))
    for _, tensors in memory:
        for tensor, source in zip(tensors, sources, strict=True):
            assert torch.equal(tensor.cpu(), source.cpu())


class Interrupt(BaseException):
    """As Ctrl-C."""


@pytest.mark.usefixtures("sizes", "way")
def test_what_follows_an_interrupted_copy_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy = Copies((0, 1, 2, 3)), Tensor.copy_

    def interrupted(number: int) -> Callable[..., Tensor]:
        calls = count()

        def copy_until(*args: Any, **kwargs: Any) -> Tensor:
            if next(calls) == number:
                raise Interrupt
            return copy(*args, **kwargs)

        return copy_until

    for number in range(12):
        copies.write(1)
        with monkeypatch.context() as patch, contextlib.suppress(Interrupt):
            patch.setattr(Tensor, "copy_", interrupted(number))
            copies.send()
        for seed in (2, 3):
            copies.write(seed)
            copies.send()
            copies.check(seed)


@pytest.mark.slow
@pytest.mark.sim_only("A GPU's time is no bound.")
def test_sixteen_devices() -> None:
    code = (
        "from lightning_dp import sim; sim.enable(16)\n"
        "import test_pipeline as here\n"
        "most = here.bound(16, 25, 2**20, here.RATE, here.LATENCY)\n"
        "print(here.seconds_to_send(16) <= most)"
    )
    path = [str(Path(__file__).parent), *sys.path]
    script = f"import sys; sys.path[:0] = {path!r}\n{code}"
    command = [sys.executable, "-c", script]
    there = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert there.stdout.split() == ["True"], there.stderr
