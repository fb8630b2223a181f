"""Every process loads its part of each batch: together they are what one device would load."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from worlds import Together, flat, in_turn, together

from lightning_dp.parallel.processes import World
from lightning_dp.parallel.split import between_processes
from lightning_dp.processes.loaders import of_process
from lightning_dp.processes.slices import Slice, opened

Make = Callable[[], Any]


class Rows(Dataset[Tensor]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Tensor:
        return torch.as_tensor(i)


class RowsAtOnce(Rows):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.tensor(i) for i in indices]


class Shuffling(Sampler[list[int]]):
    """Batches of varying sizes, drawn with random numbers of Python or NumPy, at once or lazily."""

    def __init__(self, n: int, kind: str) -> None:
        self.n, self.kind = n, kind

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.n))
        if self.kind == "eager python":
            random.shuffle(order)
            return iter([order[i : i + 4] for i in range(0, self.n, 4)])
        return self._lazily(order)

    def _lazily(self, order: list[int]) -> Iterator[list[int]]:
        while order:
            if self.kind == "numpy":
                size = int(np.random.randint(1, 6))
            elif self.kind == "python":
                size = random.randint(1, 5)
            else:
                size = int(torch.randint(1, 6, ()))
            yield order[:size]
            order = order[size:]


class Transforming(DataLoader[Any]):
    """A DataLoader of the user's, that does something to each batch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 0


class WithEpoch(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.n, generator=generator).tolist())

    def __len__(self) -> int:
        return self.n


def loaders(n: int, b: int) -> dict[str, Make]:
    """Ways to make a DataLoader."""
    rows = Rows(n)
    generator = partial(torch.Generator().manual_seed, 3)
    return {
        "plain": lambda: DataLoader(rows, batch_size=b),
        "shuffled": lambda: DataLoader(rows, batch_size=b, shuffle=True),
        "own generator": lambda: DataLoader(
            rows, batch_size=b, shuffle=True, generator=generator()
        ),
        "drop_last": lambda: DataLoader(rows, batch_size=b, shuffle=True, drop_last=True),
        "replacement": lambda: DataLoader(
            rows, batch_size=b, sampler=RandomSampler(rows, replacement=True, num_samples=n + 3)
        ),
        "weighted": lambda: DataLoader(
            rows, batch_size=b, sampler=WeightedRandomSampler([1.0] * n, n)
        ),
        "own sampler": lambda: DataLoader(rows, batch_size=b, sampler=WithEpoch(n)),
        "own batches": lambda: DataLoader(
            rows, batch_sampler=BatchSampler(WithEpoch(n), b, drop_last=False)
        ),
        "lists of lists": lambda: DataLoader(
            rows, batch_sampler=[list(range(i, min(n, i + b))) for i in range(0, n, b)]
        ),
        "bulk": lambda: DataLoader(
            rows, batch_size=None, sampler=BatchSampler(SequentialSampler(rows), b, False)
        ),
        "at once": lambda: DataLoader(RowsAtOnce(n), batch_size=b, shuffle=True),
        "collate": lambda: DataLoader(rows, batch_size=b, collate_fn=torch.stack),
        "own iter": lambda: Transforming(rows, batch_size=b, shuffle=True),
        "eager python": lambda: DataLoader(rows, batch_sampler=Shuffling(n, "eager python")),
        "lazy python": lambda: DataLoader(rows, batch_sampler=Shuffling(n, "python")),
        "lazy numpy": lambda: DataLoader(rows, batch_sampler=Shuffling(n, "numpy")),
        "lazy torch": lambda: DataLoader(rows, batch_sampler=Shuffling(n, "torch")),
        "tensors": lambda: DataLoader(
            rows, batch_size=None, sampler=[torch.arange(n)[i : i + b] for i in range(0, n, b)]
        ),
        "for writers": lambda: DataLoader(
            rows, batch_sampler=_IndexBatchSamplerWrapper(BatchSampler(WithEpoch(n), b, False))
        ),
    }


KINDS = list(loaders(1, 1))


def share_of(*device_counts: int) -> Callable[[int], Any]:
    return partial(between_processes, device_counts=device_counts)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def epochs(loader: Any, count: int = 2) -> list[Any]:
    """The batches of some epochs; other code takes random numbers before and after each."""
    seen = []
    for _ in range(count):
        torch.rand(1)
        seen.append([batch if isinstance(batch, Slice) else batch.tolist() for batch in loader])
        torch.rand(1)
    return seen


