"""Steps that take `dataloader_iter` see and leave what they see and leave on one device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from oracle import Classifier, Run, assert_equal_trees, assert_same, loader, run, samples, trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp import DataParallelStrategy
from lightning_dp.modes.dataloader_iter import takes_iterator

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),
]


class Iterating(Classifier):
    """All of its steps take the iterator, and move what they get themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: dict[str, list[Any]] = {}

    def take(self, stage: str, dataloader_iter: Any) -> Any:
        batch, *indices = next(dataloader_iter)
        known = (dataloader_iter.done, dataloader_iter.fetched, dataloader_iter.length)
        root = self.trainer.lightning_module
        if root is self:  # the user's own module: replica 0, or the only one
            self.indices.setdefault(stage, []).append((*indices, *known))
        return [x.to(self.device) for x in batch]

    def loss_of(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, dataloader_iter: Any) -> Any:
        batch = self.take("train", dataloader_iter)
        loss = self.loss_of(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, dataloader_iter: Any) -> Any:
        batch = self.take("val", dataloader_iter)
        self.log("val/loss", self.loss_of(batch), batch_size=len(batch[0]))

    def test_step(self, dataloader_iter: Any) -> Any:
        batch = self.take("test", dataloader_iter)
        self.log("test/loss", self.loss_of(batch), batch_size=len(batch[0]))

    def predict_step(self, dataloader_iter: Any) -> Any:
        return self(self.take("predict", dataloader_iter)[0])


class Manual(Iterating):
    """The same by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, dataloader_iter: Any) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(dataloader_iter)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Pairs(Iterating):
    """Two batches in a training step, as long as there are two."""

    def training_step(self, dataloader_iter: Any) -> Any:
        losses = [super().training_step(dataloader_iter)]
        try:
            losses.append(super().training_step(dataloader_iter))
        except StopIteration:
            losses.append(losses[0] * 0.5)
        return sum(losses)


class PairsByHand(Manual):
    """Gradients of two batches, by hand."""

    def training_step(self, dataloader_iter: Any) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Iterating.training_step(self, dataloader_iter))
        if not dataloader_iter.done:
            self.manual_backward(Iterating.training_step(self, dataloader_iter))
        optimizer.step()


class AsksTheStrategy(Iterating):
    """Batches are moved by the Trainer's hooks, as Lightning does it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def take(self, stage: str, dataloader_iter: Any) -> Any:
        batch, _, dataloader_idx = next(dataloader_iter)
        moved = self.trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        assert moved[0].device == self.device
        return moved


