"""What DataLoaders yield: doubles of other libraries' containers, and random batches of them.

The doubles have the interface of the real classes, as far as scatter and gather use it, and the
habits that matter: which `to` moves the object itself, what lies in attributes, which class is made
at run time. `MAKERS` has the real libraries beside them where these are installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_dp.parallel import tree

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("image", "label")
    image: Any
    label: Any


@dataclasses.dataclass
class Built:
    """Has a field that its constructor does not take, and one that is not always there."""

    x: Any
    made: str = dataclasses.field(init=False)
    rest: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.made = "again" if hasattr(self, "made") else "once"


class Graph:
    """As PyTorch Geometric's `Data`: entries by name, and `to` moves the object itself."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def keys(self) -> list[str]:
        return list(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __copy__(self) -> Graph:
        clone = object.__new__(type(self))
        clone.__dict__ = {**self.__dict__, "entries": dict(self.entries)}
        return clone

    def to(self, device: torch.device) -> Graph:
        self.entries = {k: v.to(device) for k, v in self.entries.items()}
        return self


class GraphBatch(Graph):
    """As PyTorch Geometric's `Batch`, whose class is made at run time."""

    @classmethod
    def from_data_list(cls, graphs: list[Graph], follow_batch: Any = None) -> Any:
        made = type(f"{type(graphs[0]).__name__}{cls.__name__}", (cls, type(graphs[0])), {})
        batch = object.__new__(made)
        batch.entries = {k: torch.cat([g[k] for g in graphs]) for k in graphs[0].keys()}  # noqa: SIM118
        batch.counts = [{k: len(g[k]) for k in g.keys()} for g in graphs]  # noqa: SIM118
        return batch

    @property
    def num_graphs(self) -> int:
        return len(self.counts)

    def to_data_list(self) -> list[Graph]:
        parts = {k: self[k].split([c[k] for c in self.counts]) for k in self.entries}
        return [Graph(**{k: v[i] for k, v in parts.items()}) for i in range(self.num_graphs)]

    counts: list[dict[str, int]]


class Table(MutableMapping[str, Any]):
    """As a TensorDict: a mapping with a batch size, which takes part in torch functions."""

    def __init__(self, entries: Mapping[str, Any], batch_size: Any) -> None:
        self.entries, self.batch_size = dict(entries), torch.Size(batch_size)

    @classmethod
    def __torch_function__(cls, fn: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert fn is torch.cat
        tables, dim = args
        shape = list(tables[0].batch_size)
        shape[dim] = sum(table.batch_size[dim] for table in tables)
        return cls({k: torch.cat([t.entries[k] for t in tables], dim) for k in tables[0]}, shape)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.entries[index]
        entries = {k: v[index] for k, v in self.entries.items()}
        return Table(entries, torch.empty(self.batch_size)[index].shape)

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    def to(self, device: torch.device) -> Table:
        return Table({k: v.to(device) for k, v in self.entries.items()}, self.batch_size)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's `BatchEncoding`: items as attributes, and lists beside the items."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> Any:
        return {"data": self.data}

    def to(self, device: torch.device) -> Encoding:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As that of Hugging Face: items are attributes too, and `update` is refused."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Rows:
    """An object of somebody's own: one row per sample, and no way to join it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self.x[index])

    def to(self, device: torch.device) -> Any:
        self.x = self.x.to(device)
        return self


class Boxes(Rows):
    """One that can be joined."""

    @classmethod
    def cat(cls, parts: list[Boxes]) -> Boxes:
        return cls(torch.cat([part.x for part in parts]))


def graph(i: int) -> Graph:
    return Graph(x=torch.randn(i % 4 + 1, 2), y=torch.tensor([i]))


def packed(n: int, in_order: bool) -> PackedSequence:
    lengths = range(n, 0, -1) if in_order else [(5 * i) % 7 + 1 for i in range(n)]
    return pack_sequence([torch.randn(t, 2) for t in lengths], enforce_sorted=in_order)


# Items of ragged lists have more rows than any test has samples: fewer could be columns.
MAKERS: dict[str, Callable[[int], Any]] = {
    "float": lambda n: torch.randn(n, 3),
    "vector": torch.arange,
    "bool": lambda n: torch.arange(n) % 2 == 0,
    "numpy": lambda n: np.arange(2.0 * n).reshape(n, 2),
    "numpy strings": lambda n: np.array([f"word {i}" for i in range(n)]),
    "names": lambda n: [f"name {i}" for i in range(n)],
    "name tuple": lambda n: tuple(f"name {i}" for i in range(n)),
    "labels": lambda n: list(range(n)),
    "0-dim list": lambda n: [torch.tensor(float(i)) for i in range(n)],
    "packed": lambda n: packed(n, in_order=False),
    "packed in order": lambda n: packed(n, in_order=True),
    "graph batch": lambda n: GraphBatch.from_data_list([graph(i) for i in range(n)]),
    "graphs": lambda n: [graph(i) for i in range(n)],
    "table": lambda n: Table({"x": torch.randn(n, 2), "i": torch.arange(n)}, [n]),
    "boxes": lambda n: Boxes(torch.randn(n, 4)),
    "encoding": lambda n: Encoding({"ids": torch.arange(n)}, [f"encoding {i}" for i in range(n)]),
    "frozen": lambda n: Sample(torch.randn(n), [str(i) for i in range(n)]),
    "slotted": lambda n: Slotted(torch.randn(n), "all"),
    "built": lambda n: Built(torch.arange(n)),
    "model output": lambda n: ModelOutput(x=torch.arange(n), states=(torch.randn(n, 2),)),
    "fixed": lambda n: Fixed({"x": torch.arange(n)}),
    "proxy": lambda n: types.MappingProxyType({"x": torch.arange(n)}),
    "default": lambda n: defaultdict(list, x=torch.arange(n)),
    "ragged list": lambda n: [torch.randn(20 + i, 4) for i in range(n)],
    "targets": lambda n: [{"boxes": torch.randn(20 + i, 4), "id": i} for i in range(n)],
}


def _real_graphs() -> dict[str, Callable[[int], Any]]:
    from torch_geometric.data import Batch, Data

    def make(i: int) -> Any:
        edges = torch.arange(2 * (i % 3)).reshape(2, -1) % (i + 1)
        return Data(x=torch.randn(i + 1, 2), edge_index=edges, y=torch.tensor([i]))

    def batch(n: int, **options: Any) -> Any:
        return Batch.from_data_list([make(i) for i in range(n)], **options)

    return {
        "real graph batch": batch,
        "real graph batch that follows": lambda n: batch(n, follow_batch=["y"]),
        "real graphs": lambda n: [make(i) for i in range(n)],
    }


def _real_tables() -> dict[str, Callable[[int], Any]]:
    from tensordict import TensorDict, tensorclass

    global Tensors  # where copies look for it

    @tensorclass
    class Tensors:
        x: Tensor
        name: str

    def nested(n: int) -> Any:
        return TensorDict({"x": torch.randn(n, 2), "y": {"i": torch.arange(n)}}, [n])

    return {
        "real table": nested,
        "real tensorclass": lambda n: Tensors(torch.randn(n, 2), "all", batch_size=[n]),
    }


def _real_encodings() -> dict[str, Callable[[int], Any]]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def encoding(n: int) -> Any:
        encodings = tokenizer.encode_batch(["a b"] * n)
        return BatchEncoding({"input_ids": torch.randn(n, 2)}, encodings)

    def output(n: int) -> Any:
        return SequenceClassifierOutput(logits=torch.randn(n, 3), attentions=(torch.randn(n, 2),))

    return {"real encoding": encoding, "real model output": output}


DOUBLES = list(MAKERS)

for _library, _makers in (
    ("torch_geometric", _real_graphs),
    ("tensordict", _real_tables),
    ("transformers", _real_encodings),
):
    if importlib.util.find_spec(_library) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what these libraries do is not what is tested
            MAKERS |= _makers()


def batches(n: int) -> st.SearchStrategy[Any]:
    """Nested batches of n samples."""
    leaves = st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name](n))
    whole = st.sampled_from(["a string", 2.5, None, True, torch.tensor(3.0)])
    return st.recursive(
        leaves | whole,
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.builds(Sample, inner, inner)
            | st.builds(lambda x: OrderedDict(x=x), inner)
        ),
        max_leaves=5,
    ).map(lambda rest: {"x": torch.arange(n), "rest": rest})


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
    if isinstance(node, Rows):
        return {"x": node.x}
    if hasattr(node, "batch_size"):
        return {"shape": list(node.batch_size), **dict(node.items())}
    if hasattr(node, "to") and callable(getattr(node, "keys", None)):
        attributes = {"_encodings": vars(node).get("_encodings")}
        return {**{key: node[key] for key in node.keys()}, **attributes}  # noqa: SIM118
    return dict(tree.children(node) or [])
