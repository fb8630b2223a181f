"""Draws: every process draws the samples that the first one draws, and loads its part of them."""

from __future__ import annotations

import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_dp.parallel.split import Sizes
from lightning_dp.processes.drawing_state import DrawingState

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Share: TypeAlias = Callable[[int], Sizes]
"""Batch size in, the sizes of all processes' parts out."""

_END = object()
_DRAW_AT_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_SAME = (
    "A DataLoader's batch is that of all processes, and each of them loads its part: data set, "
    "sampler and their seeds must not depend on the rank. Give every process the same data set and "
    "the same seed, torch.Generator().manual_seed(0) for instance, and let no sampler share out "
    "the samples itself."
)


class Parts:
    """This process's part of each list of indices that a sampler of batches yields.

    Args:
        batches: the user's sampler. It is the same object in every iteration, as on one device.
        share: how many samples of a batch each process gets.
        world: the processes.

    Attributes:
        latest: the iteration that was begun last.
    """

    def __init__(self, batches: Iterable[Any], share: Share, world: World) -> None:
        self.batches, self.share, self.world = batches, share, world
        self.latest: Draws | None = None

    def __len__(self) -> int:
        """As many as there are of all processes together."""
        return len(cast(Sized, self.batches))

    def __iter__(self) -> Draws:
        """All processes begin together."""
        self.latest = Draws(self, self.latest)
        return self.latest


IDLE = 2
"""Samples of a process that has none of its own: batch norm takes no variance of one."""


@dataclass(frozen=True)
class _Drawn:
    """What a process tells of what it has drawn, and where it is when it does."""

    value: Any
    what: str = "the next batch of a DataLoader"


class Draws(Iterator[Any]):
    """One iteration over the batches.

    What was drawn is compared between the processes at the first batch, at the second, the fourth
    and so on, at the end, and when the next iteration begins; where nobody knows how many batches
    there are, at each of them.

    Attributes:
        count: how many batches have been drawn.
        sizes: of the batches that have been drawn, but not yielded yet, what each process has.
    """

    def __init__(self, parts: Parts, before: Draws | None) -> None:
        self._parts, self._world = parts, parts.world
        self.count, self._mark, self._is_over = 0, 0, False
        self.sizes: deque[Sizes] = deque()
        self._thread = threading.get_ident()
        self._length = length_of(parts.batches)
        if before is not None:
            self._compare((before.count, before._mark), "in the iteration before this one")
        self._compare(self._length, "the number of its batches")
        self._random = DrawingState(parts.world)
        with self._random.told():
            self._batches = iter(parts.batches)

    def __next__(self) -> Any:
        """Where there are no samples for this process, some that others have as well."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "Expected a DataLoader that draws samples on the thread that iterates over it, got "
                "another thread: processes would talk to each other on two at once. Load batches "
                "ahead by DataLoader(num_workers=..., prefetch_factor=...)."
            )
        if self._is_over or (indices := self._drawn()) is _END:
            raise StopIteration
        indices = _as_sequence(indices)
        sizes = self._parts.share(len(indices))
        self.sizes.append(sizes)
        rank = self._world.rank
        start = sum(sizes[:rank])
        own = indices[start : start + sizes[rank]]
        self._tell_writer(own)
        return own if sizes[rank] else indices[:IDLE]

    def _drawn(self) -> Any:
        """The next batch's indices; those of all processes."""
        if self._is_over:
            return _END
        if self.count == 0:
            with self._random.told():
                indices = next(self._batches, _END)
        elif _draws_at_once(self._parts.batches):
            indices = next(self._batches, _END)
        else:
            with self._random.continued():
                indices = next(self._batches, _END)
        self._is_over = indices is _END
        if not self._is_over:
            self.count += 1
            self._mark = zlib.crc32(_text(indices).encode(), self._mark)
        is_power_of_two = not self.count & (self.count - 1)
        if self._is_over or is_power_of_two or self._length is None:
            self._compare((self.count, self._mark, self._is_over), "up to batch {0[0]}")
        return indices

    def _compare(self, own: Any, what: str) -> None:
        from lightning_dp.parallel.processes import check_together

        drawn = self._world.gather(_Drawn(own))
        check_together(drawn)  # others may be at something else, that one process alone has begun
        told = [its.value for its in drawn]
        if others := [rank for rank, its in enumerate(told) if its != told[0]]:
            raise RuntimeError(
                f"Expected every process to draw the same samples as process 0, got others in "
                f"{'process' if len(others) == 1 else 'processes'} "
                f"{', '.join(map(str, others))}: {what.format(told[0])}. {_SAME}"
            )

    def _tell_writer(self, own: Sequence[Any]) -> None:
        """What Lightning's sampler in `predict` notes for writers is this process's part."""
        seen = getattr(self._parts.batches, "seen_batch_indices", None)
        if isinstance(seen, list) and seen:
            seen[-1] = list(own)


def length_of(batches: Iterable[Any]) -> int | None:
    """How many there are, if they know it: torch's loaders may have no length, or not know it."""
    try:
        return len(cast(Sized, batches))
    except (TypeError, NotImplementedError):
        return None


def _draws_at_once(batches: Iterable[Any]) -> bool:
    """Whether it takes random numbers with the first batch alone, as torch's own samplers do.

    A sampler of ours that wraps one tells which by `draws_as`. To exchange NumPy's state for each
    batch would cost some 0.4 ms.
    """
    batches = getattr(batches, "draws_as", batches)
    return type(batches) is BatchSampler and type(batches.sampler) in _DRAW_AT_ONCE


def _as_sequence(indices: Any) -> Any:
    """A batch's indices, to be cut: lists, tuples, tensors and arrays as they are."""
    if isinstance(indices, (list, tuple)) or getattr(indices, "ndim", 0) == 1:
        return indices
    if isinstance(indices, (str, bytes)) or not isinstance(indices, Iterable):
        raise _no_batch(indices)
    return list(indices)


def _no_batch(indices: object) -> ValueError:
    return ValueError(
        "Expected a DataLoader whose sampler yields lists of indices, since each process loads its "
        f"part of a batch, got {indices!r} with batch_size=None. Give it a batch_size, or a "
        "sampler that yields lists, such as BatchSampler(sampler, batch_size, drop_last)."
    )


def _text(indices: Any) -> str:
    """What tells one batch from another, in every process alike."""
    if isinstance(indices, Tensor) or hasattr(indices, "tolist"):
        indices = indices.tolist()
    elif not isinstance(indices, (list, tuple)) and isinstance(indices, Iterable):
        return ""  # may be iterated over once alone
    return re.sub(r" at 0x[0-9a-f]+", "", repr(indices))
