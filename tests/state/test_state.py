"""What steps leave on self: items in containers as on one device; attributes, or a warning."""

from __future__ import annotations

import bisect
import re
import warnings
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.oracle import EPOCHS, Classifier, assert_equal_trees, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from lightning_dp import DataParallelStrategy
from lightning_dp.module_state import copied

pytestmark = pytest.mark.usefixtures("on", "one_thread")

Change = Callable[[Any, Any, Tensor, Tensor, int], Any]
"""From what is there, ids, losses and labels of the samples and the batch's number to what is
there afterwards; None for what has been changed in place."""


def plain(kept: Any) -> Any:
    """To compare: as it is now, dicts with their order, sets sorted, tensors as numbers."""
    if isinstance(kept, dict):
        return sorted(((str(key), plain(value)) for key, value in kept.items()))
    if isinstance(kept, set):
        return sorted(kept)
    if isinstance(kept, list | tuple | deque):
        return [plain(item) for item in kept]
    if isinstance(kept, type):
        return kept.__name__
    return kept.tolist() if isinstance(kept, Tensor) else kept


def window(kept: Any, ids: Any, losses: Any, y: Any, i: int) -> None:
    kept.append(losses.mean().item())
    if len(kept) > 3:
        kept.pop(0)


def by_class(kept: Any, ids: Any, losses: Any, y: Any, i: int) -> None:
    kept["all"]["losses"].append(losses)
    for label, loss in zip(y.tolist(), losses, strict=True):
        kept["by class"][label].append(loss)


def in_dict(kept: Any, ids: Any, losses: Any, y: Any, i: int) -> None:
    kept["losses"].append(losses)
    kept["ids"].extend(map(str, ids))
    kept.setdefault("new", []).append(2 * losses)
    kept["calls"] = kept.get("calls", 0)


JOINED: dict[str, tuple[Callable[[], Any], Change]] = {
    "tensors": (list, lambda kept, ids, losses, y, i: kept.append(losses)),
    "means": (list, lambda kept, ids, losses, y, i: kept.append({"m": losses.mean(), "i": i})),
    "numbers": (list, lambda kept, ids, losses, y, i: kept.extend(losses.tolist())),
    "arrays": (list, lambda kept, ids, losses, y, i: kept.append(losses.cpu().numpy())),
    "dicts of samples": (
        list,
        lambda kept, ids, losses, y, i: kept.extend({"id": n, "boxes": [n, [n]]} for n in ids),
    ),
    "per loader": (lambda: [[], []], lambda kept, ids, losses, y, i: kept[i % 2].append(losses)),
    "deque": (deque, lambda kept, ids, losses, y, i: kept.append(losses.mean().item())),
    "entries of samples": (
        dict,
        lambda kept, ids, losses, y, i: kept.update(zip(ids, losses.tolist(), strict=True)),
    ),
    "classes": (lambda: defaultdict(lambda: defaultdict(list)), by_class),
    "tuple": (lambda: ([], deque()), lambda kept, ids, losses, y, i: kept[0].append(losses)),
    "in a dict": (lambda: {"losses": [], "ids": []}, in_dict),
    "a class of each call": (type(None), lambda *_: namedtuple("Output", "loss")),
    "the same everywhere": (list, lambda kept, ids, losses, y, i: [*kept, i][-2:]),
}
"""What is as on one device."""
NAMED: dict[str, tuple[Callable[[], Any], Change]] = {
    "sorted": (list, lambda kept, ids, losses, y, i: bisect.insort(kept, losses[0].item())),
    "window": (list, window),
    "full deque": (
        lambda: deque(maxlen=2),
        lambda kept, ids, losses, y, i: kept.append(losses.mean().item()),
    ),
    "summed": (lambda: [0, 0.0], lambda kept, ids, losses, y, i: [kept[0] + len(y), losses.sum()]),
    "entry": (lambda: {"n": 0}, lambda kept, ids, losses, y, i: kept.update(n=len(y))),
    "item": (
        lambda: {"mean": [0.0, "of the batch"]},
        lambda kept, ids, losses, y, i: kept["mean"].__setitem__(0, losses.mean().item()),
    ),
    "number": (int, lambda kept, ids, losses, y, i: kept + len(y)),
}
"""What keeps the first replica's value, and is named once."""
POSITIONS: dict[float, int] = {}
"""Of the samples in the data set, by their first feature."""


class Keeping(Classifier):
    """Keeps what a table says, in training and in validation."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__()
        self.changes = tuple((f"kept{n}", change) for n, (_, change) in enumerate(table.values()))
        for (name, _), (start, _) in zip(self.changes, table.values(), strict=True):
            setattr(self, name, start())

    def keep(self, batch: Any, i: int) -> None:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").detach()
        ids = [POSITIONS[value] for value in batch[0][:, 0].tolist()]
        for name, change in self.changes:
            kept = getattr(self, name)
            after = change(kept, ids, losses, batch[1], i)
            if after is not None or not isinstance(kept, list | dict | tuple | deque):
                setattr(self, name, after)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.keep(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.keep(batch, batch_idx)


class Watch(Callback):
    """What there is after every step of the training."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look, self.seen = look, []

    def on_train_batch_end(self, job: Any, module: Any, *_: Any) -> None:
        self.seen.append(copied(self.look(module)))


