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
    buckets,
    on_streams,
    packing,
    pipeline,
    side_streams,
    staging,
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
    """All tensors in one bucket, in several, or each in one; the last of several are apart."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", request.param)
    monkeypatch.setattr(packing, "MOST_BYTES", 3000 if request.param == 4096 else 0)
    monkeypatch.setattr(staging, "LEAST_BYTES", 0)


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
def test_who_sends_weights_waits_for_those_that_leave_from_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others, which come last, are packed apart."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(packing, "MOST_BYTES", 2048)
    monkeypatch.setattr(staging, "LEAST_BYTES", 0)
    root, other = devices_of(2)
    sources = tensors_on(root)
    bundle = Packing(sources)
    there, _ = bundle.memory(sources, other)
    bundle.send(sources, [[packed] for packed in there])
    goes_on_after = [has_waited(main(root), packed.flat) for packed in there]
    assert goes_on_after == [True, True, True, False, False]


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
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2**17)
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


@pytest.mark.usefixtures("bucket_bytes")
@pytest.mark.parametrize("places", [(0, 1), (0, 1, 1), (0, 1, 2)])
def test_what_was_added_or_sent_may_be_written_again(places: tuple[int, ...]) -> None:
    """As `zero_grad(set_to_none=False)` does, or an optimizer: also what left without packing."""
    every = devices_of(3)
    sums, *terms = [tensors_on(every[place], k) for k, place in enumerate(places)]
    expected = [sum(t.cpu() for t in row) for row in zip(sums, *terms, strict=True)]
    bundle = Packing(sums)
    bundle.sums.add(sums, terms)
    for term in itertools.chain(*terms):
        term.zero_()
    for total, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(total.cpu(), right)
    packed, there = bundle.memory(sums, every[1])
    bundle.send(sums, [[own] for own in packed])
    for total in sums:
        total.zero_()
    for copy, right in zip(there, expected, strict=True):
        torch.testing.assert_close(copy.cpu(), right)


def test_gradients_that_are_conjugates_of_what_lies_in_memory() -> None:
    """Torch conjugates and negates when it reads: a copy of the memory would not have it."""
    root, other = devices_of(2)
    values = torch.complex(*torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    term = values.to(other).conj()
    sums = [torch.zeros(3, 4, dtype=values.dtype, device=root), torch.zeros(3, 4, device=root)]
    assert term.is_conj() and term.imag.is_neg()
    bundle = Packing(sums)
    bundle.sums.add(sums, [[term, term.imag]])
    assert torch.equal(sums[0].cpu(), values.conj()) and torch.equal(sums[1].cpu(), -values.imag)


class Traffic:
    """Weights that go out to other devices, and gradients that come back."""

    def __init__(self, k: int = 3) -> None:
        self.root, *others = devices_of(k)
        self.sources = tensors_on(self.root)
        self.bundle = Packing(self.sources)
        self.memory = [self.bundle.memory(self.sources, device) for device in others]

    def send(self) -> None:
        rows = [packed for packed, _ in self.memory]
        self.bundle.send(self.sources, list(zip(*rows, strict=True)), joined=True)

    def run(self) -> list[Tensor]:
        self.send()
        sums = [torch.zeros_like(source) for source in self.sources]
        self.bundle.sums.add(sums, [tensors for _, tensors in self.memory])
        return [total.cpu() for total in sums]


@pytest.mark.usefixtures("access", "bucket_bytes")
@pytest.mark.parametrize("first", [0, 1])
def test_who_has_passed_weights_on_may_write_to_its_own(first: int) -> None:
    traffic = Traffic()
    traffic.send()
    own, other = (tensors for _, tensors in (traffic.memory[first], traffic.memory[1 - first]))
    for tensor in own:
        tensor.zero_()
    for tensor, source in zip(other, traffic.sources, strict=True):
        torch.testing.assert_close(tensor.cpu(), source.cpu())


@pytest.mark.slow
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


@sees_races
@pytest.mark.usefixtures("access", "bucket_bytes")
@pytest.mark.parametrize("k", [2, 3])
def test_after_an_interrupt_who_has_sent_may_write_to_what_was_leaving(k: int) -> None:
    tracer = Tracer()
    tracer.run(Traffic(k).send)
    for line, visits in tracer.visits.items():
        for nth in sorted({1, visits}):
            traffic = Traffic(k)
            with contextlib.suppress(KeyboardInterrupt), Surroundings():
                Tracer(line, nth).run(traffic.send)
            for source in traffic.sources:
                source.mul_(2)


@sees_races
@pytest.mark.parametrize("places", [((2,), (1,)), ((1, 2), (2,)), ((2,), (1, 2))])
def test_tensors_in_the_same_memory_go_to_different_devices(
    places: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    root, *others = devices_of(3)
    source = torch.arange(6.0).to(root)
    bundle = Packing([source, source.detach()])
    memory = {k: bundle.memory([source, source], others[k - 1]) for k in (1, 2)}
    targets = [[memory[k][0][j] for k in own] for j, own in enumerate(places)]
    bundle.send([source, source.detach()], targets)
    source.mul_(2)
    for j, own in enumerate(places):
        for k in own:
            assert torch.equal(memory[k][1][j].cpu(), torch.arange(6.0))


@pytest.mark.usefixtures("on_side_streams", "access", "bucket_bytes")
def test_lanes_follow_the_callers_streams() -> None:
    test_memory_of_the_way_is_used_again_in_order((0, 1, 2, 3))
