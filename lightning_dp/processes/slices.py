"""Slices: of each batch a process loads its own samples alone.

A DataLoader's batch is that of all processes, as on one device: every process draws the same
samples in the same order, and loads its part of them. No sample is repeated or left out.

Random transforms in a data set's `__getitem__` are not those of one device: each process and each
worker has random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.parallel.split import Sizes
from lightning_dp.processes.draws import Parts, Share
from lightning_dp.processes.torch_loaders import LoaderOfParts, copied

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


@dataclass
class Slice:
    """A process's part of a batch.

    Attributes:
        batch: as the DataLoader's `collate_fn` has made it. Where the process has no samples, it is
            of samples that it, or another process, has as well.
        sizes: how many samples each process has. Of an iterable data set nobody knows: then 1 for
            each process that has some.
        rank: which one this is.
    """

    batch: Any
    sizes: Sizes
    rank: int

    @property
    def is_idle(self) -> bool:
        """Whether the process has no samples."""
        return self.sizes[self.rank] == 0


class SlicedLoader(DataLoader[Any]):
    """A DataLoader whose batches are slices.

    Its class is made for one loader, and comes from that one's: between the two is what the user's
    own `__iter__` does with each batch.

    Attributes:
        plain: the class of the user's loader.
        yielded: how many batches have been yielded since its latest `iter()`.
    """

    plain: ClassVar[type[DataLoader[Any]]]
    parts: Parts
    taken: list[Sizes]
    yielded: int

    def __iter__(self) -> Any:
        """One slice after another."""
        self.yielded = 0
        return self._slices(super().__iter__())

    def _slices(self, batches: Any) -> Iterator[Slice]:
        self.taken.clear()
        for batch in batches:
            if len(self.taken) != 1:
                break
            self.yielded += 1
            yield Slice(batch, self.taken.pop(), self.parts.world.rank)
        else:
            if not self.taken:
                return
        raise TypeError(
            f"{self.plain.__qualname__}: expected an __iter__ that yields one batch for each that "
            f"super().__iter__() yields, got {len(self.taken)} before the {self.yielded + 1}th. "
            "Each process loads its part of a batch, and nobody else knows which one that is. Use "
            "torch's DataLoader, and put what changes batches into its collate_fn or into "
            "on_before_batch_transfer."
        )


def sliced(loader: DataLoader[Any], share: Share, world: World) -> SlicedLoader:
    """A DataLoader like this one, which loads this process's part of each batch.

    Its attributes are the user's: data set, samplers, `len`. The user's loader stays as it is, but
    for its samplers, which draw as they would on one device.

    Args:
        loader: of a map-style data set.
        share: how many samples of a batch each process gets.
        world: the processes.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(f"Expected a DataLoader of a map-style data set, got {loader!r}.")
    refuse_shares(loader)
    plain = type(loader).plain if isinstance(loader, SlicedLoader) else type(loader)
    between = () if plain is DataLoader else (plain,)
    kind = type(plain.__name__, (SlicedLoader, *between, LoaderOfParts), {"plain": plain})
    # DataLoaders may yield as workers are through: all processes need the order of the draws.
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    parts = Parts(batches, share, world)
    return copied(loader, kind, parts=parts, taken=[], yielded=0, in_order=True)


def refuse_shares(loader: Any) -> None:
    """Refuses samplers that share samples out among processes themselves."""
    sampler = loader
    while sampler is not None:
        if getattr(sampler, "num_replicas", 1) not in (None, 1):
            raise ValueError(
                "Expected a DataLoader whose batches are those of all processes, of which each "
                f"loads its part, got {type(sampler).__name__}, which shares samples out among "
                f"{sampler.num_replicas} processes itself. Leave it out: shuffle=True gives every "
                "process the same order."
            )
        nested = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        sampler = None if nested is sampler else nested


def opened(batch: Any) -> tuple[Any, bool]:
    """A batch without its slices, and whether this process has none of its samples.

    Several DataLoaders' batches come together, in lists or dicts.
    """
    if isinstance(batch, Slice):
        return batch.batch, batch.is_idle
    slices: list[Slice] = []

    def noted(part: Slice) -> Any:
        slices.append(part)
        return part.batch

    own = apply_to_collection(batch, Slice, noted)
    if not slices:
        return batch, False
    for rank, sizes in enumerate(zip(*(part.sizes for part in slices), strict=True)):
        if 0 < sizes.count(0) < len(sizes):
            raise ValueError(
                "Expected every process to have samples of all DataLoaders' batches, or of none of "
                f"them, got {list(sizes)} samples in process {rank}. A process without samples "
                "takes part with some that count for nothing. Set drop_last=True in the "
                "DataLoaders, or give them batch sizes of which no process gets 0 samples."
            )
    return own, slices[0].is_idle
