"""Steps that take `dataloader_iter`, in step mode: each replica has an iterator of its shards.

Lightning's own iterator is asked on the main thread alone: once before the replicas begin, for the
batch that decides the sizes, and again whenever they all ask for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dp.parallel.batch import Inferred, cut_for, infer_for
from lightning_dp.parallel.workers import Calls, current_participant
from lightning_dp.processes import is_idle_in, is_of_several

Item: TypeAlias = tuple[Any, int, int]
"""A batch, its number, and that of its DataLoader."""

_NEXT = "next(dataloader_iter)"


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Whether the loop gives a step an iterator over batches, in the place of a batch."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


class Pulled:
    """The batches that one step takes from an iterator: pulled once, for all replicas.

    A step that takes several at once may compute with one of them in the next step. Replicas'
    losses are weighted by their samples, so from then on all batches have to be of one size.

    Args:
        module: the root's.
        source: Lightning's iterator.
        previous: what the step before took.
        dim: the dimension along which batches are cut.
    """

    def __init__(
        self, module: LightningModule, source: Any, previous: Pulled | None = None, dim: int = 0
    ) -> None:
        self._module = module
        self.source = source
        self._dim = dim
        self._items: list[Item] = []
        self._idle: list[bool] = []  # with several processes: whether this one has no samples of it
        self.is_used = False
        self.size: int | None = None  # of all batches, once it matters
        if previous is not None and previous.source is source:
            self.size = previous.size

    @property
    def ahead(self) -> int:
        """How many batches have been pulled."""
        return len(self._items)

    def item(self, i: int) -> Item:
        """The i-th batch of the step. A step that is run again gets the same ones."""
        while len(self._items) <= i:
            self._items.append(next(self.source))
            self._idle.append(is_idle_in(self.source))
        return self._items[i]

    def first(self) -> Any:
        """The batch that is split before the step begins."""
        batch, *_ = self.item(0)
        if self.size is not None:
            self._checked(batch, 0)
        return batch

    def of_replica(self, shard: Any, _: torch.device) -> ShardIterator:
        """What a replica's step is given for its shard, which it moves itself as any such step."""
        return ShardIterator(self, shard)

    def more(self, calls: Calls, numbers: list[int]) -> Sequence[Any]:
        """The shards of a further batch, for replicas that all have come for it."""
        i = numbers[0]
        batch, *_ = self.item(i)
        sizes = tuple(calls.sizes or ())
        if len(sizes) == 1 and not is_of_several(self.source):
            return [batch]
        self.size = 0 if self._idle[0] else sum(sizes)
        checked = self._checked(batch, i)
        if len(sizes) == 1:
            return [batch]
        return cut_for(self._module, batch, checked, sizes, self._dim, calls.order)

    def _checked(self, batch: Any, i: int) -> Inferred:
        inferred = infer_for(self._module, batch, self._dim)
        size = 0 if self._idle[i] else inferred.size
        if size != self.size:
            raise ValueError(
                "dataloader_iter: expected batches of one size where a step takes several, got "
                f"{self.size} and then {size} samples. Replicas' losses are weighted by "
                "their samples. Set drop_last=True in the DataLoader, take one batch in a step, or "
                'use DataParallelStrategy(mode="forward").'
            )
        return inferred

    def check_used(self, step: str) -> None:
        """Raises an error if the step has left the batch to the next one."""
        if not self.is_used:
            raise ValueError(
                f"{step}: expected a step that takes a batch from dataloader_iter, got one that "
                "took none. Step mode has to split a batch first. Take one in every step, or use "
                'DataParallelStrategy(mode="forward").'
            )


class ShardIterator(Iterator[Item]):
    """Lightning's iterator as one replica sees it: shards, with the batches' own numbers."""

    def __init__(self, pulled: Pulled, shard: Any) -> None:
        self._pulled = pulled
        self._first = shard
        self._taken = 0

    def __next__(self) -> Item:
        """This replica's shard of the next batch; of a step's first one it is there already."""
        i, pulled = self._taken, self._pulled
        shard = self._first if i == 0 else self._meet(i)
        self._taken, pulled.is_used = i + 1, True
        _, batch_idx, dataloader_idx = pulled.item(i)
        return shard, batch_idx, dataloader_idx

    def _meet(self, i: int) -> Any:
        participant = current_participant()
        if participant is None:
            raise RuntimeError(
                f"{_NEXT}: expected to be called by the step itself, got a call from another "
                "thread. All replicas take their shards of a batch together."
            )
        return participant.meet(_NEXT, i, self._pulled.more)

    @property
    def _waiting(self) -> int:
        return self._pulled.ahead - self._taken

    @property
    def done(self) -> bool:
        """Whether this was the last batch."""
        return not self._waiting and bool(self._pulled.source.done)

    @property
    def fetched(self) -> int:
        """How many batches have been taken in this epoch."""
        return int(self._pulled.source.fetched) - self._waiting

    @property
    def length(self) -> int | None:
        """How many batches there are, if that is known."""
        length: int | None = self._pulled.source.length
        return length
