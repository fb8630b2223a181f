"""Parameters go down the chain of devices and sums of gradients come up, on strict devices.

Strict simulated devices raise where nothing orders two accesses to the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.device_kinds import on_separate
from support.oracle import devices_of
from torch import Tensor

from lightning_dp.parallel.comm import Packing, buckets, chain, wait_for_copies

SHAPES = [(64, 32), (32,), (8, 3, 4, 4), (16, 16), (), (0,)]
PLACES = [(0, 1), (2, 0, 1, 3), (0, 1, 1, 2, 2), (1, 0, 2, 0)]
"""The devices of replicas, by their positions; the root is the first."""
CPU = torch.device("cpu")
KIB = 2**10

pytestmark = on_separate


@pytest.fixture(autouse=True)
def nothing_is_under_way(on: str) -> Iterator[None]:
    yield
    for device in devices_of(8 if on == "sim" else 2):
        torch.accelerator.synchronize(device)
    if on == "sim":
        torch.sim.set_links(None)
        torch.sim.set_clock("wall")


@pytest.fixture(params=[2**22, 512, 64])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one bucket; in several pieces; each tensor alone."""
    for name in ("BUCKET_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(buckets, name, request.param)


def tensors_on(device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


class Copies:
    """Tensors on the first of some devices, and memory for copies on each other entry."""

    def __init__(self, places: Sequence[int], sources: list[Tensor] | None = None) -> None:
        self.devices = [devices_of(max(places) + 1)[k] for k in places]
        self.sources = sources or tensors_on(self.devices[0], 0)
        self.packing = Packing(self.sources)
        self.memory = [self.packing.memory(self.sources, device) for device in self.devices[1:]]

    def send(self, seed: int | None = None, left_out: Sequence[int] = ()) -> None:
        """Sends the tensors; before that writes new values, those of a seed."""
        if seed is not None:
            for source, new in zip(self.sources, tensors_on(self.devices[0], seed), strict=True):
                source.copy_(new)
        rows = [packed for k, (packed, _) in enumerate(self.memory) if k not in left_out]
        self.packing.send(self.sources, list(zip(*rows, strict=True)))

    def check(self, left_out: Sequence[int] = ()) -> None:
        for k, (_, tensors) in enumerate(self.memory):
            for own, source in zip(tensors, self.sources, strict=True) if k not in left_out else ():
                assert torch.equal(own.cpu(), source.cpu())


def add_up(packing: Packing, rows: Sequence[Sequence[Tensor]]) -> None:
    """Adds the rows of all replicas to the first one; waits for the sums."""
    devices = list(dict.fromkeys(row[0].device for row in rows))
    events = [torch.accelerator.current_stream(device).record_event() for device in devices]
    for j, bucket in enumerate(packing.buckets):
        own = [bucket.of(row) for row in rows]
        assert all(map(bucket.is_whole, own))
        packing.add_up(j, own, events)
    wait_for_copies(devices)


# Which tensors share a bucket, and how they lie in it


def positions(found: list[Tensor]) -> list[set[int]]:
    return [{*bucket.positions} for bucket in Packing(found).buckets]


@given(st.lists(st.integers(1, 150), max_size=20))
def test_each_tensor_is_in_one_bucket_and_none_is_too_full(kib: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 64 * KIB)
        found = positions([torch.empty(n * KIB // 4, device="meta") for n in kib])
    assert sorted(i for own in found for i in own) == [*range(len(kib))]
    assert all(len(own) == 1 or sum(kib[i] for i in own) <= 64 for own in found)
    small = [i for i, n in enumerate(kib) if n < 64]  # a large one leaves an open bucket open
    assert len(found) - (len(kib) - len(small)) <= 1 + sum(kib[i] for i in small) // 32


def test_dtypes_and_frozen_tensors_are_apart_and_what_is_not_strided_memory_is_alone() -> None:
    trained = torch.zeros(2, requires_grad=True)
    own = [torch.zeros(2), torch.zeros(2, dtype=torch.int64), trained, torch.zeros(2)]
    assert positions(own) == [{0, 3}, {1}, {2}]
    packing = Packing([*own, torch.eye(2).to_sparse()])
    assert packing.alone == [4] and positions(own) == [{*b.order} for b in packing.buckets]
    assert packing.fits([*own, torch.eye(2).to_sparse()]) and not packing.fits([*own, own[0]])


# Parameters


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("places", PLACES)
def test_all_that_is_sent_arrives_and_nothing_that_is_in_use_is_written_to(
    places: tuple[int, ...],
) -> None:
    copies = Copies(places)
    for seed in (1, 2, 3):
        copies.send(seed)
        read = [tensors[0] * 2 for _, tensors in copies.memory]
        for own in itertools.chain.from_iterable(tensors for _, tensors in copies.memory):
            own.mul_(2)  # as an embedding of limited norm does, in a forward
        for own in read:
            assert torch.equal(own.cpu(), 2 * copies.sources[0].cpu())
    copies.send(4)
    copies.check()


@pytest.mark.usefixtures("sizes")
def test_chains_of_some_devices_only() -> None:
    """Each next one writes to what the one before may still be passing on."""
    copies = Copies((0, 1, 2, 3))
    for seed, left_out in enumerate([(), (0,), (1,), (2,), (0, 1), (), (1, 2)]):
        copies.send(seed, left_out)
    copies.check((1, 2))


@pytest.mark.usefixtures("sizes")
def test_tensors_that_lie_in_the_memory_of_another() -> None:
    flat = torch.arange(1000.0).to(devices_of(3)[0])
    views = [flat[3:99].view(8, 12).T, flat[99:].as_strided([4], [5]), flat[:0], flat[7]]
    copies = Copies((0, 1, 2), views)
    copies.send()
    copies.check()


def test_after_an_error_in_the_middle_all_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way is waited for: what is written next races with nothing."""

    def fails(*_: object) -> None:
        raise ValueError("on the way")

    copies = Copies((0, 1, 2))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="on the way"):
        patch.setattr(chain, "_give_back", fails)
        copies.send()
    copies.send(1)
    copies.check()


@pytest.mark.on("sim")  # A GPU's time is no bound.
@pytest.mark.parametrize("k", [2, 8])
def test_what_goes_out_takes_its_bytes_and_a_piece_for_each_device(k: int) -> None:
    """From the root to each device by itself, 100 MiB would take k - 1 times as long."""
    copies, rate = Copies(range(k), [torch.ones(2**20).to("sim:0")] * 25), 26e9
    size, piece = 2**22, 2**20
    copies.send()  # which makes memory
    for device in copies.devices:
        torch.sim.synchronize(device)
    torch.sim.set_links("pcie4_peer")
    torch.sim.set_clock("virtual")
    copies.send()
    assert 25 * size / rate < torch.sim.elapsed() <= (25 * size + (k - 2) * piece) / rate + 3e-4


# Sums of gradients


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("places", [*PLACES, (0, 0, 1)])
def test_sums_and_parameters_share_buffers_in_order(places: tuple[int, ...]) -> None:
    devices = [devices_of(4)[k] for k in places]
    sums, *terms = [tensors_on(device, k) for k, device in enumerate(devices)]
    packing = Packing(sums)
    memory = [packing.memory(sums, device) for device in devices if device != devices[0]]
    targets = list(zip(*(packed for packed, _ in memory), strict=True))
    rows = [[t.cpu() for t in row] for row in zip(sums, *terms, strict=True)]
    copies = [[[t.clone() for t in row] for row in terms] for _ in range(3)]  # sums are in place
    for own in copies:  # the host waits for nothing
        add_up(packing, [sums, *own])
        packing.send(sums, targets)
    for _, tensors in memory:
        for own, (first, *others) in zip(tensors, rows, strict=True):
            torch.testing.assert_close(own.cpu(), first + 3 * sum(others))
    packing.send(sums, targets)


@pytest.mark.parametrize("size", [2**22, 2**12])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_terms_may_lie_otherwise_than_the_sum(
    size: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is channels_last; the tensor passes as a whole, or in 32 pieces."""
    for name in ("BUCKET_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(buckets, name, size)
    rows = [[torch.randn(8, 16, 16, 16).to(device)] for device in devices_of(3)]
    packing = Packing(rows[0])
    rows[other][0] = rows[other][0].to(memory_format=torch.channels_last)
    right = sum(row[0].cpu() for row in rows)
    add_up(packing, rows)
    torch.testing.assert_close(rows[0][0].cpu(), right)
