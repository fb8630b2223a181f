"""A batch in pieces: how it is read, cut, and kept.

Most batches are plain columns: a tensor, or a list, tuple or dict of nothing but tensors of one
length. They are read and cut here; `sizes` reads, and `scatter` cuts, all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_dp.parallel.batch.sample_dims import StepDims
from lightning_dp.parallel.batch.scatter import cut
from lightning_dp.parallel.batch.sizes import Inferred, infer_batch_size, told_by
from lightning_dp.parallel.split import Order, Sizes

_LAYOUT = attrgetter("layout", "is_nested", "requires_grad")
_STRIDED = (torch.strided, False, False)


@dataclass(frozen=True)
class Shards:
    """A batch after split and scatter: a size and a part per device, None where the size is 0.

    It is `whole` if nothing was cut: the root has the batch as it is. `order` has the positions of
    each shard's samples in the batch, if they are not consecutive. `losses`, of
    `parallel.processes`, are there if other processes are to hear of them when the step ends.
    `added` has the keys of entries that steps have put into the parts. In `traces` are those of
    `parallel.gradients`, if the replicas' step is looked at.
    """

    sizes: Sizes
    parts: list[Any] = field(repr=False)
    whole: bool = False
    order: Order | None = field(default=None, repr=False)
    dims: StepDims = field(default_factory=StepDims, repr=False, compare=False)
    losses: list[Any] = field(default_factory=list, repr=False, compare=False)
    added: dict[Any, None] = field(default_factory=dict, repr=False, compare=False)
    traces: list[Any] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def active(self) -> list[int]:
        """The replicas that have samples."""
        return list(compress(count(), self.sizes))

    @cached_property
    def active_sizes(self) -> list[int]:
        """The sizes of the shards of the active replicas."""
        return list(filter(None, self.sizes))

    @cached_property
    def active_order(self) -> Order | None:
        """The positions of the samples of the active replicas, if they are not in order."""
        return None if self.order is None else [self.order[k] for k in self.active]

    def samples(self, k: int) -> str:
        """Which samples replica k has, for people."""
        if self.order is not None:
            some = ", ".join(map(str, self.order[k][:8])) + ", ..." * (self.sizes[k] > 8)
            return f"samples {some} of {sum(self.sizes)}"
        start = sum(self.sizes[:k])
        return f"samples {start} to {start + self.sizes[k] - 1} of {sum(self.sizes)}"

    def place(self, stage: str, k: int) -> str:
        """Completes the sentence "in replica 2 on cuda:1, ..." in an error."""
        return f", {stage}, {self.samples(k)}"


def infer_for(module: nn.Module, batch: Any, dim: int = 0, *, columns: bool = False) -> Inferred:
    """How a module's batch is read.

    The module's own method `batch_size(batch)` counts first, then the `len()` of a batch object
    that can be cut, then what is in the batch. With `columns`, lists are containers of columns
    whatever is in them.
    """
    if callable(getattr(module, "batch_size", None)) or hasattr(module, "split_batch"):
        return told_by(module, batch, dim, columns=columns)
    plain = _plain_columns(batch, dim)
    if plain is None:
        return infer_batch_size(batch, dim, columns=columns)
    return Inferred(plain[0].size(dim), "columns")


def cut_for(
    module: nn.Module,
    batch: Any,
    inferred: Inferred,
    sizes: Sizes,
    dim: int = 0,
    order: Order | None = None,
) -> list[Any]:
    """Cuts a batch as the module does it, by `split_batch(batch, sizes)`, or else as `cut`."""
    own = getattr(module, "split_batch", None)
    if own is None:
        is_told = order is None and inferred.size == sum(sizes)
        parts = _cut_plain(batch, sizes, dim) if is_told else None
        return cut(batch, sizes, dim, order, inferred) if parts is None else parts
    parts = list(own(batch, sizes))
    if len(parts) != len(sizes):
        raise ValueError(
            f"{type(module).__qualname__}.split_batch: expected one shard for each of "
            f"the sizes {sizes}, got {len(parts)} shards. Return a list as long as sizes; "
            "where a size is 0, the entry is not used."
        )
    return parts


def _plain_columns(batch: Any, dim: int) -> list[Tensor] | None:
    """The tensors of a batch that are one, or a container of nothing else, of one length.

    None of another batch, and where the tensors are of kinds that are cut in ways of their own.
    """
    kind = type(batch)
    columns = [*batch.values()] if kind is dict else [*batch] if kind in (list, tuple) else [batch]
    if {*map(type, columns)} != {Tensor} or {*map(_LAYOUT, columns)} != {_STRIDED}:
        return None
    ranks = [column.dim() for column in columns]
    if not -min(ranks) <= dim < min(ranks):
        return None
    return columns if len({column.size(dim) for column in columns}) == 1 else None


def _cut_plain(batch: Any, sizes: Sizes, dim: int) -> list[Any] | None:
    """The shards of plain columns; of any other batch it returns None, and `cut` cuts it.

    Where a size is 0, there is no shard. The pieces have memory in common, but no version counter,
    as those that `leaves` cuts.
    """
    columns, active = _plain_columns(batch, dim), list(filter(None, sizes))
    if columns is None or min(sizes) < 0 or columns[0].size(dim) != sum(active):
        return None
    if any([forward_ad.unpack_dual(column).tangent is not None for column in columns]):
        return None
    pieces = zip(*[[piece.data for piece in c.split(active, dim)] for c in columns], strict=True)
    kind = type(batch)
    if kind is Tensor:
        shards: list[Any] = [piece for (piece,) in pieces]
    else:
        shards = [
            dict(zip(batch, own, strict=True)) if kind is dict else kind(own) for own in pieces
        ]
    found = iter(shards)
    return shards if len(active) == len(sizes) else [next(found) if n else None for n in sizes]


def weighted_mean(scalars: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean over all samples, of means over shards; of one shape, on one device.

    Sum of w_i * x_i over the sum of w_i.
    """
    total = float(sum(weights))
    terms = [scalar * (weight / total) for scalar, weight in zip(scalars, weights, strict=True)]
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def warn_of_nothing_to_cut(dim: int) -> None:
    """Of a step's batch without a size, which only one device gets."""
    warnings.warn(
        "The batch has no tensor and no list that could be cut: it runs on the root device alone. "
        f"Yield tensors whose dim {dim} counts the samples.",
        stacklevel=2,
    )
