"""Parameters go down the chain of devices and sums of gradients come up, on strict devices.

Strict simulated devices raise where nothing orders two accesses to the same memory.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from support.device_kinds import on_separate
from support.oracle import devices_of
from torch import Tensor

from lightning_dp.parallel.comm import Packing, buckets, chain, wait_for_copies

SHAPES = [(64, 32), (32,), (8, 3, 4, 4), (16, 16), (), (0,)]
RATE, LATENCY = 1e9, 1e-6  # of each link, in bytes per second and seconds
TOTAL = 25 * 2**20
PLACES = [(0, 1), (2, 0, 1, 3), (0, 1, 1, 2, 2), (1, 0, 2, 0)]
"""The devices of replicas, by their positions; the root is the first."""

pytestmark = on_separate
sees_races = pytest.mark.sim_only("A GPU does not say that nothing orders two accesses.")
times_links = pytest.mark.sim_only("A GPU's time is no bound.")


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


@pytest.fixture(params=[(2**22, 2**20, 2**25), (4096, 256, 2**25), (4096, 512, 4096), (1, 512, 1)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one bucket; in several pieces; with one buffer; each tensor alone, with one buffer."""
    bucket, piece, pool = request.param
    for name in ("BUCKET_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(buckets, name, bucket)
    monkeypatch.setattr(chain, "PIECE_BYTES", piece)
    monkeypatch.setattr(chain, "SLICE_BYTES", max(piece, 64))
    monkeypatch.setattr(chain, "POOL_BYTES", pool)


def tensors_on(device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


class Copies:
    """Tensors on the first of some devices, and memory for copies on each other entry."""

    def __init__(self, places: Sequence[int]) -> None:
        every = devices_of(max(places) + 1)
        self.devices = [every[k] for k in places]
        self.sources = tensors_on(self.devices[0], 0)
        self.packing = Packing(self.sources)
        self.memory = [self.packing.memory(self.sources, device) for device in self.devices[1:]]

    def write(self, seed: int) -> None:
        for source, new in zip(self.sources, tensors_on(self.devices[0], seed), strict=True):
            source.copy_(new)

    def send(self, left_out: Sequence[int] = ()) -> None:
        rows = [packed for k, (packed, _) in enumerate(self.memory) if k not in left_out]
        self.packing.send(self.sources, list(zip(*rows, strict=True)))

    def check(self, seed: int, left_out: Sequence[int] = ()) -> None:
        for k, (_, tensors) in enumerate(self.memory):
            if k not in left_out:
                for own, right in zip(tensors, tensors_on(torch.device("cpu"), seed), strict=True):
                    assert torch.equal(own.cpu(), right)


def add_up(packing: Packing, rows: Sequence[Sequence[Tensor]]) -> None:
    """Adds the rows of all replicas to the first one."""
    devices = list(dict.fromkeys(row[0].device for row in rows))
    assert packing.sums.prepare(devices)
    for j, bucket in enumerate(packing.buckets):
        own = [bucket.of(row) for row in rows]
        assert all(packing.sums.is_whole(row, j) for row in own)
        packing.sums.send(j, own)
    wait_for_copies(devices)


# Parameters


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("places", PLACES)
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


@pytest.mark.usefixtures("sizes")
def test_chains_of_some_devices_only() -> None:
    """Each next one writes to what the one before may still be passing on."""
    copies = Copies((0, 1, 2, 3))
    for seed, left_out in enumerate([(), (0,), (1,), (2,), (0, 1), (), (1, 2)]):
        copies.write(seed)
        copies.send(left_out)
    copies.check(seed, (1, 2))
    rows = [
        [packed[j] for k, (packed, _) in enumerate(copies.memory) if (j + k) % 3]
        for j in range(len(copies.packing.buckets))
    ]
    copies.packing.send(copies.sources, rows)
    copies.send()
    copies.check(seed)


@pytest.mark.usefixtures("on_side_streams", "sizes")
def test_on_the_callers_streams() -> None:
    test_chains_of_some_devices_only()


@pytest.mark.usefixtures("sizes")
def test_tensors_that_lie_in_the_memory_of_another() -> None:
    copies = Copies((0, 1, 2))
    flat = torch.arange(1000.0).to(copies.devices[0])
    copies.sources = [flat[3:99].view(8, 12).T, flat[99:].as_strided([4], [5]), flat[:0], flat[7]]
    copies.packing = Packing(copies.sources)
    copies.memory = [copies.packing.memory(copies.sources, there) for there in copies.devices[1:]]
    copies.send()
    for _, tensors in copies.memory:
        for own, source in zip(tensors, copies.sources, strict=True):
            assert torch.equal(own.cpu(), source.cpu())


def test_after_an_error_in_the_middle_all_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way is waited for: what is written next races with nothing."""
    copies = Copies((0, 1, 2))

    def fails(*_: object) -> None:
        raise ValueError("on the way")

    with monkeypatch.context() as patch:
        patch.setattr(chain.Pool, "free", fails)
        with pytest.raises(ValueError, match="on the way"):
            copies.send()
    copies.write(1)
    copies.send()
    copies.check(1)


def seconds_to_send(k: int, preset: str | None = None) -> float:
    """On virtual time, 25 MiB."""
    copies = [torch.ones(2**18, device="sim:0") for _ in range(25)]
    packing = Packing(copies)
    rows = [packing.memory(copies, torch.device("sim", i))[0] for i in range(1, k)]
    targets = list(zip(*rows, strict=True))
    packing.send(copies, targets)  # which makes memory
    for i in range(k):
        torch.sim.synchronize(i)
    if preset is None:
        for i, j in itertools.permutations(range(k), 2):
            torch.sim.set_link(i, j, bytes_per_second=RATE, seconds=LATENCY)
    else:
        torch.sim.set_links(preset)
    torch.sim.set_clock("virtual")
    packing.send(copies, targets)
    return float(torch.sim.elapsed())


@times_links
@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize(
    ("preset", "rate", "latency"), [(None, RATE, LATENCY), ("pcie4_peer", 26e9, 2e-6)]
)
def test_what_goes_out_takes_its_bytes_and_a_piece_for_each_device(
    k: int, preset: str | None, rate: float, latency: float
) -> None:
    """From the root to each, one after another, it would take k - 1 times as long."""
    seconds = seconds_to_send(k, preset)
    pieces = 25
    assert TOTAL / rate < seconds <= (pieces + k - 2) * (2**20 / rate + latency) + 1e-8


# Sums of gradients


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("places", [*PLACES, (0, 0, 1)])
def test_sums_and_parameters_share_buffers_in_order(places: tuple[int, ...]) -> None:
    """Also others get their memory, when the packing is gone."""
    devices = [devices_of(4)[k] for k in places]
    for _ in range(2):
        sums, *terms = [tensors_on(device, k) for k, device in enumerate(devices)]
        packing = Packing(sums)
        away = [device for device in devices if device != devices[0]]
        memory = [packing.memory(sums, device) for device in away]
        rows = [[t.cpu() for t in row] for row in zip(sums, *terms, strict=True)]
        for _ in range(3):  # the host waits for nothing
            add_up(packing, [sums, *terms])
            packing.send(sums, list(zip(*(packed for packed, _ in memory), strict=True)))
        for _, tensors in memory:
            for own, (first, *others) in zip(tensors, rows, strict=True):
                torch.testing.assert_close(own.cpu(), first + 3 * sum(others))
        packing.send(sums, list(zip(*(packed for packed, _ in memory), strict=True)))
        del packing, memory
        gc.collect()
        for device in devices:
            for n in (1, 100, 10_000):
                torch.ones(n, device=device)


@pytest.mark.parametrize("k", [3])
def test_terms_may_lie_otherwise_than_the_sum(k: int) -> None:
    root, *others = devices_of(k)
    shape = (2, 3, 4, 4)
    for formats in itertools.permutations([torch.channels_last, torch.contiguous_format]):
        sums, *terms = [
            [torch.randn(shape).contiguous(memory_format=own).to(device)]
            for own, device in zip([formats[0]] + [formats[1]] * k, [root, *others], strict=False)
        ]
        right = sum(row[0].cpu() for row in (sums, *terms))
        add_up(Packing(sums), [sums, *terms])
        torch.testing.assert_close(sums[0].cpu(), right)


def test_slices_of_a_large_tensor_need_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "SLICE_BYTES", 2**12)
    devices, shape = devices_of(3), (8, 16, 16, 16)
    packing = Packing([torch.zeros(shape, device=devices[0])])
    assert len(packing.sums.pieces[0]) == 32
    rows = [[torch.randn(shape).to(device)] for device in devices]
    right = sum(row[0].cpu() for row in rows)
    add_up(packing, rows)
    torch.testing.assert_close(rows[0][0].cpu(), right)
    other = torch.randn(shape, device=devices[1]).to(memory_format=torch.channels_last)
    assert not packing.sums.is_whole([other], 0)


def test_gradients_that_are_conjugates_of_what_lies_in_memory() -> None:
    """Torch conjugates and negates when it reads: a copy of the memory would not have it."""
    root, other = devices_of(2)
    values = torch.complex(*torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    term = values.to(other).conj()
    sums = [torch.zeros(3, 4, dtype=values.dtype, device=root), torch.zeros(3, 4, device=root)]
    assert term.is_conj() and term.imag.is_neg()
    add_up(Packing(sums), [sums, [term, term.imag]])
    assert torch.equal(sums[0].cpu(), values.conj()) and torch.equal(sums[1].cpu(), -values.imag)


@sees_races
@pytest.mark.usefixtures("sizes")
def test_sums_start_when_their_events_have_come() -> None:
    """Not when the current streams are through with what came after."""
    devices = devices_of(3)
    rows = [tensors_on(device, k) for k, device in enumerate(devices)]
    right = [sum(t.cpu() for t in own) for own in zip(*rows, strict=True)]
    packing = Packing(rows[0])
    packing.sums.prepare(devices)
    ready = [torch.accelerator.current_stream(device).record_event() for device in devices]
    for j, bucket in enumerate(packing.buckets):
        packing.sums.send(j, [bucket.of(row) for row in rows], ready)
    with pytest.raises(torch.sim.RaceError):
        rows[0][0] + 1
    wait_for_copies(devices)
    for total, own in zip(rows[0], right, strict=True):
        torch.testing.assert_close(total.cpu(), own)


def test_buffers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUCKET_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(buckets, name, 2**12)
    monkeypatch.setattr(chain, "POOL_BYTES", 2**14)
    devices = devices_of(2)
    packing = Packing([torch.zeros(2**8, device=devices[0]) for _ in range(64)])
    packing.sums.prepare(devices)
    memory = [p.flat.untyped_storage() for pool in packing.sums.pools.values() for p in pool.packed]
    assert sum({own.data_ptr(): own.nbytes() for own in memory}.values()) <= 2 * 2**14
