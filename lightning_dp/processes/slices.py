"""Slices: each rank loads only its own samples of every batch.

The batch of a DataLoader is the global batch, as on one device. Rank 0 draws the indices of each
batch and broadcasts them, so any sampler works and all random numbers come from one source. Each
rank then loads its slice. No sample is padded, repeated or dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.lightning_private import is_index_sampler
from lightning_dp.parallel.split import Sizes, chunk, even, weighted

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Rule: TypeAlias = Literal["even", "chunk"]

_STAND_INS = 2
"""Samples of other ranks that a rank with an empty slice loads: batch norm needs two."""


def rank_sizes(
    n: int,
    device_counts: Sequence[int],
    weights: Sequence[float] | None = None,
    rule: Rule = "even",
) -> Sizes:
    """The sizes of the ranks' slices: each gets what its devices would get in one process.

    Args:
        n: the global batch size, in samples.
        device_counts: how many devices each rank has.
        weights: shares of all devices, those of rank 0 first; None for what `rule` says.
        rule: how samples are split without weights.

    Example:
        >>> rank_sizes(10, [2, 2]), rank_sizes(9, [1, 3], [3, 1, 1, 1])
        ((6, 4), (5, 4))
    """
    if weights is not None:
        sizes = weighted(n, weights)
    else:
        sizes = (chunk if rule == "chunk" else even)(n, sum(device_counts))
    return tuple(sum(sizes[a:b]) for a, b in pairwise([0, *accumulate(device_counts)]))


class Slice(NamedTuple):
    """What a `RankLoader` yields: this rank's part of a batch, as `collate_fn` made it.

    An empty slice has a few samples of other ranks in `batch`: the rank runs the step with them, so
    that it takes part in all collectives, and the results are left out.
    """

    batch: Any
    is_empty: bool


class RankLoader:
    """Replaces the user's DataLoader in a Trainer: yields this rank's slice of every batch.

    Every other attribute is that of the user's loader.

    Args:
        loader: the user's.
        sizes: the sizes of all ranks' slices, given the size of a batch.
        world: the processes.
    """

    def __init__(self, loader: Any, sizes: Callable[[int], Sizes], world: World) -> None:
        if isinstance(loader, RankLoader):  # Lightning hands a CombinedLoader's loaders in again
            loader = loader.loader
        _check_loader(loader)
        self.loader: DataLoader[Any] = loader
        self._sizes, self._world = sizes, world
        self._are_empty: deque[bool] = deque()  # of slices drawn, but not yielded yet
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = getattr(loader, name)
        lengths = world.all_gather_objects(sized_len(loader))
        if len(set(lengths)) > 1:
            raise ValueError(
                "DataLoader: expected as many batches in every process, got "
                f"{', '.join(map(str, lengths))}. Give every process the same data set and sampler."
            )
        self._own = object.__new__(type(loader))
        # Past DataLoader.__setattr__, which refuses a new batch_sampler; without the iterator that
        # holds persistent workers. `in_order` lets batches come in the order of their indices.
        kept = {n: v for n, v in vars(loader).items() if not isinstance(v, Iterator)}
        vars(self._own).update(kept, in_order=True, **{name: _Indices(self)})

    def __len__(self) -> int:
        """The number of global batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Slice]:
        """One slice for each batch."""
        self._are_empty.clear()
        for batch in self._own:
            yield Slice(batch, self._are_empty.popleft())

    def __getattr__(self, name: str) -> Any:
        """Of the user's loader."""
        if name == "loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def draw(self) -> Iterator[list[Any]]:
        """The indices of this rank's slices."""
        world, sampler = self._world, self._sampler
        drawn = iter(sampler) if world.rank == 0 else iter(())
        # Lightning's sampler in `predict` notes the indices of each batch for writers.
        notes = is_index_sampler(sampler)
        if notes and world.rank > 0:
            sampler.seen_batch_indices = []
        while (indices := world.broadcast(next(drawn, None))) is not None:
            if isinstance(indices, str) or not isinstance(indices, Iterable):
                raise ValueError(
                    "DataLoader: expected a sampler that yields lists of indices, of which each "
                    f"process loads its slice, got {indices!r}. Give it a batch_size."
                )
            indices = list(indices)
            ends = [0, *accumulate(self._sizes(len(indices)))]
            own = indices[ends[world.rank] : ends[world.rank + 1]]
            if notes and world.rank == 0:
                sampler.seen_batch_indices[-1] = own
            elif notes:
                sampler.seen_batch_indices.append(own)
            self._are_empty.append(not own)
            yield own or indices[:_STAND_INS]


class _Indices:
    """The sampler of a copied DataLoader."""

    def __init__(self, owner: RankLoader) -> None:
        self._owner = owner

    def __len__(self) -> int:
        return len(self._owner._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._owner.draw()


def open_slices(batch: Any) -> tuple[Any, bool]:
    """A batch without its `Slice`, and whether this rank's slice is empty.

    Batches of several DataLoaders come in lists or dicts.
    """
    are_empty: list[bool] = []

    def opened(part: Slice) -> Any:
        are_empty.append(part.is_empty)
        return part.batch

    batch = opened(batch) if isinstance(batch, Slice) else apply_to_collection(batch, Slice, opened)
    if len(set(are_empty)) > 1:
        raise ValueError(
            "DataLoaders: expected each process to have samples of all loaders' batches or of "
            f"none, got empty slices {are_empty}. Set drop_last=True, or use larger batches."
        )
    return batch, any(are_empty)


def _check_loader(loader: Any) -> None:
    """Refuses loaders whose samples have no indices that the ranks could share out."""
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_iterable or getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        kind = type(loader.dataset if is_iterable else loader).__name__
        raise TypeError(
            "Expected torch's DataLoader of a map-style data set in several processes, as each "
            f"loads its slice of a batch by indices, got {kind}. Use such a data set and loader, "
            "or one process, which can have all devices of the machine."
        )
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) not in (None, 1):
            raise ValueError(
                "DataLoader: expected the batches of all processes, of which each loads its slice, "
                f"got {type(sampler).__name__}, which shares samples out itself. Leave it out, and "
                "set shuffle=True."
            )
