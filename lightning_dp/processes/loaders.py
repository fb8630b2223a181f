"""Loaders: what a process is given in place of the user's DataLoader, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.processes.draws import Share
from lightning_dp.processes.slices import opened, sliced
from lightning_dp.processes.streams import SharedIterable, streamed

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


def of_process(loader: Any, share: Share, world: World) -> Any:
    """A loader like this one, whose batches are slices: this process's part of each."""
    if isinstance(loader, SharedIterable):  # Lightning gives a CombinedLoader what it has got
        return SharedIterable(loader.whole, world)
    if not isinstance(loader, DataLoader):
        return SharedIterable(loader, world)
    if isinstance(loader.dataset, IterableDataset):
        return streamed(loader, share, world)
    return sliced(loader, share, world)


class Opened(Iterator[Any]):
    """Lightning's iterator over batches, without the slices that they come in.

    For steps that take `dataloader_iter`: Lightning calls no other hook for such a batch.

    Attributes:
        is_idle: whether this process has no samples of the latest batch.
    """

    def __init__(self, source: Iterator[Any], world: World) -> None:
        self._source, self._world = source, world
        self.is_idle = False

    def __next__(self) -> Any:
        """A batch, its number, and that of its DataLoader."""
        batch, *numbers = next(self._source)
        batch, self.is_idle = opened(batch)
        self._world.is_idle = self.is_idle
        return (batch, *numbers)


def open_fetcher(batch: Any, world: World) -> None:
    """Lets an iterator that Lightning gives a step yield batches, not slices."""
    fetcher = _fetcher_of(batch)
    if fetcher is not None and not isinstance(fetcher.iterator, Opened):
        fetcher.iterator = Opened(fetcher.iterator, world)


def is_of_several(iterator: Any) -> bool:
    """Whether a step's iterator gives this process's part of batches."""
    return isinstance(getattr(_fetcher_of(iterator), "iterator", None), Opened)


def is_idle_in(iterator: Any) -> bool:
    """Whether this process has no samples of the batch that a step's iterator gave last."""
    own = getattr(_fetcher_of(iterator), "iterator", None)
    return isinstance(own, Opened) and own.is_idle


def _fetcher_of(batch: Any) -> Any:
    return getattr(batch, "data_fetcher", None) if isinstance(batch, Iterator) else None


def no_predictions(output: Any, n: int) -> Any:
    """What a step gave for n samples of a process that has none: the same without any rows."""
    if isinstance(output, (list, tuple)) and not hasattr(output, "_fields"):
        is_plain = not any(isinstance(item, (Tensor, dict, list)) for item in output)
        if is_plain and len(output) == n:
            return output[:0]
        return type(output)(no_predictions(item, n) for item in output)
    if isinstance(output, dict):
        return type(output)((key, no_predictions(value, n)) for key, value in output.items())
    if isinstance(output, Tensor):
        return output[:0] if output.ndim else output
    return output
