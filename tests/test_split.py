"""Splitting is arithmetic: laws for every number of samples and devices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.parallel.split import chunk, even, split_policy, weighted

counts = st.integers(0, 500)
ks = st.integers(1, 12)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any)


@given(counts, ks)
def test_even_sizes_sum_to_the_batch_and_differ_by_at_most_one(n: int, k: int) -> None:
    sizes = even(n, k)
    assert len(sizes) == k and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(counts, ks)
def test_chunk_cuts_as_torch_chunk_does(n: int, k: int) -> None:
    sizes = chunk(n, k)
    parts = [len(part) for part in torch.empty(n).chunk(k)] if n else []
    assert sizes == tuple(parts + [0] * (k - len(parts)))


@given(counts, weights)
def test_weighted_sizes_are_their_quotas_rounded(n: int, shares: list[float]) -> None:
    sizes = weighted(n, shares)
    assert sum(sizes) == n
    for size, share in zip(sizes, shares, strict=True):
        quota = n * share / math.fsum(shares)
        assert math.floor(quota - 1e-6) <= size <= math.ceil(quota + 1e-6)
        assert size == 0 or share > 0


@given(counts, ks)
def test_equal_weights_are_the_even_split(n: int, k: int) -> None:
    assert weighted(n, [0.1] * k) == even(n, k)


@pytest.mark.parametrize(
    ("n", "k", "sizes"),
    [
        (30, 8, (4, 4, 4, 4, 4, 4, 3, 3)),
        (10, 8, (2, 2, 1, 1, 1, 1, 1, 1)),
        (2, 4, (1, 1, 0, 0)),
        (0, 2, (0, 0)),
    ],
)
def test_even_split_of_known_batches(n: int, k: int, sizes: tuple[int, ...]) -> None:
    assert even(n, k) == sizes


@pytest.mark.parametrize(
    ("split", "shares", "k", "message"),
    [
        ("banana", None, 2, "split: expected one of .*got 'banana'"),
        ("even", [1, 2], 3, "weights: expected 3 numbers, one per device, got 2"),
        ("even", [0, 0], 2, "weights: expected finite numbers of at least 0, not all 0"),
        ("even", [1, -1], 2, "weights: expected finite"),
        ("even", [1, math.nan], 2, "weights: expected finite"),
        ("even", [1, math.inf], 2, "weights: expected finite"),
        ("even", [1, "2"], 2, "weights: expected finite"),
        ("even", [True, 1], 2, "weights: expected finite"),
        ("chunk", [1, 2], 2, "weights: expected None with split='chunk'"),
    ],
)
def test_impossible_splits_are_refused(
    split: str, shares: list[float] | None, k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_policy(split, shares, k)
