"""Which tensors share a bucket, and how they lie in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp.parallel.comm import Packing, buckets

KIB = 2**10


def tensors(*kib: int) -> list[Tensor]:
    return [torch.empty(n * KIB // 4, device="meta") for n in kib]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64 * KIB)
    monkeypatch.setattr(buckets, "FIRST_BYTES", 16 * KIB)


def positions(found: list[Tensor]) -> list[set[int]]:
    return [{*bucket.positions} for bucket in Packing(found).buckets]


@pytest.mark.usefixtures("small")
def test_a_tensor_that_fills_a_bucket_leaves_an_open_one_open() -> None:
    assert positions(tensors(64, 1, 100, 1, 64, 1)) == [{0}, {1, 3, 5}, {2}, {4}]


@pytest.mark.usefixtures("small")
def test_the_first_bucket_is_small() -> None:
    assert positions(tensors(8, 8, 8, 40, 20)) == [{0, 1}, {2, 3}, {4}]


@pytest.mark.usefixtures("small")
@given(st.lists(st.integers(1, 150), max_size=20))
def test_each_tensor_is_in_one_bucket_and_none_is_too_full(kib: list[int]) -> None:
    found = positions(tensors(*kib))
    assert sorted(i for own in found for i in own) == [*range(len(kib))]
    assert all(len(own) == 1 or sum(kib[i] for i in own) <= 64 for own in found)


def test_dtypes_and_frozen_tensors_are_apart() -> None:
    own = [torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2)]
    own[2].requires_grad_()
    assert positions(own) == [{0, 3}, {1}, {2}]


def test_views_keep_strides_and_do_not_overlap() -> None:
    image = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    like = [image, torch.empty(3), torch.empty(5, 2).t(), torch.empty(1).expand(4)]
    packed = Packing(like).buckets[0].on(torch.device("cpu"))
    for i, view in enumerate(packed.views):
        view.fill_(i + 1)
    assert [view.unique().tolist() for view in packed.views] == [[1], [2], [3], [4]]
    strides = [view.stride() for view in packed.views]
    assert strides == [image.stride(), (1,), (1, 2), (1,)]


def test_what_is_not_strided_memory_is_alone() -> None:
    sparse = torch.eye(2).to_sparse()
    packing = Packing([torch.zeros(2), sparse, torch.zeros(3)])
    assert packing.alone == [1] and [*packing.buckets[0].order] == [0, 2]
    assert packing.fits([torch.ones(2), sparse, torch.ones(3)])
    assert not packing.fits([torch.ones(2), sparse, torch.ones(4)])