class Searching(Iterating):
    """An optimizer that calls the step several times takes several batches."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Skipping(Iterating):
    """Some steps return nothing, and sums of losses count in what the mean is over."""

    def training_step(self, dataloader_iter: Any) -> Any:
        loss = super().training_step(dataloader_iter)
        return {"loss": loss, "extra": loss.detach() * 2}


class Unsized(IterableDataset[Any]):
    """Nobody knows the length before the end."""

    def __iter__(self) -> Iterator[Any]:
        return iter([samples(30)[i] for i in range(30)])


def unsized() -> DataLoader[Any]:
    return DataLoader(Unsized(), batch_size=8)


def even() -> DataLoader[Any]:
    return loader(30, 10)


@functools.lru_cache
def on_one(make: Any, data: Any) -> Run:
    return run(make, 1, data=data)


def compared(make: Any, strategy: dict[str, Any], data: Any) -> None:
    torch.set_default_dtype(torch.float64)
    several, one = run(make, 3, strategy=strategy, data=data), on_one(make, data)
    assert_same(several, one)
    assert several.module.indices == one.module.indices


STRATEGIES = [
    {"executor": "threads"},
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in ({"executor": "inorder"}, {"weights": [1, 0, 3]}, {"mode": "forward"})
    ),
]
EXECUTORS = [pytest.param("threads", marks=pytest.mark.slow), "inorder"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [Iterating, Manual, AsksTheStrategy, Skipping])
def test_every_step_may_take_the_iterator(on: str, make: Any, strategy: Any) -> None:
    if make is AsksTheStrategy and strategy.get("mode") == "forward":
        pytest.skip("the batch of forward mode is on the output device, not on the root's")
    compared(make, strategy, loader)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [Pairs, PairsByHand])
def test_a_step_may_take_several_batches(on: str, make: Any, strategy: Any) -> None:
    compared(make, strategy, even)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("make", [Iterating, Manual])
def test_the_end_of_data_of_unknown_length(on: str, make: Any, executor: str) -> None:
    compared(make, {"executor": executor}, unsized)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_sees_the_end_of_the_data_itself() -> None:
    class Last(Iterating):
        """Trains once more on nothing, in place of the batch that does not come."""

        ends = 0

        def training_step(self, dataloader_iter: Any) -> Any:
            try:
                return super().training_step(dataloader_iter)
            except StopIteration:
                self.trainer.lightning_module.ends += 1
                return None

    runs = []
    for devices in (3, 1):
        torch.manual_seed(0)
        module = Last()
        trainer(devices, max_epochs=2, limit_val_batches=0).fit(module, unsized(), unsized())
        runs.append((module.ends, module.indices))
    assert runs[0] == runs[1] and runs[0][0] == 2


def test_an_optimizer_that_calls_the_step_again_takes_more_batches(on: str) -> None:
    compared(Searching, {}, lambda: loader(40, 5))


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_numbers_of_batches_and_loaders(on: str, mode: str) -> None:
    seen: list[Any] = []

    class Hooks(Callback):
        def on_validation_batch_end(
            self,
            job: Any,
            module: Any,
            outputs: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int = 0,
        ) -> None:
            seen[-1].append((len(batch[0]), batch_idx, dataloader_idx))

        def on_train_batch_end(self, job: Any, module: Any, out: Any, batch: Any, idx: int) -> None:
            seen[-1].append((len(batch[0]), idx, out["loss"].shape))

    results = []
    for devices in (3, 1):
        seen.append([])
        torch.manual_seed(0)
        module = Iterating()
        job = trainer(devices, DataParallelStrategy(mode=mode), callbacks=[Hooks()])
        job.fit(module, loader(), [loader(20, 9), loader(12, 5)])
        results.append(module.indices)
    assert results[0] == results[1] and seen[0] == seen[1]
    assert any(dataloader_idx == 1 for _, dataloader_idx, *_ in results[0]["val"])


class Columns(Iterating):
    """Samples are columns."""

    def take(self, stage: str, dataloader_iter: Any) -> Any:
        x, y = super().take(stage, dataloader_iter)
        return x.T, y[0]


def columns() -> DataLoader[Any]:
    whole = samples(24)
    batches = [(x.T.contiguous(), y[None]) for x, y in DataLoader(whole, batch_size=8)]
    return DataLoader(batches, batch_size=None)


class ColumnPairs(Columns, PairsByHand):
    """Two at a time."""


@pytest.mark.parametrize("make", [Columns, ColumnPairs])
def test_batches_may_be_cut_along_another_dim(make: Any) -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"dim": 1, "gather_overrides": {"": "cat"}}
    ends = []
    for devices, strategy in ((3, DataParallelStrategy(**options)), (1, "auto")):
        torch.manual_seed(0)
        module = make()
        trainer(devices, strategy, max_epochs=2).fit(module, columns(), columns())
        ends.append(module)
    assert_equal_trees(ends[0].state_dict(), ends[1].state_dict(), "state", atol=1e-10, rtol=0.0)
    assert ends[0].indices == ends[1].indices


def test_one_sample_runs_on_one_replica() -> None:
    compared(Iterating, {}, lambda: loader(7, 3))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_batches_of_two_sizes_in_one_step_are_refused(on: str, executor: str) -> None:
    data = loader(14, 8)
    with pytest.raises(ValueError, match=r"batches of one size .* got 8 and then 6 samples"):
        job = trainer(3, DataParallelStrategy(executor=executor))
        job.fit(Pairs(), data, loader(4))


class Ahead(Iterating):
    """Pulls the next batch before it computes with this one."""

    latest: Any = None

    def training_step(self, dataloader_iter: Any) -> Any:
        batch = self.latest or self.take("train", dataloader_iter)
        self.latest = None if dataloader_iter.done else self.take("train", dataloader_iter)
        loss = self.loss_of(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss


@pytest.mark.filterwarnings("ignore:A step binds Ahead.latest to different values")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_may_pull_ahead(on: str, executor: str) -> None:
    compared(Ahead, {"executor": executor}, even)


@pytest.mark.filterwarnings("ignore:A step binds Ahead.latest to different values")
def test_a_step_that_pulls_ahead_needs_batches_of_one_size() -> None:
    with pytest.raises(ValueError, match=r"batches of one size .* got 8 and then 6 samples"):
        trainer(3).fit(Ahead(), loader(30, 8), loader(4))


def test_a_step_that_takes_nothing_is_refused() -> None:
    class Idle(Iterating):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.net[0].weight.sum()

    with pytest.raises(ValueError, match="training_step: expected a step that takes a batch"):
        trainer(3).fit(Idle(), loader(), loader())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_in_the_middle_comes_back_as_it_is(on: str, executor: str) -> None:
    class Failing(Pairs):
        def take(self, stage: str, dataloader_iter: Any) -> Any:
            batch = super().take(stage, dataloader_iter)
            if stage == "train" and dataloader_iter.fetched == 2:
                raise KeyError("the second one")
            return batch

    with pytest.raises(KeyError, match="the second one") as caught:
        trainer(3, DataParallelStrategy(executor=executor)).fit(Failing(), even(), even())
    assert any("in replica" in note for note in caught.value.__notes__)


def test_one_replica_that_takes_more_than_the_others_is_told() -> None:
    class Greedy(Iterating):
        def training_step(self, dataloader_iter: Any) -> Any:
            loss = super().training_step(dataloader_iter)
            if self is self.trainer.lightning_module:
                next(dataloader_iter)
            return loss

    with pytest.raises(RuntimeError, match=r"all replicas at next\(dataloader_iter\)"):
        trainer(3).fit(Greedy(), even(), even())


@pytest.mark.parametrize("logs", [{}, {"batch_size": None}])
def test_logging_without_a_batch_size_is_refused_as_on_one_device(logs: Any) -> None:
    class Logging(Iterating):
        def training_step(self, dataloader_iter: Any) -> Any:
            loss = self.loss_of(self.take("train", dataloader_iter))
            self.log("x", loss, **logs)
            return loss

    said = []
    for devices, strategy in ((1, "auto"), (3, "dp_custom")):
        with pytest.raises(Exception) as caught:
            trainer(devices, strategy).fit(Logging(), loader(), loader())
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1] and "batch_size" in said[0][1]


def test_an_ordinary_batch_may_be_an_iterator_of_ones_own() -> None:
    """Only the name of the argument tells what the loop gives."""

    class Plain(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    assert not takes_iterator(Plain().training_step)
    assert takes_iterator(Iterating().training_step)
