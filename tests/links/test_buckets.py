"""Which tensors share a bucket, and in which pieces a bucket passes from device to device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp.parallel.links import Packing, buckets, summing
from lightning_dp.parallel.links.routes import piece_bytes

KIB = 2**10


def tensors(*kib: int) -> list[Tensor]:
    return [torch.empty(n * KIB // 4, device="meta") for n in kib]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64 * KIB)
    monkeypatch.setattr(summing, "piece_bytes", lambda size, links, direct: size // 8)


def positions(found: list[Tensor]) -> list[set[int]]:
    return [bucket.positions for bucket in Packing(found).buckets]


def pieces(found: list[Tensor]) -> list[list[int]]:
    """The KiB of each piece of each bucket."""
    sums = Packing(found).sums
    return [[piece.bucket.bytes // KIB for piece in own] for own in sums._pieces]


@pytest.mark.usefixtures("small")
def test_a_tensor_that_fills_a_bucket_leaves_an_open_one_open() -> None:
    assert positions(tensors(64, 1, 100, 1, 64, 1)) == [{0}, {1, 3, 5}, {2}, {4}]


@pytest.mark.usefixtures("small")
@given(st.lists(st.integers(1, 150), max_size=20))
def test_each_tensor_is_in_one_bucket_and_none_is_too_full(kib: list[int]) -> None:
    found = positions(tensors(*kib))
    assert sorted(i for own in found for i in own) == [*range(len(kib))]
    assert all(len(own) == 1 or sum(kib[i] for i in own) <= 64 for own in found)


@pytest.mark.usefixtures("small")
@given(st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=20))
def test_blocks_are_all_buckets_in_a_row_the_first_one_alone(kinds: list[tuple[int, bool]]) -> None:
    dtypes = [torch.float32 if is_float else torch.int32 for _, is_float in kinds]
    own = [t.to(dtype) for t, dtype in zip(tensors(*(n for n, _ in kinds)), dtypes, strict=True)]
    found = Packing(own).buckets
    held = [[found[j] for j in block] for block in buckets.blocks(found)]
    assert [bucket for block in held for bucket in block] == found
    assert all(len({bucket.dtype for bucket in block}) == 1 for block in held)
    assert all(len(b) == 1 or sum(bucket.bytes for bucket in b) <= 256 * KIB for b in held)
    assert not held or len(held[0]) == 1


@pytest.mark.usefixtures("small")
def test_the_pieces_of_the_first_bucket_are_the_smallest() -> None:
    """It leaves last: the step waits until its last piece has passed every device."""
    assert pieces(tensors(64, 64, 128)) == [[8] * 8, [64], [64, 64]]
    assert pieces(tensors(20, 64)) == [[8, 8, 4], [20, 20, 20, 4]]


@pytest.mark.usefixtures("small")
@given(st.lists(st.integers(1, 150), max_size=20))
def test_pieces_are_all_of_a_bucket_and_no_larger_than_what_comes_before(kib: list[int]) -> None:
    before = 0
    for own in pieces(tensors(*kib)):
        assert len(own) == 1 or max(own) <= max(8, min(64, before))
        before += sum(own)
    assert before >= sum(kib)


@given(st.integers(1, 2**24), st.integers(1, 15), st.sampled_from([(True, 2e-6), (False, 15e-6)]))
def test_pieces_pass_links_as_soon_as_any_of_up_to_eight_would(
    size: int, links: int, way: tuple[bool, float]
) -> None:
    direct, seconds = way

    def passed(pieces: float) -> float:
        return (pieces + links - 1) * (seconds + size / pieces / 26e9)

    own = passed(size / piece_bytes(size, links, direct=direct))
    assert own <= 1.01 * min(map(passed, range(1, 9)))
