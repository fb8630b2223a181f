"""A list or dict on self that a step binds anew has what one device's would have, or it is told."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

CLOSE = {"atol": 1e-5, "rtol": 1e-4}

Change = Callable[[Any, Tensor, int], Any]
"""From what is there, the samples' losses and the batch's number to what is there afterwards."""


class Binding(Classifier):
    def __init__(self, start: Any, change: Change) -> None:
        super().__init__()
        self.change, self.kept = change, start

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none").detach()
        self.kept = self.change(self.kept, losses, batch_idx)
        return super().training_step(batch, batch_idx)


class Watch(Callback):
    """What is there after every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(plain(module.kept))


def plain(kept: Any) -> Any:
    """Containers as they are now, tensors as numbers."""
    if isinstance(kept, dict):
        return {key: plain(value) for key, value in kept.items()}
    if isinstance(kept, list | tuple):
        return [plain(value) for value in kept]
    return kept.tolist() if isinstance(kept, Tensor) else kept


def seen(start: Any, change: Change, devices: int, size: int) -> tuple[list[Any], list[str]]:
    """What is there after every step of two epochs, and what a user is warned of."""
    torch.manual_seed(0)
    watch = Watch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy = DataParallelStrategy(executor="inorder")
        fit = trainer(devices, strategy, max_epochs=2, callbacks=[watch])
        fit.fit(Binding(start(), change), loader(n=22, batch_size=size))
    return watch.seen, [str(w.message) for w in told if "self" in str(w.message)]


def cut(kept: Any, losses: Tensor, i: int) -> Any:
    kept.extend(losses.tolist())
    del kept[:-6]
    return kept


def begun_again(kept: Any, losses: Tensor, i: int) -> Any:
    kept = [] if i == 2 else kept
    kept.append(losses)
    return kept


def emptied(kept: Any, losses: Tensor, i: int) -> Any:
    kept["now"].extend(losses.tolist())
    kept["all"] = kept["all"] + kept["now"]
    kept["now"] = []
    return kept


EXACT: dict[str, tuple[Callable[[], Any], Change]] = {
    "numbers of samples": (list, lambda kept, losses, i: kept + losses.tolist()),
    "tensors of samples": (list, lambda kept, losses, i: [*kept, *losses]),
    "means of batches": (list, lambda kept, losses, i: [*kept, losses.mean()]),
    "dicts of samples": (list, lambda kept, losses, i: kept + [{"loss": v} for v in losses]),
    "a list in a dict": (
        lambda: {"a": []},
        lambda kept, losses, i: {**kept, "a": kept["a"] + [*losses]},
    ),
    "entries of batches": (dict, lambda kept, losses, i: {**kept, len(kept): losses.mean()}),
    "lists in a tuple": (
        lambda: ([], [0.5]),
        lambda kept, losses, i: (kept[0] + [*losses], [*kept[1], losses.mean()]),
    ),
    "the latest samples": (list, lambda kept, losses, i: (kept + losses.tolist())[-6:]),
    "the latest samples, cut in place": (list, cut),
    "the latest batches": (list, lambda kept, losses, i: [*kept, losses.mean()][-2:]),
    "begun again": (list, begun_again),
    "emptied in each step": (lambda: {"all": [], "now": []}, emptied),
    "without the small ones": (
        list,
        lambda kept, losses, i: [v for v in kept if v > 1.0] + [v + 1e-9 for v in losses.tolist()],
    ),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("size", [4, 5, 7])
@pytest.mark.parametrize("case", EXACT)
@pytest.mark.usefixtures("unchecked")
def test_what_goes_on_from_the_old_items_is_one_devices(case: str, size: int, devices: int) -> None:
    start, change = EXACT[case]
    expected, _ = seen(start, change, 1, size)
    got, told = seen(start, change, devices, size)
    # What is cut may be longer until one replica's samples alone are too many.
    first = 2 if "latest" in case else 0
    assert_equal_trees(got[first:], expected[first:], "after each step", **CLOSE)
    assert told == []


class Emptying(Classifier):
    """What it collects in a step goes to another list, and a new one takes its place."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[float] = []
        self.all: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none").detach()
        self.now.extend(losses.tolist())
        self.all, self.now = self.all + self.now, []
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_list_that_every_step_begins_anew_is_each_replicas_own(
    executor: Any, devices: int
) -> None:
    kept = []
    for k in (1, devices):
        torch.manual_seed(0)
        module = Emptying()
        # The last batch of each epoch has two samples, and a third replica none.
        job = trainer(k, DataParallelStrategy(executor=executor), max_epochs=2)
        data = loader(n=22, batch_size=5)
        job.fit(module, data, data)
        kept.append([module.all, module.now])
    assert_equal_trees(kept[1], kept[0], "kept", **CLOSE)


def summed(kept: Any, losses: Tensor, i: int) -> Any:
    kept[0] += len(losses)
    kept[1] += losses.sum().item()
    return kept


def best(kept: Any, losses: Tensor, i: int) -> Any:
    for loss in losses.tolist():
        bisect.insort(kept, loss)
    del kept[4:]
    return kept


TOLD: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "the best, in place": (list, best, "sorts Binding.kept"),
    "the best": (
        list,
        lambda kept, losses, i: sorted(kept + losses.tolist())[:4],
        "sorts Binding.kept",
    ),
    "fewer than a shard has": (
        list,
        lambda kept, losses, i: (kept + losses.tolist())[-1:],
        "kept",
    ),
    "the latest pair": (
        lambda: [torch.zeros(()), torch.zeros(())],
        lambda kept, losses, i: [losses.mean(), losses.max()],
        "different values",
    ),
    "a list or nothing": (
        list,
        lambda kept, losses, i: None if i % 2 else [losses.mean()],
        "different values",
    ),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("case", TOLD)
def test_what_may_not_be_one_devices_is_told(case: str, devices: int) -> None:
    start, change, text = TOLD[case]
    _, told = seen(start, change, devices, 5)
    assert any(text in line for line in told), told


def test_one_item_of_each_replicas_only_sample_is_told_to_be_the_batchs() -> None:
    collect: Change = lambda kept, losses, i: kept + [{"loss": v} for v in losses]
    _, told = seen(list, collect, 2, 2)
    assert [line for line in told if "each of one sample" in line], told


class Recurrent(Classifier):
    """Its state is a list of tensors that every step binds anew."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [torch.zeros(1, 16)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if len(self.state[0]) not in (1, len(x)):
            raise RuntimeError(f"a state of {len(self.state[0])} samples, and {len(x)} samples")
        hidden = self.net[:-1](x) + 0.5 * self.state[0].expand(len(x), 16).to(x)
        self.state = [hidden.detach()]
        return F.cross_entropy(self.net[-1](hidden), y)


def test_each_replica_goes_on_from_its_own_state_in_a_list() -> None:
    weights = []
    for devices in (1, 2, 4):
        torch.manual_seed(0)
        module = Recurrent()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(devices, max_epochs=1).fit(module, loader(n=24, batch_size=8))
        weights.append(module.state_dict())
    assert_equal_trees(weights[1], weights[0], "2 devices", **CLOSE)
    assert_equal_trees(weights[2], weights[0], "4 devices", **CLOSE)
