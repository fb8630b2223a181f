"""Weights and gradients travel on streams of their own: devices wait for them, not for each other.

Whether a stream waits for something shows in what may be read there: strict simulated devices
refuse what nothing orders.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from interrupts import Tracer
from oracle import devices_of
from places import on_separate
from torch import Tensor

from lightning_dp.parallel.contexts import Surroundings
from lightning_dp.parallel.links import (
    Packing,
    on_streams,
    packing,
    pipeline,
    side_streams,
    summing,
)
from lightning_dp.parallel.links.lanes import lane

SHAPES = [(64, 32), (32,), (8, 3, 4, 4), (16, 16), ()]


pytestmark = on_separate
sees_races = pytest.mark.sim_only("A GPU does not say that nothing orders two accesses.")


@pytest.fixture(autouse=True)
def nothing_is_under_way(on: str) -> Iterator[None]:
    yield
    for device in devices_of(4):
        torch.accelerator.synchronize(device)


@pytest.fixture(params=[2**25, 4096, 1])
def bucket_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors in one bucket, in several, or each in one."""
    monkeypatch.setattr(packing, "BUCKET_BYTES", request.param)


@pytest.fixture(params=[True, False])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether devices have access to each other's memory."""
    monkeypatch.setattr(pipeline, "have_access", lambda *_: request.param)


def tensors_on(device: torch.device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


def main(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def has_waited(stream: torch.Stream, for_: Tensor) -> bool:
    """Whether what a stream gets from here on comes after what has written a tensor."""
    probe = torch.Stream(for_.device)
    probe.wait_stream(stream)
    with torch.sim.stream(probe):
        try:
            for_ + 1
        except torch.sim.RaceError:
            return False
    return True


def work(device: torch.device) -> Tensor:
    """What a device is at."""
    return torch.ones(1000, device=device)


@sees_races
def test_who_sends_weights_does_not_wait_for_what_the_others_do() -> None:
    root, *others = devices_of(3)
    sources = tensors_on(root)
    bundle = Packing(sources)
    memory = [bundle.memory(sources, device) for device in others]
    busy = [work(device) for device in others]
    bundle.send(sources, list(zip(*(packed for packed, _ in memory), strict=True)))
    for own in busy:
        assert not has_waited(main(root), own)
    for _, tensors in memory:
        for own, source in zip(tensors, sources, strict=True):
            assert torch.equal(own.cpu(), source.cpu())


@sees_races
def test_who_sends_weights_goes_on_at_once() -> None:
    root, other = devices_of(2)
    sources = tensors_on(root)
    bundle = Packing(sources)
    packed, _ = bundle.memory(sources, other)
    bundle.send(sources, [[there] for there in packed])
    assert not has_waited(main(root), packed[0].flat)
    assert has_waited(main(other), packed[0].flat)


@sees_races
def test_gradients_do_not_wait_for_what_the_root_does() -> None:
    """A bucket of two devices: a third one's would wait until those are added."""
    root, *others = devices_of(3)
    sums, *terms = [tensors_on(device, k) for k, device in enumerate((root, *others))]
    bundle = Packing(sums)
    bundle.sums.add(tensors_on(root), terms)  # an earlier step, which takes memory
    expected = [sum(t.cpu() for t in row) for row in zip(sums, *terms, strict=True)]
    busy = work(root)
    bundle.sums.add(sums, terms)
    for device in others:
        assert not has_waited(main(device), busy)
        assert not has_waited(lane(device, root)._there, busy)
    assert has_waited(main(root), sums[0])
    for total, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(total.cpu(), right)


@pytest.mark.usefixtures("access", "bucket_bytes")
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 1, 1), (0, 0, 1)])
def test_memory_of_the_way_is_used_again_in_order(places: tuple[int, ...]) -> None:
    """Also by others, when the bundle is gone."""
    devices = [devices_of(4)[k] for k in places]
    for _ in range(3):
        sums, *terms = [tensors_on(device, k) for k, device in enumerate(devices)]
        bundle = Packing(sums)
        away = [device for device in devices if device != devices[0]]
        memory = [bundle.memory(sums, device) for device in away]
        rows = [[t.cpu() for t in row] for row in zip(sums, *terms, strict=True)]
        for _ in range(3):  # and the host waits for nothing
            bundle.sums.add(sums, terms)
            bundle.send(sums, list(zip(*(packed for packed, _ in memory), strict=True)))
        for _, tensors in memory:
            for own, (first, *others) in zip(tensors, rows, strict=True):
                torch.testing.assert_close(own.cpu(), first + 3 * sum(others))
        bundle.send(sums, list(zip(*(packed for packed, _ in memory), strict=True)))
        del bundle, memory
        for device in devices:
            for n in (1, 100, 10_000):
                torch.ones(n, device=device)


