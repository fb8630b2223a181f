"""Streams: iterables, of which each process says what its share is.

A stream has no indices that all processes could draw. So a data set, or another iterable, either
has a method `shard(num_shards, index)`, which returns the part of one process, or says by
`is_sharded = True` that it yields the part of its process alone already: by what it reads in the
environment, for instance. Workers of a DataLoader go on to share out a process's part among them,
by `torch.utils.data.get_worker_info`, as they do on one device.

`batch_size` is that of all processes: each takes its part of it from its own stream. A process
whose stream ends before the others' takes part with a batch that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_dp.processes.draws import Share, length_of
from lightning_dp.processes.slices import Slice
from lightning_dp.processes.torch_loaders import copied

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

_END = object()


class Stream(Iterator[Slice]):
    """A process's own batches, as many as the process has that has most.

    Before each batch, processes tell each other whether they have one: a small sum.
    """

    def __init__(self, own: Iterator[Any], world: World) -> None:
        self._own, self._world = own, world
        self._is_over = self._has_ended = False
        self._latest: Any = _END

    def __next__(self) -> Slice:
        """Where this process has no more, the last one that it had; else another process's."""
        if self._is_over:
            raise StopIteration
        batch = _END if self._has_ended else next(self._own, _END)
        self._has_ended = batch is _END
        count = torch.tensor([int(not self._has_ended)])
        self._world.sum_(count)
        self._is_over = not count
        if self._is_over:
            raise StopIteration
        sizes = (1,) * self._world.size
        if count < self._world.size:
            sizes = self._filled(batch)
        if not self._has_ended:
            self._latest = batch
        return Slice(self._latest, sizes, self._world.rank)

    def _filled(self, batch: Any) -> tuple[int, ...]:
        """Who has a batch; one who never had any gets the first of these."""
        needs = self._has_ended and self._latest is _END
        told = self._world.gather((not self._has_ended, needs))
        sizes = tuple(int(has) for has, _ in told)
        if any(need for _, need in told):
            source = sizes.index(1)
            sent = batch if self._world.rank == source else None
            sent = self._world.broadcast(sent, source)
            if needs:
                self._latest = sent
        return sizes


class StreamLoader(DataLoader[Any]):
    """A DataLoader of an iterable data set: batches are slices.

    Attributes:
        plain: the class of the user's loader.
        whole: the user's data set, of all processes.
        batches: how many there will be, if that is known.
        yielded: how many batches have been yielded since its latest `iter()`.
    """

    plain: ClassVar[type[DataLoader[Any]]]
    whole: ClassVar[Any]
    world: World
    batches: int | None
    yielded: int

    def __iter__(self) -> Any:
        """One slice after another."""
        self.yielded = 0
        return self._counted(Stream(iter(super().__iter__()), self.world))

    def _counted(self, slices: Stream) -> Iterator[Slice]:
        for part in slices:
            self.yielded += 1
            yield part

    def __len__(self) -> int:
        """Those of the process that has most."""
        return _known(self.batches, self)


class SharedIterable:
    """An iterable that is no DataLoader: batches are slices.

    Everything else is asked of the process's own one.
    """

    def __init__(self, whole: Any, world: World) -> None:
        self.whole, self._world = whole, world
        self.own = own_share(whole, world)
        self._batches = _most(length_of(self.own), world)

    def __iter__(self) -> Stream:
        """One slice after another."""
        return Stream(iter(self.own), self._world)

    def __len__(self) -> int:
        """Those of the process that has most."""
        return _known(self._batches, self.own)

    def __getattr__(self, name: str) -> Any:
        """That of the process's own one."""
        if name in ("own", "whole"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.own, name)


def streamed(loader: DataLoader[Any], share: Share, world: World) -> StreamLoader:
    """A DataLoader like this one, which loads this process's share of an iterable data set."""
    plain: type[DataLoader[Any]] = type(loader)
    whole: Any = loader.dataset
    if isinstance(loader, StreamLoader):  # Lightning gives a CombinedLoader what it has got
        plain, whole = type(loader).plain, type(loader).whole
    bases = (StreamLoader,) if plain is DataLoader else (StreamLoader, plain)
    kind = type(plain.__name__, bases, {"plain": plain, "whole": whole})
    dataset = own_share(whole, world)
    size, batch_sampler = 1, None
    if loader.batch_size is not None:
        size = share(loader.batch_size)[world.rank]
        _check_everyone_reads(share(loader.batch_size), loader.batch_size)
        batch_sampler = BatchSampler(cast(Any, loader.sampler), size, loader.drop_last)
    samples = length_of(dataset)
    batches = None if samples is None else _batches(samples, size, loader.drop_last)
    return copied(
        loader,
        kind,
        dataset=dataset,
        batch_sampler=batch_sampler,
        in_order=True,
        world=world,
        batches=_most(batches, world),
        yielded=0,
    )


def own_share(whole: Any, world: World) -> Any:
    """What this process is to read of an iterable."""
    if getattr(whole, "is_sharded", False):
        return whole
    shard = getattr(whole, "shard", None)
    if not callable(shard):
        raise TypeError(
            f"{type(whole).__name__}: expected an iterable that says which share of it is this "
            f"process's, as there are {world.size} processes and no indices that they could share "
            "out, got one that does not. Give it a method shard(num_shards, index) that returns "
            "the part of one process, or set is_sharded = True on it if it yields that part alone "
            "already."
        )
    return shard(num_shards=world.size, index=world.rank)


def _check_everyone_reads(sizes: tuple[int, ...], batch_size: int) -> None:
    if 0 in sizes:
        raise ValueError(
            f"batch_size: expected at least one sample for each process, got {batch_size}, of "
            f"which they get {list(sizes)}: the stream of process {sizes.index(0)} would never be "
            "read. batch_size is that of all processes: choose a larger one."
        )


def _batches(samples: int, size: int, drop_last: bool) -> int:
    return samples // size if drop_last else -(-samples // size)


def _most(own: int | None, world: World) -> int | None:
    told = [length for length in world.gather(own) if length is not None]
    return max(told) if len(told) == world.size else None


def _known(length: int | None, of: object) -> int:
    if length is None:
        raise TypeError(f"{type(of).__name__} has no len() in every process")
    return length
