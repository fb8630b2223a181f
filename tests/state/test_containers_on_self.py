"""What steps do to lists, deques and dicts on self is what one device would have done to them."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Keeping(Classifier):
    """Keeps what a case says, in training and in validation."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.kept: Any = START[case]()

    def keep(self, batch: Any) -> None:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none").detach()
        ids = [round(value, 6) for value in x[:, 0].tolist()]
        CASES[self.case](self.kept, ids, losses, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.keep(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.keep(batch)


def window(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    kept.append(losses.mean().item())
    if len(kept) > 3:
        kept.pop(0)


def of_samples(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    for key, loss in zip(ids, losses.tolist(), strict=True):
        kept[key] = loss


def by_position(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    for key, loss in zip(ids, losses.tolist(), strict=True):
        kept[POSITIONS[key]] = loss


def by_class(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    kept["all"]["losses"].append(losses)
    for label, loss in zip(y.tolist(), losses, strict=True):
        kept["by class"][label].append(loss)


def counted(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    kept[0].update(y.tolist())
    kept[1]["batches"] += 1
    for label in y.tolist():
        kept[2][label] += 1


def in_tuple(kept: Any, ids: Any, losses: Any, y: Any) -> None:
    kept[0].append(losses)
    kept[1].update(ids)


CASES: dict[str, Any] = {
    "deque": lambda kept, ids, losses, y: kept.append(losses.mean().item()),
    "deque of samples": lambda kept, ids, losses, y: kept.extend(losses.tolist()),
    "window": window,
    "samples": of_samples,
    "positions": by_position,
    "classes": by_class,
    "counts": counted,
    "tuple": in_tuple,
}
START: dict[str, Any] = {
    "deque": lambda: deque(maxlen=4),
    "deque of samples": lambda: deque(maxlen=30),
    "window": list,
    "samples": dict,
    "positions": lambda: [0.0] * 53,
    "classes": lambda: defaultdict(lambda: defaultdict(list)),
    "counts": lambda: (Counter(), Counter(), defaultdict(int)),
    "tuple": lambda: ([], set()),
}
POSITIONS: dict[float, int] = {}
"""Of the samples in the data set, by their first feature."""


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_containers_are_filled_as_on_one_device(case: str, devices: int) -> None:
    def kept(k: int) -> Any:
        torch.manual_seed(0)
        module = Keeping(case)
        trainer(k).fit(module, loader(), loader())
        return plain(module.kept)

    torch.set_default_dtype(torch.float64)
    POSITIONS.update({round(float(x[0]), 6): i for i, (x, _) in enumerate(loader().dataset)})
    assert_equal_trees(kept(devices), kept(1), "kept", atol=1e-10, rtol=0)


def plain(kept: Any) -> Any:
    """To compare: dicts in lists of pairs, as their order counts too; sets sorted."""
    if isinstance(kept, dict):
        return sorted(((key, plain(value)) for key, value in kept.items()), key=lambda p: str(p[0]))
    if isinstance(kept, set):
        return sorted(kept)
    return [plain(item) for item in kept] if isinstance(kept, list | tuple | deque) else kept


@pytest.mark.parametrize("weights", [[1, 1, 1], [0, 1, 1]], ids=str)
def test_what_all_replicas_write_alike_is_no_news_and_reaches_an_idle_root(
    weights: list[int],
) -> None:
    class Alike(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.steps: Counter[str] = Counter()
            self.latest: dict[str, Any] = {"index": None, "kept": 1}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps["all"] += 1
            self.latest["index"] = torch.tensor(batch_idx, device=self.device)
            return super().training_step(batch, batch_idx)

    module = Alike()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A step binds")
        trainer(3, DataParallelStrategy(weights=weights), max_epochs=2).fit(
            module, loader(), loader()
        )
    assert module.steps == {"all": 6} and int(module.latest["index"]) == 2


def test_an_entry_that_all_replicas_write_differently_is_named_once() -> None:
    class Writing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.latest = {"mean": [0.0, "of the batch"]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.latest["mean"][0] = batch[0].mean().item()
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning) as caught:
        trainer(3, max_epochs=2).fit(Writing(), loader(), loader())
    messages = [str(w.message) for w in caught if "binds" in str(w.message)]
    assert len(messages) == 1 and "Writing.latest['mean'][0] to different" in messages[0]
