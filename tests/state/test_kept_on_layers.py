"""What is put on layers of torch's own is one device's, or a warning names the layer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

Keep = Callable[[Any, Tensor], Any]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class Keeping(Classifier):
    """A hook of its first layer keeps something of the output on that layer."""

    def __init__(self, keep: Keep, prepare: Callable[[nn.Module], Any] = lambda _: None) -> None:
        super().__init__()
        self.net[0].outputs = []
        prepare(self.net[0])
        self.net[0].register_forward_hook(lambda layer, _, out: keep(layer, out.detach()))


class Watch(Callback):
    """The layer's attribute after every step, as it is then."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        value = getattr(module.net[0], self.name)
        self.seen.append(list(value) if isinstance(value, list) else value)


def seen(module: Keeping, name: str, devices: int, size: int = 5) -> tuple[list[Any], list[str]]:
    """What is there after every step, and what a user is warned of."""
    watch = Watch(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy = DataParallelStrategy(executor="inorder")
        fit = trainer(devices, strategy, max_epochs=1, callbacks=[watch])
        fit.fit(module, loader(n=22, batch_size=size))
    return watch.seen, [str(w.message) for w in told if ".net.0." in str(w.message)]


def both(keep: Keep, name: str, devices: int, **options: Any) -> tuple[Any, Any, list[str]]:
    """One device's, that of several, and what these told."""
    found = []
    for number in (1, devices):
        torch.manual_seed(0)
        found.append(seen(Keeping(keep, **options), name, number))
    return found[0][0], found[1][0], found[1][1]


def count(layer: Any, out: Tensor) -> None:
    layer.calls = getattr(layer, "calls", 0) + 1


EXACT: dict[str, tuple[Keep, str]] = {
    "outputs in a list": (lambda layer, out: layer.outputs.append(out), "outputs"),
    "numbers of samples": (lambda layer, out: layer.outputs.extend(out.sum(1).tolist()), "outputs"),
    "a list bound anew": (
        lambda layer, out: setattr(layer, "outputs", [*layer.outputs, out.mean()]),
        "outputs",
    ),
    "a count of batches": (count, "calls"),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("case", EXACT)
def test_what_is_collected_on_a_layer_is_one_devices(case: str, devices: int) -> None:
    keep, name = EXACT[case]
    expected, got, told = both(keep, name, devices)
    assert_equal_trees(got, expected, "after each step", **CLOSE)
    assert told == []


def test_so_it_is_on_a_layer_with_a_parametrization() -> None:
    keep, name = EXACT["outputs in a list"]
    expected, got, told = both(keep, name, 2, prepare=parametrizations.weight_norm)
    assert_equal_trees(got, expected, "after each step", **CLOSE)
    assert told == []


@pytest.mark.parametrize("name", ["output", "_output"])
def test_a_value_that_differs_is_told_by_the_layers_place(name: str) -> None:
    expected, got, told = both(lambda layer, out: setattr(layer, name, out), name, 2)
    assert [len(out) for out in expected] == [5, 5, 5, 5, 2]
    assert [len(out) for out in got] == [3, 3, 3, 3, 1]  # the first replica's
    (text,) = told
    assert re.match(rf"A step binds Keeping\.net\.0\.{name} to different values", text)


class Last(nn.Module):
    """The last position's output of a recurrent layer."""

    def forward(self, outputs: Any) -> Tensor:
        return outputs[0][:, -1]


def recurrent() -> list[nn.Module]:
    return [nn.Unflatten(1, (1, 10)), nn.GRU(10, 3, batch_first=True), Last()]


def normed() -> list[nn.Module]:
    return [nn.utils.spectral_norm(nn.Linear(10, 3))]


def pruned() -> list[nn.Module]:
    return [prune.l1_unstructured(nn.Linear(10, 3), "weight", amount=5)]


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("layers", [recurrent, normed, pruned])
def test_what_a_layer_keeps_for_itself_is_not_the_users(
    layers: Callable[[], list[nn.Module]], devices: int
) -> None:
    def fitted(number: int) -> Classifier:
        torch.manual_seed(0)
        module = Classifier()
        module.net = nn.Sequential(*layers())
        data = loader(n=22, batch_size=5)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*to different values")
            trainer(number, max_epochs=1).fit(module, data, data)
        return module

    expected, got = (dict(fitted(number).named_parameters()) for number in (1, devices))
    assert_equal_trees(got, expected, "parameters", **CLOSE)
