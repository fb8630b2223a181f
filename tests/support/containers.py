"""Containers that DataLoaders yield: people's own, and doubles of other libraries'.

The doubles have the interface of the real classes, as far as scatter and gather use it, and the
habits that matter: which `to` moves the object itself, what lies in attributes, which class is made
at run time.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
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
        batch.entries = {k: torch.cat([g[k] for g in graphs]) for k in graphs[0].keys()}  # noqa: SIM118  # no dict
        batch.counts = [{k: len(g[k]) for k in g.keys()} for g in graphs]  # noqa: SIM118  # no dict
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

    def __init__(self, entries: Mapping[str, Any], batch_size: Any = ()) -> None:
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


class Encoding(UserDict):
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


class ModelOutput(OrderedDict):
    """As that of Hugging Face: items are attributes too, and `update` is refused."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")


def graph(i: int) -> Graph:
    return Graph(x=torch.randn(i % 4 + 1, 2), y=torch.tensor([i]))


def packed(n: int, in_order: bool) -> PackedSequence:
    lengths = range(n, 0, -1) if in_order else [(5 * i) % 7 + 1 for i in range(n)]
    return pack_sequence([torch.randn(t, 2) for t in lengths], enforce_sorted=in_order)
