"""Gathering what was scattered gives the batch, whatever DataLoaders put into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nested_batches import MAKERS, assert_equal, batches, devices_in
from support.oracle import devices_of
from torch import Tensor

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter.batch_size import infer_batch_size
from lightning_dp.parallel.scatter.shards import scatter

pytestmark = pytest.mark.usefixtures("on")


def all_sizes(n: int) -> st.SearchStrategy[list[int]]:
    """Sizes of up to 5 shards that sum to n; zeros too."""
    cuts = st.lists(st.integers(0, n), max_size=4).map(sorted)
    return cuts.map(lambda c: [b - a for a, b in zip([0, *c], [*c, n], strict=True)])


def assert_on(shards: list[Any], devices: list[torch.device], sizes: list[int]) -> None:
    """Every shard's tensors lie on its device; without samples there is no shard."""
    for shard, device, size in zip(shards, devices, sizes, strict=True):
        assert devices_in(shard) <= {device}
        assert (shard is None) == (size == 0)


@settings(max_examples=25)  # below, every container by itself
@given(st.data(), st.integers(1, 9))
def test_gathering_what_was_scattered_gives_the_batch(data: st.DataObject, n: int) -> None:
    batch, sizes = data.draw(batches(n)), data.draw(all_sizes(n))
    devices = devices_of(len(sizes))
    assert infer_batch_size(batch, 0).size == n
    shards = scatter(batch, devices, sizes)
    assert_on(shards, devices, sizes)
    output_device = data.draw(st.sampled_from([*devices, torch.device("cpu")]))
    result = gather(shards, output_device, sizes=sizes)
    assert devices_in(result) == {output_device}
    assert_equal(result, batch)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("sizes", [[2, 0, 4, 1], [1] * 7])
def test_every_container_by_itself(name: str, sizes: list[int]) -> None:
    batch = {"only": MAKERS[name](7)}
    devices = devices_of(len(sizes))
    shards = scatter(batch, devices, sizes)
    assert_on(shards, devices, sizes)
    assert_equal(gather(shards, devices[0], sizes=sizes), batch)


@settings(max_examples=25)
@given(st.data(), st.integers(2, 6), st.sampled_from([1, -1, 2]))
def test_tensors_along_another_dim(data: st.DataObject, n: int, dim: int) -> None:
    shape = {1: (9, n), -1: (9, 8, n), 2: (9, 8, n)}[dim]
    batch = {"x": torch.randn(shape), "y": [torch.randn(shape), "text", torch.randn(7)[:0].sum()]}
    sizes = data.draw(all_sizes(n))
    devices = devices_of(len(sizes))
    shards = scatter(batch, devices, sizes, dim)
    assert [s["x"].size(dim) for s in shards if s is not None] == [size for size in sizes if size]
    result: dict[str, Tensor] = gather(shards, devices[0], dim, sizes=sizes)
    assert_equal(result, batch)