TABLES = {"joined": JOINED, "named": NAMED}


@cache
def kept(table: str, devices: int, options: Any, on: str) -> tuple[dict[str, Any], list[str]]:
    """What there is after every step, by the case, and what a user is warned of."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    POSITIONS.update({float(x[0]): i for i, (x, _) in enumerate(loader().dataset)})
    names = [f"kept{n}" for n in range(len(TABLES[table]))]
    watch = Watch(lambda module: [plain(getattr(module, name)) for name in names])
    strategy = DataParallelStrategy(**dict(options)) if devices > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = trainer(devices, strategy, callbacks=[watch], num_sanity_val_steps=0)
        job.fit(Keeping(TABLES[table]), loader(), loader())
    rows = dict(zip(TABLES[table], zip(*watch.seen, strict=True), strict=True))
    named = [w for w in caught if "Keeping" in str(w.message)]
    assert {w.filename for w in named} <= {__file__}, "at the step's own line"
    return rows, [str(w.message) for w in named]


WHO = {
    "two": (2, ()),
    "four": (4, ()),
    "without the root": (3, (("weights", (0, 2, 1)),)),
    "without the last": (3, (("weights", (2, 1, 0)),)),
    "in chunks": (3, (("split", "chunk"),)),
}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("case", JOINED)
@pytest.mark.usefixtures("unchecked")
def test_what_steps_append_is_as_on_one_device(case: str, who: str, on: str) -> None:
    devices, options = WHO[who]
    actual, told = kept("joined", devices, options, on)
    expected, _ = kept("joined", 1, (), on)
    assert_equal_trees(actual[case], expected[case], "after each step", atol=1e-10)
    assert told == []


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.usefixtures("unchecked")
def test_what_is_not_one_devices_is_named_once(case: str, on: str) -> None:
    _, told = kept("named", 3, (), on)
    name = f"Keeping.kept{[*NAMED].index(case)}"
    found = [line for line in told if re.search(rf"{name}\b.* to different values", line)]
    assert len(found) == 1, told


class Attributes(Classifier):
    """Values that all replicas have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.latest: dict[str, Any] = {"index": None, "kept": 1}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = batch_idx
        self.steps += 1
        self.latest["index"] = torch.tensor(batch_idx, device=self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("weights", [[1, 1, 1], [0, 1, 1]], ids=str)
def test_what_all_replicas_have_alike_is_no_news_and_reaches_an_idle_root(
    weights: list[int],
) -> None:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A step binds")
        several, one = run(Attributes, 3, strategy={"weights": weights}), run(Attributes, 1)
    assert_same(several, one)
    module = several.module
    assert module.steps == 3 * EPOCHS and int(module.latest["index"]) == module.last == 2
    assert "log" not in vars(module)


class Hooked(Classifier):
    """A hook of its first layer keeps what it sees on that layer."""

    validation_step = None

    def __init__(self, prepare: Callable[[nn.Module], Any] = lambda _: None) -> None:
        super().__init__()
        prepare(self.net[0])
        self.net[0].outputs, self.net[0].calls = [], 0
        self.net[0].register_forward_hook(self.keep)

    @staticmethod
    def keep(layer: Any, _: Any, out: Tensor) -> None:
        layer.outputs.append(out.detach())
        layer.calls += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = [self.net[0].outputs, self.net[0].calls]


@pytest.mark.parametrize("prepare", [lambda _: None, parametrizations.weight_norm])
@pytest.mark.usefixtures("unchecked")
def test_what_hooks_collect_on_a_layer_is_one_devices(prepare: Any) -> None:
    torch.set_default_dtype(torch.float64)
    kept = []
    for devices in (3, 1):
        torch.manual_seed(0)
        module = Hooked(prepare)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r".*net\.0")
            trainer(devices, max_epochs=1).fit(module, loader(22, 5))
        kept.append(module.seen)
    assert_equal_trees(*kept, "kept", atol=1e-10)


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "spectral norm": lambda: [nn.utils.spectral_norm(nn.Linear(10, 3))],
    "pruned": lambda: [prune.l1_unstructured(nn.Linear(10, 3), "weight", amount=5)],
    "instance norm": lambda: [
        *(nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2, track_running_stats=True)),
        *(nn.Flatten(), nn.Linear(10, 3)),
    ],
}


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("layers", LAYERS)
def test_what_a_layer_keeps_for_itself_is_not_the_users(layers: str, mode: str) -> None:
    class Layered(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*LAYERS[layers]())

    torch.set_default_dtype(torch.float64)
    strategy = {"mode": mode, "buffers": "mean" if layers == "instance norm" else "first"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*to different values")
        assert_same(run(Layered, 3, strategy=strategy), run(Layered, 1))