def states() -> Any:
    return torch.rand(3).tolist(), random.random(), np.random.random()


@pytest.mark.parametrize("kind", KINDS)
def test_all_parts_together_are_the_batches_of_one_device(kind: str) -> None:
    for n, b in [(7, 3), (1, 2), (12, 4), (9, 8), (5, 1)]:
        for counts in [(1, 1), (2, 1), (1, 1, 1), (1, 2, 1, 1), (3,)]:
            check_parts(kind, counts, n, b)


def check_parts(kind: str, counts: tuple[int, ...], n: int, b: int) -> None:
    seed(0)
    expected = epochs(loaders(n, b)[kind]())
    after = states()

    def job(world: World) -> Any:
        seed(10 * world.rank)
        loader = of_process(loaders(n, b)[kind](), share_of(*counts), world)
        seen = epochs(loader)
        return seen, states(), loader.yielded

    results = in_turn(job, len(counts))
    assert results[0][1] == after, "the first process's random numbers are not one device's"
    for epoch, batches in enumerate(expected):
        parts = [result[0][epoch] for result in results]
        assert [len(own) for own in parts] == [len(batches)] * len(counts)
        assert all(result[2] == len(result[0][-1]) for result in results)
        for batch, slices in zip(batches, zip(*parts, strict=True), strict=True):
            assert [part.rank for part in slices] == list(range(len(counts)))
            assert slices[0].sizes == between_processes(len(batch), counts)
            own = [part.batch.tolist() for part in slices if not part.is_idle]
            assert flat(own) == batch
            for part in slices:
                assert part.is_idle == (part.sizes[part.rank] == 0)
                assert not part.is_idle or part.batch.tolist() == batch[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_loader_stays_as_it_is_and_the_copy_looks_like_it(kind: str) -> None:

    def job(world: World) -> None:
        loader = loaders(7, 3)[kind]()
        before = dict(vars(loader))
        own = of_process(loader, share_of(1, 1), world)
        assert isinstance(own, type(loader)) and type(own).__name__ == type(loader).__name__
        assert (own.dataset, own.sampler) == (loader.dataset, loader.sampler)
        assert (own.batch_sampler, own.batch_size) == (loader.batch_sampler, loader.batch_size)
        if "lazy" not in kind and kind != "eager python":
            assert len(own) == len(loader)
        list(own)
        assert vars(loader) == before

    in_turn(job, 2)


def test_a_loader_that_is_a_processes_own_already_is_cut_once() -> None:
    """Lightning puts what it got into the user's CombinedLoader."""

    def job(world: World) -> Any:
        own = of_process(DataLoader(Rows(6), batch_size=4), share_of(1, 1), world)
        twice = of_process(own, share_of(1, 1), world)
        made_anew = type(own)(own.dataset, batch_size=4)  # as Lightning does in predict
        thrice = of_process(made_anew, share_of(1, 1), world)
        return [[part.batch.tolist() for part in each] for each in (twice, thrice)]

    assert in_turn(job, 2) == [[[[0, 1], [4]]] * 2, [[[2, 3], [5]]] * 2]


def test_several_shuffled_loaders_draw_as_on_one_device() -> None:
    """Each DataLoader takes a seed when its iteration begins, before samples are drawn."""

    def made() -> list[Any]:
        return [DataLoader(Rows(6), batch_size=2, shuffle=True) for _ in range(2)]

    torch.manual_seed(0)
    combined = CombinedLoader(made(), "max_size_cycle")
    expected = [[part.tolist() for part in batch] for batch, _, _ in combined]

    def job(world: World) -> Any:
        own = [of_process(loader, share_of(1, 1), world) for loader in made()]
        return [opened(batch)[0] for batch, _, _ in CombinedLoader(own, "max_size_cycle")]

    first, second = in_turn(job, 2)
    for batch, one, other in zip(expected, first, second, strict=True):
        assert batch == [[*a.tolist(), *b.tolist()] for a, b in zip(one, other, strict=True)]


def test_two_iterations_over_one_loader_do_not_mix() -> None:
    def job(world: World) -> Any:
        loader = of_process(DataLoader(Rows(5), batch_size=2), share_of(1, 1), world)
        first = iter(loader)
        seen = [next(first)]
        second = iter(loader)
        seen += [next(second), next(first), next(second), next(first)]
        return [(part.batch.tolist(), part.is_idle) for part in seen]

    idle = ([4], True)
    mine = [([0], False), ([0], False), ([2], False), ([2], False), ([4], False)]
    other = [([1], False), ([1], False), ([3], False), ([3], False), idle]
    assert in_turn(job, 2) == [mine, other]


def test_writers_are_told_the_indices_of_the_own_samples() -> None:
    def job(world: World) -> Any:
        wrapper = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(Rows(5)), 2, False))
        loader = of_process(DataLoader(Rows(5), batch_sampler=wrapper), share_of(1, 1), world)
        assert loader.batch_sampler is wrapper
        list(loader)
        return wrapper.seen_batch_indices

    assert in_turn(job, 2) == [[[0], [2], [4]], [[1], [3], []]]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"in_order": False}], ids=str)