@pytest.mark.usefixtures("bucket_bytes")
@pytest.mark.parametrize("k", [2, 3])
def test_terms_may_lie_otherwise_than_the_sum(k: int) -> None:
    root, *others = devices_of(k)
    shape = (2, 3, 4, 4)
    for formats in itertools.permutations([torch.channels_last, torch.contiguous_format]):
        sums, *terms = [
            [torch.randn(shape).contiguous(memory_format=own).to(device)]
            for own, device in zip([formats[0]] + [formats[1]] * k, [root, *others], strict=False)
        ]
        right = sum(row[0].cpu() for row in (sums, *terms))
        Packing(sums).sums.add(sums, terms)
        torch.testing.assert_close(sums[0].cpu(), right)


def test_pieces_become_smaller_when_the_chain_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors, too, that lie otherwise than their pieces would."""
    monkeypatch.setattr(packing, "BUCKET_BYTES", 2**17)
    monkeypatch.setattr(summing, "piece_bytes", lambda size, links, direct: size // links)
    devices, shape = devices_of(4), (8, 16, 16, 16)
    bundle = Packing([torch.zeros(shape, device=devices[0])])
    for k in (2, 4, 3):
        for own in (torch.channels_last, torch.contiguous_format):
            terms = [[torch.randn(shape).to(device, memory_format=own)] for device in devices[1:k]]
            total = torch.zeros(shape, device=devices[0])
            done = bundle.sums.add([total], terms)
            right = sum(row[0].cpu() for row in terms) if done else torch.zeros(shape)
            torch.testing.assert_close(total.cpu(), right)
            assert done or own is torch.channels_last


@sees_races
def test_memory_of_sums_goes_to_others_when_these_are_there() -> None:
    """Also where the sums are made on streams of which the current ones know nothing."""
    devices = devices_of(3)
    sums, *terms = [tensors_on(device, k) for k, device in enumerate(devices)]
    bundle = Packing(sums)
    assert bundle.sums.prepare(devices)
    ways = [torch.Stream(device) for device in devices]
    for way in ways:
        way.wait_stream(main(way.device))
    with on_streams(ways):
        bundle.sums.add(sums, terms)
    size = bundle.buckets[0].bytes
    del bundle
    gc.collect()
    for device in devices:
        torch.ones(size, dtype=torch.uint8, device=device)


class Traffic:
    """Weights that go out to two devices, and gradients that come back."""

    def __init__(self) -> None:
        self.root, *others = devices_of(3)
        self.sources = tensors_on(self.root)
        self.bundle = Packing(self.sources)
        self.memory = [self.bundle.memory(self.sources, device) for device in others]

    def run(self) -> list[Tensor]:
        self.bundle.send(self.sources, list(zip(*(p for p, _ in self.memory), strict=True)))
        sums = [torch.zeros_like(source) for source in self.sources]
        self.bundle.sums.add(sums, [tensors for _, tensors in self.memory])
        return [total.cpu() for total in sums]


@pytest.mark.usefixtures("access", "bucket_bytes")
@pytest.mark.parametrize("goes", [True, False])
def test_an_interrupt_at_any_line_leaves_no_race(goes: bool) -> None:
    """Neither where all goes and others get its memory, nor where the next step goes on with it."""
    own = side_streams(devices_of(3))
    tracer = Tracer()
    right = tracer.run(Traffic().run)
    for line, visits in tracer.visits.items():
        for nth in sorted({1, visits}):
            traffic = Traffic()
            with contextlib.suppress(KeyboardInterrupt), Surroundings():  # as in every step
                Tracer(line, nth).run(traffic.run)
            assert side_streams(devices_of(3)) == own, line
            if goes:
                del traffic
                gc.collect()
                traffic = Traffic()
            for got, sum_ in zip(traffic.run(), right, strict=True):
                assert torch.equal(got, sum_), line


@pytest.mark.usefixtures("on_side_streams", "access", "bucket_bytes")
def test_lanes_follow_the_callers_streams() -> None:
    test_memory_of_the_way_is_used_again_in_order((0, 1, 2, 3))
