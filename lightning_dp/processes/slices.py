"""Slices: each rank loads only its own samples of every batch.

The batch of a DataLoader is the global batch, as on one device. Rank 0 draws the indices of each
batch for all, so any sampler works and all random numbers come from one source. Each rank then
loads its slice. No sample is padded, repeated or dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.lightning_private import is_index_sampler
from lightning_dp.parallel.split import Sizes

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

_STAND_INS = 2
"""Samples of other ranks that a rank with an empty slice loads: batch norm needs two."""


class Slice(NamedTuple):
    """What a `RankLoader` yields: this rank's part of a batch, as `collate_fn` made it.

    An empty slice has a few samples of other ranks in `batch`: the rank runs the step with them, so
    that it takes part in all exchanges, and the results are left out.
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
        lengths = world.all_gather_objects(sized_len(loader))
        if len(set(lengths)) > 1:
            raise ValueError(
                "DataLoader: expected as many batches in every process, got "
                f"{', '.join(map(str, lengths))}. Give every process the same data set and sampler."
            )
        self.loader: DataLoader[Any] = loader
        self._are_empty: deque[bool] = deque()  # of slices drawn, but not yielded yet
        self._own = object.__new__(type(loader))
        # Past DataLoader.__setattr__, which refuses a new batch_sampler; without the iterator that
        # holds persistent workers. `in_order` lets batches come in the order of their indices.
        kept = {n: v for n, v in vars(loader).items() if not isinstance(v, Iterator)}
        sampler = _SliceSampler(loader.batch_sampler, sizes, world, self._are_empty)
        vars(self._own).update(kept, in_order=True, batch_sampler=sampler)

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
        return getattr(self.loader, name)


class _SliceSampler:
    """The indices of this rank's slices: the `batch_sampler` of a copied DataLoader."""

    def __init__(
        self, sampler: Any, sizes: Callable[[int], Sizes], world: World, are_empty: deque[bool]
    ) -> None:
        self._sampler, self._sizes, self._world = sampler, sizes, world
        self._are_empty = are_empty

    def __iter__(self) -> Iterator[list[Any]]:
        rank, drawn = self._world.rank, iter(self._sampler if self._world.rank == 0 else ())
        notes = is_index_sampler(self._sampler)  # it notes the indices of `predict` for writers
        if notes:
            self._sampler.seen_batch_indices = []
        for number in count():
            indices = self._world.broadcast(next(drawn, None))
            if indices is None:
                return
            indices = list(indices)
            ends = [0, *accumulate(self._sizes(len(indices)))]
            own = indices[ends[rank] : ends[rank + 1]]
            if notes:
                self._sampler.seen_batch_indices[number:] = [own]
            self._are_empty.append(not own)
            yield own or indices[:_STAND_INS]


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
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), getattr(sampler, "sampler", None)]
    shared = [s for s in samplers if getattr(s, "num_replicas", 1) not in (None, 1)]
    if isinstance(dataset, IterableDataset):
        got = type(dataset).__name__
    elif getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        got = type(loader).__name__
    elif sampler is None or shared:
        got = type(shared[0]).__name__ if shared else "batch_size=None"
    else:
        return
    raise TypeError(
        "Expected torch's DataLoader in several processes, with a map-style data set, a batch size "
        "and no sampler that shares samples out itself, as each process loads its slice of a batch "
        f"by indices, got {got}. Use such a loader, or one process, which can have all devices of "
        "the machine."
    )
