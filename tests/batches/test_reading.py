"""What in a batch counts its samples: columns, lists of samples, or neither without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.containers import Graph, Pair, Sample, graph
from torch import Tensor, nn, zeros

from lightning_dp.parallel.scatter import BatchSizeError, cut_for, infer_batch_size, infer_for
from lightning_dp.parallel.scatter.shards import cut


def images(*heights: int) -> list[Tensor]:
    return [zeros(3, height, 8) for height in heights]


def targets(*counts: int) -> list[dict[str, Any]]:
    return [{"boxes": zeros(n, 4), "labels": zeros(n, dtype=torch.long)} for n in counts]


def with_ids(*counts: int) -> list[dict[str, Any]]:
    return [{**target, "image_id": zeros(1)} for target in targets(*counts)]


COLUMNS = {
    "tensor": (zeros(4, 2), 4),
    "x, y": ([zeros(8, 3), zeros(8)], 8),
    "x, y of two samples": ([zeros(2, 3), zeros(2, 3)], 2),
    "no samples": ([zeros(0, 3), zeros(0)], 0),
    "a row for all": ([zeros(4), zeros(1, 4)], 4),
    "names beside": ({"x": zeros(8), "name": ["a"] * 8, "classes": ["c"] * 10}, 8),
    "views and labels": ([[zeros(8, 3), zeros(8, 3)], zeros(8)], 8),
    "views and labels of one sample": ([[zeros(1, 3), zeros(1, 3)], zeros(1)], 1),
    "two loaders": ({"a": [zeros(8, 10), zeros(8, 1)], "b": [zeros(8, 10), zeros(8, 1)]}, 8),
    "one loader exhausted, two samples": ([zeros(2, 3), None], 2),
    "nested pairs exhausted": ({"a": [zeros(2, 3), zeros(2, 1)], "b": [None, None]}, 2),
    "two loaders in a list": ([[zeros(8, 3), zeros(8)], [zeros(8, 3), zeros(8)]], 8),
    "dicts of two views": ([{"x": zeros(8, 3)}, {"x": zeros(8, 3)}], 8),
    "views and a row for all": ({"views": [zeros(8, 3), zeros(8, 3)], "w": zeros(1, 3)}, 8),
    "views of two samples alone": ({"views": [zeros(2, 3), zeros(2, 3)]}, 2),
}
LISTS = {
    "detection": ((images(20, 30, 20), targets(5, 0, 2)), 3),
    "as many images as channels and boxes": ((images(9, 9, 9), targets(3, 3, 3)), 3),
    "one image, three boxes": ((images(20), targets(3)), 1),
    "images only": ({"images": images(20, 30, 20, 30), "id": [7, 8, 9, 4]}, 4),
    "columns and boxes": ({"x": zeros(8, 3), "boxes": [zeros(n, 4) for n in range(8)]}, 8),
    "columns and boxes, one each": ({"x": zeros(2, 9), "boxes": [zeros(2, 4), zeros(1, 4)]}, 2),
    "sizes of 1 inside": ((images(20, 30), with_ids(5, 2)), 2),
    "a row for all": (
        {"x": zeros(4, 3), "w": zeros(1, 3), "y": [zeros(n, 2) for n in range(4)]},
        4,
    ),
    "points and numbers": ({"points": [zeros(99, 3)] * 5, "index": list(range(5))}, 5),
    "labels of one dim": ({"x": [zeros(7), zeros(7)], "y": [1, 2]}, 2),
    "sources and targets": (([zeros(5), zeros(2), zeros(3)], [zeros(4), zeros(1), zeros(2)]), 3),
    "lists of lists": ({"x": zeros(2, 9), "y": [[zeros(5), zeros(3)], [zeros(4)]]}, 2),
    "graphs": ({"g": [graph(i) for i in range(3)], "y": zeros(3)}, 3),
    "one image and its label": ({"x": images(20), "y": zeros(1)}, 1),
    "dicts of one row": ({"x": zeros(6), "y": [{"a": zeros(1)} for _ in range(6)]}, 6),
}
SAMPLES = {
    "tuples": ([(zeros(5, 3), 1), (zeros(2, 3), 0), (zeros(3, 3), 1)], 3),
    "tuples with 0-dim labels": ([(zeros(3, 9, 9), torch.tensor(i)) for i in range(4)], 4),
    "tuples of sequences": ([(zeros(5), zeros(4)), (zeros(2), zeros(7)), (zeros(3), zeros(1))], 3),
    "dicts": ([{"x": zeros(5, 3)}, {"x": zeros(2, 3)}, {"x": zeros(3, 3)}], 3),
    "a tuple of dicts": (tuple(targets(5, 2, 3, 4)), 4),
    "named tuples": ([Pair(zeros(5), 1), Pair(zeros(2), 2)], 2),
    "dataclasses": ([Sample(zeros(5), 1), Sample(zeros(2), 2)], 2),
    "graphs": ([graph(i) for i in range(4)], 4),
}
WITHOUT_TENSORS = {
    "strings": (["a", "b", "c"], 3),
    "ragged numbers": ([[1, 2], [3]], 2),
    "columns of strings": ([("a", "b", "c"), ("d", "e", "f")], 3),
    "square columns of strings": ([("a", "b"), ("d", "e")], 2),
    "nothing to cut": ({"x": 3, "y": None}, None),
    "a scalar": (torch.tensor(1.0), None),
    "nothing": ([], None),
}


CASES = [
    pytest.param(reading, batch, n, id=f"{reading}: {name}")
    for reading, cases in [
        ("columns", COLUMNS),
        ("lists", LISTS),
        ("samples", SAMPLES),
        ("without tensors", WITHOUT_TENSORS),
    ]
    for name, (batch, n) in cases.items()
]


@pytest.mark.parametrize(("reading", "batch", "n"), CASES)
def test_the_batch_size_and_what_is_cut(reading: str, batch: Any, n: int | None) -> None:
    assert infer_batch_size(batch, 0).size == n
    if n is None or n < 2 or reading == "without tensors":
        return
    first, second = cut(batch, (1, n - 1))
    if reading == "samples":
        assert len(first) == 1 and first[0] is batch[0] and len(second) == n - 1
    elif reading == "lists":
        for node, shard in zip(nodes(batch), nodes(first), strict=True):
            if isinstance(node, list):
                assert len(shard) == 1 and shapes(shard[0]) == shapes(node[0])
        assert shapes(cut(batch, (n,))[0]) == shapes(batch)
    else:
        for tensor, a, b in zip(tensors(batch), tensors(first), tensors(second), strict=True):
            assert (len(a), len(b)) == ((1, n - 1) if len(tensor) == n else (1, 1))


def test_items_that_differ_are_cut_per_sample_beside_a_tensor() -> None:
    items = [{"a": zeros(1)}, {"b": zeros(1)}, None, zeros(1)]
    parts = cut({"x": zeros(4), "items": items}, (3, 1))
    assert parts[0]["items"] == items[:3] and parts[1]["items"][0] is items[3]


def test_what_is_no_list_of_samples() -> None:
    pairs = cut([("a", "b"), ("c", "d")], (1, 1))
    assert pairs == [[("a",), ("c",)], [("b",), ("d",)]]
    shape = {"x": zeros(2, 3), "shape": torch.Size([2, 3])}
    assert [shard["shape"] for shard in cut(shape, (1, 1))] == [(2, 3), (2, 3)]
    for shard in cut({"a": [zeros(2, 3), None], "b": [None, None]}, (1, 1)):
        assert shapes(shard) == [[(1, 3), None], [None, None]]


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ([zeros(8, 2), zeros(3, 2)], r"batch\[0\] has 8 and batch\[1\] has 3"),
        (
            {"x": zeros(8), "more": [zeros(8), zeros(3)]},
            r"'x'\] has 8 and batch\['more'\]\[1\] has",
        ),
        (Sample(zeros(8), zeros(3)), r"\['image'\] has 8 and batch\['label'\] has 3"),
        ({"a": ["x"] * 3, "b": ["y"] * 2}, r"batch\['a'\] has 3 and batch\['b'\] has 2"),
        ({"x": zeros(8), "boxes": [zeros(5), zeros(2)]}, r"'x'\] has 8 and .*\]\[0\] has 5"),
        (
            {"a": [zeros(8, 3), zeros(8, 1)], "b": zeros(2, 3)},
            r"'a'\]\[0\] has 8 and .*'b'\] has 2",
        ),
    ],
)
def test_two_batch_sizes_are_an_error_that_names_both_leaves(batch: Any, names: str) -> None:
    with pytest.raises(BatchSizeError, match=names) as error:
        infer_batch_size(batch, 0)
    assert "Give both the same number" in str(error.value)
    assert "batch_size(batch)" in str(error.value) and "split_batch(batch, " in str(error.value)


def test_a_list_of_lists_that_are_no_columns_is_refused() -> None:
    """It may be a list of samples, columns of ragged samples, or one batch per loader."""
    ragged = [[zeros(5), zeros(4)], [zeros(3), zeros(9)], [zeros(2), zeros(8)]]
    loaders = [[zeros(4, 3), zeros(4).long()], [zeros(8, 3), zeros(8).long()]]
    for batch in (ragged, loaders):
        with pytest.raises(
            BatchSizeError, match=r"read in one way, got a list of \d lists"
        ) as error:
            infer_batch_size(batch, 0)
        assert "batch_size(batch)" in str(error.value) and "split_batch(batch, " in str(error.value)
    assert infer_batch_size([tuple(sample) for sample in ragged], 0).size == 3


class Telling(nn.Module):
    """Says how many samples a batch has."""

    def __init__(self, n: Any) -> None:
        super().__init__()
        self.n = n

    def batch_size(self, batch: Any) -> Any:
        return self.n


def told(batch: Any, n: Any) -> list[Any]:
    """The shards of a batch of n samples: all but one, and one."""
    module = Telling(n)
    return cut_for(module, batch, infer_for(module, batch), (n - 1, 1))


def test_a_module_says_how_many_samples_a_batch_has() -> None:
    first, second = told({"x": zeros(8, 3), "classes": zeros(10)}, 8)
    assert shapes(first) == [(7, 3), (10,)] and shapes(second) == [(1, 3), (10,)]
    first, second = told({"points": [zeros(99, 3)] * 5}, 5)
    assert len(first["points"]) == 4 and shapes(second["points"]) == [(99, 3)]
    first, second = told({"points": [zeros(99, 3)] * 5}, 99)
    assert shapes(second["points"]) == [(1, 3)] * 5


@pytest.mark.parametrize("n", [-1, 2.0, True, "3", None, torch.tensor(2)])
def test_a_batch_size_is_a_number_of_samples(n: Any) -> None:
    with pytest.raises(BatchSizeError, match=r"Telling.batch_size: expected the number of samples"):
        infer_for(Telling(n), zeros(4))


@pytest.mark.parametrize("batch", [zeros(4), {"x": zeros(4, 3), "y": [1] * 4}, [zeros(4), 5]])
def test_a_batch_size_that_nothing_has_is_refused_and_not_given_to_every_replica(
    batch: Any,
) -> None:
    with pytest.raises(
        BatchSizeError, match=r"Telling.batch_size: expected .* \(4,\), got 7. Return"
    ):
        infer_for(Telling(7), batch)
    assert infer_for(Telling(4), batch).size == 4
    assert infer_for(Telling(1), batch).size == 1  # all of it is one sample


def test_an_attribute_that_is_a_number_is_no_method() -> None:
    module = nn.Identity()
    module.batch_size = 32  # as Lightning's scaler of batch sizes has it
    assert infer_for(module, zeros(4)).size == 4


def nodes(node: Any) -> list[Any]:
    """The values of a batch, one level down."""
    return list(node.values()) if isinstance(node, dict) else list(node)


def shapes(node: Any) -> Any:
    if isinstance(node, Graph):
        return shapes(node.entries)
    if isinstance(node, dict | list | tuple):
        return [shapes(child) for child in nodes(node)]
    return node.shape if isinstance(node, Tensor) else node


def tensors(node: Any) -> list[Tensor]:
    if isinstance(node, dict | list | tuple):
        return [tensor for child in nodes(node) for tensor in tensors(child)]
    return [node] if isinstance(node, Tensor) else []
