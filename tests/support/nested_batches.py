"""Batches of every container, random nestings of them, and whether two are the same."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.scatter.batch_size import are_alike
from support.containers import (
    Built,
    Encoding,
    GraphBatch,
    ModelOutput,
    Pair,
    Sample,
    Table,
    graph,
    packed,
)

# Items of ragged lists have more rows than any test has samples: fewer could be columns.
MAKERS: dict[str, Callable[[int], Any]] = {
    "float": lambda n: torch.randn(n, 3),
    "bool": lambda n: torch.arange(n) % 2 == 0,
    "numpy": lambda n: np.arange(2.0 * n).reshape(n, 2),
    "numpy strings": lambda n: np.array([f"word {i}" for i in range(n)]),
    "names": lambda n: [f"name {i}" for i in range(n)],
    "labels": lambda n: list(range(n)),
    "0-dim list": lambda n: [torch.tensor(float(i)) for i in range(n)],
    "packed": lambda n: packed(n, in_order=False),
    "packed in order": lambda n: packed(n, in_order=True),
    "graph batch": lambda n: GraphBatch.from_data_list([graph(i) for i in range(n)]),
    "graphs": lambda n: [graph(i) for i in range(n)],
    "table": lambda n: Table({"x": torch.randn(n, 2), "i": torch.arange(n)}, [n]),
    "encoding": lambda n: Encoding({"ids": torch.arange(n)}, [f"encoding {i}" for i in range(n)]),
    "dataclass": lambda n: Sample(torch.randn(n), tuple(str(i) for i in range(n))),
    "built": lambda n: Built(torch.arange(n)),
    "model output": lambda n: ModelOutput(x=torch.arange(n), states=(torch.randn(n, 2),)),
    "proxy": lambda n: types.MappingProxyType({"x": torch.arange(n)}),
    "default": lambda n: defaultdict(list, x=torch.arange(n)),
    "ragged list": lambda n: [torch.randn(20 + i, 4) for i in range(n)],
    "targets": lambda n: [{"boxes": torch.randn(20 + i, 4), "id": i} for i in range(n)],
}


def batches(n: int) -> st.SearchStrategy[Any]:
    """Nested batches of n samples."""
    leaves = st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name](n))
    whole = st.sampled_from(["a string", 2.5, None, True, torch.tensor(3.0)])
    return st.recursive(
        leaves | whole,
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.tuples(inner, inner).filter(_is_no_tuple_of_samples)
            | st.builds(Pair, inner, inner)
            | st.builds(Sample, inner, inner)
            | st.builds(lambda x: OrderedDict(x=x), inner)
        ),
        max_leaves=5,
    ).map(lambda rest: {"x": torch.arange(n), "rest": rest})


def _is_no_tuple_of_samples(pair: tuple[Any, Any]) -> bool:
    """Whether it cannot be taken for two samples: for their names, or for two alike objects."""
    objects = any(tree.children(entry) and not tree.is_list(entry) for entry in pair)
    return not all(isinstance(entry, str) for entry in pair) and not (objects and are_alike(pair))


def devices_in(node: Any) -> set[torch.device]:
    """Where the tensors of a tree are."""
    if isinstance(node, Tensor):
        return {node.device}
    if isinstance(node, PackedSequence):
        return {t.device for t in (node.data, node.unsorted_indices) if t is not None}
    return set().union(*(devices_in(child) for child in _parts(node).values()))


def assert_equal(actual: Any, expected: Any, name: str = "leaf") -> None:
    """Values and types are equal, down to the attributes of objects."""
    assert type(actual).__qualname__ == type(expected).__qualname__, name
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, name
        assert torch.equal(actual.cpu(), expected.cpu()) or _is_near(actual, expected), name
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype and np.array_equal(actual, expected), name
    elif parts := _parts(expected):
        assert list(_parts(actual)) == list(parts), name
        for key, part in parts.items():
            assert_equal(_parts(actual)[key], part, f"{name}[{key!r}]")
    elif type(expected).__eq__ is not object.__eq__:
        assert actual == expected, name


def _is_near(mean: Tensor, value: Tensor) -> bool:
    """Whether it is a mean of equal scalars."""
    return mean.dim() == value.dim() == 0 and abs(float(mean - value.to(mean.device))) < 1e-6


def _parts(node: Any) -> dict[Any, Any]:
    """What there is in a container, of whatever library."""
    if isinstance(node, PackedSequence):
        return node._asdict()
    if hasattr(node, "to_data_list"):
        keys = node.keys() if callable(node.keys) else node.keys
        return {key: node[key] for key in sorted(keys)} | {"list": node.to_data_list()}
    if hasattr(node, "batch_size"):
        return {"shape": list(node.batch_size), **dict(node.items())}
    if hasattr(node, "to") and callable(getattr(node, "keys", None)):
        attributes = {"_encodings": vars(node).get("_encodings")}
        return {**{key: node[key] for key in node.keys()}, **attributes}  # noqa: SIM118  # no dict
    return dict(tree.children(node) or [])
