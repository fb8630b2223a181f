"""What is scattered and gathered is what it was; what cannot be cut is never cut silently."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_equal_trees, devices_of
from torch import Tensor

from lightning_dp.parallel import tree
from lightning_dp.parallel.gather import GatherError, gather
from lightning_dp.parallel.scatter import BatchSizeError, batch_size, cut, scatter
from lightning_dp.parallel.split import even
from lightning_dp.parallel.transfer import to_device

pytestmark = pytest.mark.usefixtures("on")

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


def leaves(n: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2)
    tensors = shapes.map(lambda rest: torch.randn(n, *rest))
    vectors = st.just(torch.arange(n))
    names = st.just([f"name {i}" for i in range(n)])
    whole = st.sampled_from(["a string", 2.5, None, True])
    return tensors | vectors | names | whole


def batches(n: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves(n),
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.builds(Sample, inner, inner)
            | st.builds(lambda x: OrderedDict(x=x), inner)
        ),
        max_leaves=5,
    ).map(lambda tree: {"x": torch.arange(n), "rest": tree})


def root_device() -> torch.device:
    return devices_of(1)[0]


def on_root(node: Any) -> Any:
    return to_device(node, root_device())


def gathered(outputs: list[Any], sizes: list[int], **options: Any) -> Any:
    """What `gather` brings to the root of outputs that lie on one device each."""
    devices = devices_of(len(outputs))
    placed = [to_device(output, device) for output, device in zip(outputs, devices, strict=True)]
    result = gather(placed, root_device(), sizes=sizes, **options)
    assert devices_in(result) <= {root_device()}
    return result


def devices_in(node: Any) -> set[torch.device]:
    """Where the tensors of a tree are."""
    if isinstance(node, Tensor):
        return {node.device}
    return set().union(*(devices_in(child) for _, child in tree.children(node) or ()))


@settings(deadline=None)  # other work on the machine is no failure
@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_gathering_what_was_scattered_gives_the_batch(data: Any, n: int, k: int) -> None:
    batch = data.draw(batches(n))
    devices, sizes = devices_of(k), even(n, k)
    shards = scatter(batch, devices, sizes)
    expected = [{device} if size else set() for device, size in zip(devices, sizes, strict=True)]
    assert [devices_in(shard) for shard in shards] == expected
    active = [shard for shard, size in zip(shards, sizes, strict=True) if size]
    output_device = data.draw(st.sampled_from([*devices, torch.device("cpu")]))
    result = gather(active, output_device, sizes=[size for size in sizes if size])
    assert devices_in(result) == {output_device}
    assert_equal(result, batch)


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if dataclasses.is_dataclass(expected):
        actual, expected = vars(actual), vars(expected)  # type: ignore[arg-type]
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
    else:
        assert_equal_trees(actual, expected, "leaf", atol=0, rtol=0)


def test_every_leaf_is_cut_by_the_same_sizes() -> None:
    batch = UserDict(x=torch.arange(5), names=list("abcde"), nested=[{"y": torch.ones(5, 2)}])
    first, second = cut(on_root(batch), (2, 3))
    assert isinstance(first, UserDict)
    assert devices_in(first) == devices_in(second) == {root_device()}
    assert first["x"].tolist() == [0, 1] and second["x"].tolist() == [2, 3, 4]
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d", "e"]
    assert second["nested"][0]["y"].shape == (3, 2)


def test_what_has_no_samples_goes_to_every_replica() -> None:
    batch = [torch.zeros(4, 3), torch.ones(1, 3), torch.tensor(7.0), "words", 3, None]
    for shard in cut(on_root(batch), (2, 2)):
        assert shard[0].shape == (2, 3)
        assert shard[1].shape == (1, 3)
        assert shard[2:] == [torch.tensor(7.0), "words", 3, None]


def test_a_frozen_dataclass_is_cut_without_running_its_constructor_again() -> None:
    first, second = cut(on_root(Sample(torch.arange(3), ["a", "b", "c"])), (1, 2))
    assert isinstance(first, Sample)
    assert (first.label, second.label) == (["a"], ["b", "c"])


def test_two_batch_sizes_are_an_error_that_names_both_leaves() -> None:
    with pytest.raises(BatchSizeError, match=r"batch\['x'\] has 8 and batch\['more'\]\[1\] has 3"):
        batch_size(on_root({"x": torch.zeros(8), "more": [torch.zeros(8), torch.zeros(3)]}))


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(4), torch.zeros(1, 4)], 4),
        (torch.zeros(1, 2), 1),
        (["a", "b", "c"], 3),
        ([[1, 2], [3]], 2),
        ([("a", "b", "c"), ("d", "e", "f")], 3),
        ({"x": 3, "y": None}, None),
        (torch.tensor(1.0), None),
    ],
    ids=str,
)
def test_batch_size_is_found_once(batch: Any, n: int | None) -> None:
    assert batch_size(on_root(batch)) == n


def test_objects_that_may_hide_samples_are_refused() -> None:
    class Hidden:
        def to(self, device: torch.device) -> Hidden:
            return self

    with pytest.raises(TypeError, match=r"batch\['h'\] of type .*Hidden"):
        cut(on_root({"x": torch.zeros(4), "h": Hidden()}), (2, 2))


def test_sizes_must_sum_to_the_batch_size() -> None:
    with pytest.raises(BatchSizeError, match="sum to the batch size 4"):
        cut(on_root(torch.zeros(4)), (2, 1))


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
        ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
        ([torch.tensor(2), torch.tensor(1)], torch.tensor(3)),
        ([1.0, 4.0], 2.0),
        ([2, 1], 3),
        ([5, 5], 5),
        (["a", "a"], "a"),
        (["a", "b"], ["a", "b"]),
        ([None, None], None),
        ([None, torch.tensor([3])], torch.tensor([3])),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([{"x": 1, "y": 2}, {"x": 1}], {"x": 1, "y": 2}),
        ([["kept"], []], ["kept"]),
        ([torch.zeros(4, 2), torch.zeros(4, 1)], torch.zeros(4, 3)),
        ([torch.arange(4), torch.arange(4)], torch.arange(4)),
        ([torch.ones(3, 4), torch.ones(0, 4)], torch.ones(3, 4)),
        ([(torch.zeros(2, 2), None), (torch.ones(1, 2), None)], None),
    ],
    ids=str,
)
def test_gather_returns_what_one_device_would_have(outputs: list[Any], expected: Any) -> None:
    result = gathered(outputs, [2, 1])
    if expected is None and outputs[0] is not None:
        assert result[0].shape == (3, 2) and result[1] is None
    else:
        assert_equal_trees(result, expected, "result", atol=1e-12, rtol=0)


def test_arrays_are_gathered_as_tensors_are() -> None:
    outputs = [{"y": np.ones((2, 3)), "n": np.int64(2), "mean": np.float32(1)}]
    outputs.append({"y": np.zeros((1, 3)), "n": np.int64(1), "mean": np.float32(4)})
    result = gathered(outputs, [2, 1])
    assert isinstance(result["y"], np.ndarray) and result["y"].sum(1).tolist() == [3, 3, 0]
    assert result["n"] == 3 and result["mean"] == np.float32(2)


def test_one_sample_per_shard_is_still_a_sample() -> None:
    rows = [[torch.full((3,), 1.0)], [torch.full((3,), 2.0)]]
    assert [row.tolist() for row in gathered(rows, [1, 1])] == [[1.0] * 3, [2.0] * 3]
    assert gathered([("a",), ("b",)], [1, 1]) == ("a", "b")
    parts = gathered([[torch.zeros(1, 3), torch.zeros(1)]] * 2, [1, 1])
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2,)]


def test_integers_that_every_replica_was_called_with_are_no_counts() -> None:
    assert gathered([4, 4], [4, 4]) == 8
    assert gathered([4, 4], [4, 4], constants=[4]) == 4


def test_ragged_outputs_become_a_list() -> None:
    result = gathered([torch.zeros(2, 3), torch.zeros(1, 5)], [2, 1])
    assert [tuple(t.shape) for t in result] == [(2, 3), (1, 5)]


def test_parts_of_a_batch_are_told_from_one_item_per_sample() -> None:
    parts = gathered([[torch.zeros(2, 4), torch.ones(2)]] * 2, [2, 2])
    assert [tuple(t.shape) for t in parts] == [(4, 4), (4,)]
    boxes = gathered([[torch.zeros(5, 4), torch.zeros(3, 4)]] * 2, [2, 2])
    assert [len(t) for t in boxes] == [5, 3, 5, 3]


def test_outputs_of_different_structure_are_an_error_that_names_the_leaf() -> None:
    with pytest.raises(GatherError, match=r"output\['a'\]: expected the same type"):
        gathered([{"a": {"b": 1}}, {"a": (1, 2)}], [2, 1])


def test_gathering_is_differentiable() -> None:
    x: Tensor = torch.ones(5, requires_grad=True)
    weights = torch.arange(5.0)
    shards = [shard * 2 for shard in scatter(x, devices_of(3))]
    (gather(shards, root_device(), sizes=[2, 2, 1]) * on_root(weights)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == (2 * weights).tolist()