def test_workers_load_the_parts(options: dict[str, Any]) -> None:
    def job(world: World) -> Any:
        plain = DataLoader(
            Rows(9), batch_size=4, num_workers=2, prefetch_factor=3, pin_memory=True, **options
        )
        loader = of_process(plain, share_of(1, 1), world)
        seen = [[(part.batch.tolist(), part.is_idle) for part in loader] for _ in range(2)]
        assert (plain._iterator is None) and plain.in_order == options.get("in_order", True)
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
        return seen

    first, second = in_turn(job, 2)
    assert first == [[([0, 1], False), ([4, 5], False), ([8], False)]] * 2
    assert second == [[([2, 3], False), ([6, 7], False), ([8], True)]] * 2


# What is refused


def of_rank(world: World, make: Callable[[int], DataLoader[Any]]) -> Any:
    """What iterating gives in a world whose processes have different loaders."""
    loader = of_process(make(world.rank), share_of(1, 1), world)
    return [part.batch.tolist() for part in loader]


def _seeded_by_rank(rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(Rows(32), batch_size=4, shuffle=True, generator=generator)


def _of_other_length(rank: int) -> DataLoader[Any]:
    return DataLoader(Rows(32 + 4 * rank), batch_size=4)


def _parting_later(rank: int) -> DataLoader[Any]:
    order = [[0, 1], [2, 3], [4, 5], [6 + rank, 7]]
    return DataLoader(Rows(9), batch_sampler=order)


def _of_unknown_length(rank: int) -> DataLoader[Any]:
    class Unsized(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield from [[0, 1]] * (5 + rank)

    return DataLoader(Rows(9), batch_sampler=Unsized())


@pytest.mark.parametrize(
    "make, text",
    [
        (_seeded_by_rank, "up to batch 1"),
        (_of_other_length, "the number of its batches"),
        (_parting_later, "up to batch 4"),
        (_of_unknown_length, "up to batch 5"),
    ],
)
def test_processes_that_draw_other_samples_are_told(make: Any, text: str) -> None:
    results = together(partial(of_rank, make=make), 2)
    for error in results:
        assert isinstance(error, RuntimeError)
        assert "in process 1" in str(error) and text in str(error)
        assert "must not depend on the rank" in str(error)


def test_what_an_iteration_that_was_left_has_drawn_is_compared_in_the_next() -> None:
    def job(world: World) -> None:
        order = [[0], [1], [2 + world.rank], [3], [4]]
        loader = of_process(DataLoader(Rows(9), batch_sampler=order), share_of(1, 1), world)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        iter(loader)

    for error in together(job, 2):
        assert isinstance(error, RuntimeError) and "in the iteration before" in str(error)


def test_comparing_costs_few_exchanges() -> None:
    def job(world: World) -> int:
        list(of_process(DataLoader(Rows(2000), batch_size=2), share_of(1, 1), world))
        assert isinstance(world, Together)
        return world.calls

    # its length; random numbers at the start and at the first batch; 1, 2, 4 ... 512; the end
    assert together(job, 2) == [1 + 2 + 10 + 1] * 2


class Skipping(DataLoader[Any]):
    def __iter__(self) -> Any:
        for i, batch in enumerate(super().__iter__()):
            if i % 2:
                yield batch


class Ahead(DataLoader[Any]):
    """Has begun to load before anybody has asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running = super().__iter__()

    def __iter__(self) -> Any:
        yield from self.running


class Merging(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = super().__iter__()
        yield next(batches)
        list(batches)


@pytest.mark.parametrize("kind", [Skipping, Ahead, Merging])
def test_an_own_iter_that_does_not_yield_batch_for_batch_is_refused(kind: Any) -> None:
    def job(world: World) -> None:
        loader = kind(Rows(8), batch_size=2)
        list(of_process(loader, share_of(1, 1), world))

    with pytest.raises(TypeError, match=f"{kind.__name__}: expected an __iter__ that yields one"):
        in_turn(job, 2)


def test_a_loader_that_draws_in_another_thread_is_refused() -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Background(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            with ThreadPoolExecutor(1) as pool:
                while (batch := pool.submit(next, batches, None).result()) is not None:
                    yield batch

    with pytest.raises(RuntimeError, match="draws samples on the thread that iterates"):
        list(of_process(Background(Rows(8), batch_size=2), share_of(1), in_turn(lambda w: w, 1)[0]))


@pytest.mark.parametrize("where", ["sampler", "batch_sampler"])
def test_a_distributed_sampler_is_refused(where: str) -> None:
    sampler = DistributedSampler(Rows(8), num_replicas=2, rank=0)
    options: Any = {"sampler": sampler, "batch_size": 2}
    if where == "batch_sampler":
        options = {"batch_sampler": BatchSampler(sampler, 2, False)}
    with pytest.raises(ValueError, match="DistributedSampler, which shares samples out among 2"):
        in_turn(lambda w: of_process(DataLoader(Rows(8), **options), share_of(1, 1), w), 2)


def test_whole_batches_of_a_map_style_data_set_are_refused() -> None:
    loader = DataLoader(Rows(8), batch_size=None)
    with pytest.raises(ValueError, match="a sampler that yields lists, such as BatchSampler"):
        in_turn(lambda world: list(of_process(loader, share_of(1, 1), world)), 2)


# Several loaders


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize("of", [list, dict], ids=["list", "dict"])
def test_batches_of_several_loaders_are_opened(mode: Any, of: Any) -> None:
    def combined(loaders: list[Any]) -> CombinedLoader:
        return CombinedLoader(
            dict(zip("ab", loaders, strict=True)) if of is dict else loaders, mode
        )

    def made() -> list[Any]:
        return [DataLoader(Rows(n), batch_size=4) for n in (8, 16)]

    def plain(tree: Any) -> Any:
        parts = tree.values() if isinstance(tree, dict) else tree
        if isinstance(tree, Tensor):
            return tree.tolist()
        return [None if part is None else part.tolist() for part in parts]

    expected = [plain(batch) for batch, _, _ in combined(made())]

    def job(world: World) -> Any:
        own = combined([of_process(loader, share_of(1, 1), world) for loader in made()])
        batches = [opened(batch) for batch, _, _ in own]
        assert not any(is_idle for _, is_idle in batches)
        assert all(isinstance(batch, (of, Tensor)) for batch, _ in batches)
        return [plain(batch) for batch, _ in batches]

    def whole(one: Any, other: Any) -> Any:
        if one is None or not isinstance(one[0], (list, type(None))):
            return one and [*one, *other]
        return [whole(a, b) for a, b in zip(one, other, strict=True)]

    first, second = in_turn(job, 2)
    assert [whole(a, b) for a, b in zip(first, second, strict=True)] == expected


def test_samples_of_one_loader_and_none_of_another_are_refused_in_every_process() -> None:
    for rank in range(2):
        batch = {"a": Slice(torch.ones(2), (2, 2), rank), "b": Slice(torch.ones(1), (1, 0), rank)}
        with pytest.raises(ValueError, match=r"got \[2, 0\] samples in process 1"):
            opened(batch)


def test_a_batch_without_slices_stays_the_same_object() -> None:
    batch = {"a": [torch.ones(2)]}
    assert opened(batch) == (batch, False) and opened(batch)[0] is batch


def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_turn(lambda w: list(of_process(DataLoader(Rows(4)), share_of(1, 1), w)), 2)
