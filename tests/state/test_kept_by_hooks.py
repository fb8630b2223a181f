"""Hooks that keep tensors: those on `self` are each replica's own, of others a warning tells."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.state.kept_by_hooks import LOOKS, KeptByHooks

KEPT: dict[str, Any] = {}
WORDS = r"^A hook of {}\.net\.0 keeps tensors in {}, which is one place for all replicas"


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    KEPT.clear()
    yield
    KEPT.clear()


class OnSelf(Classifier):
    """Keeps the output of a layer as people do who compute a loss from it."""

    def __init__(self, register: Callable[[Any], Any] = lambda net: net.keep) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(register(self))

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept["output"] = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.kept["output"].square().mean()


def by_function(net: Any) -> Any:
    return lambda layer, inputs, output: net.kept.update(output=output)


def by_name(net: Any) -> Any:
    def keep(net: Any, name: str, layer: Any, inputs: Any, output: Tensor) -> None:
        net.kept[name] = output

    return partial(keep, net, "output")


def by_the_dict(net: Any) -> Any:
    kept = net.kept

    def keep(layer: Any, inputs: Any, output: Tensor) -> None:
        kept["output"] = output

    return keep


def by_an_argument(net: Any) -> Any:
    return partial(lambda kept, layer, inputs, output: kept.update(output=output), net.kept)


@pytest.mark.filterwarnings("ignore:A step binds .*kept")
@pytest.mark.parametrize(
    "register", [lambda net: net.keep, by_function, by_name, by_the_dict, by_an_argument]
)
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_on_self_each_replica_reads_its_own(register: Any, executor: Any) -> None:
    several, one = OnSelf(register), OnSelf(register)
    one.load_state_dict(several.state_dict())
    trainer(3, DataParallelStrategy(executor=executor)).fit(several, loader(), loader())
    trainer(1, "auto").fit(one, loader(), loader())
    assert_equal_trees(several.state_dict(), one.state_dict(), "weights", atol=1e-6, rtol=0.0)


class Listing(Classifier):
    """Its hook knows a list that is on self, where an epoch's outputs are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = outputs = []
        self.collected: list[Tensor] = []
        self.net[0].register_forward_hook(lambda layer, _, output: outputs.append(output.detach()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.outputs[-1].sum() - self.outputs[-1].sum()  # its own is there

    def on_train_epoch_end(self) -> None:
        self.collected.extend(self.outputs)
        self.outputs.clear()


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_list_on_self_that_a_hook_knows_is_one_devices(executor: Any) -> None:
    several, one = Listing(), Listing()
    one.load_state_dict(several.state_dict())
    trainer(3, DataParallelStrategy(executor=executor)).fit(several, loader(), loader())
    trainer(1, "auto").fit(one, loader(), loader())
    assert len(several.collected) > 6
    assert_equal_trees(several.collected, one.collected, "outputs", atol=1e-5, rtol=0.0)


class Store:
    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.output = output.detach()

    def collect(self, name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.found[name].append(output.detach())


def global_dict(layer: nn.Module, inputs: Any, output: Tensor) -> None:
    KEPT["output"] = output.detach()


def by_closure() -> Any:
    found: list[Tensor] = []
    return lambda layer, inputs, output: found.append(output.detach())


def by_a_function_inside() -> Any:
    found: dict[str, Any] = {"of": {}}

    def keep(output: Tensor) -> None:
        found["of"]["layer"] = output.detach()

    return lambda layer, inputs, output: keep(output)


def counting() -> Any:
    count = defaultdict(int)

    def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        count["calls"] += 1

    return keep


ELSEWHERE = {
    "its variable 'KEPT'": lambda: global_dict,
    "its variable 'found'": by_closure,
    "its variable 'found' ": by_a_function_inside,
    "an object of class Store": Store,
    "an object of class Store ": lambda: partial(Store().collect, "layer"),
    "an argument of class dict": lambda: partial(lambda own, *args: own.update(o=args[2]), {}),
}


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("options", [{}, {"executor": "inorder"}, {"mode": "forward"}], ids=str)
def test_elsewhere_a_warning_names_the_hook_and_the_place(where: str, options: Any) -> None:
    module = Classifier()
    module.net[0].register_forward_hook(ELSEWHERE[where]())
    with pytest.warns(UserWarning, match=WORDS.format("Classifier", where.strip())) as told:
        trainer(2, DataParallelStrategy(**options)).fit(module, loader(), loader())
    assert sum("A hook of" in str(each.message) for each in told) == 1


def test_steps_of_evaluation_are_looked_at_too() -> None:
    module = Classifier()
    module.net[0].register_forward_hook(global_dict)
    with pytest.warns(UserWarning, match=WORDS.format("Classifier", "its variable 'KEPT'")):
        trainer(2, DataParallelStrategy()).validate(module, loader(), verbose=False)


@pytest.mark.parametrize("make", [counting, lambda: lambda *args: None])
def test_what_keeps_no_tensor_is_nothing_to_tell(make: Any) -> None:
    module = Classifier()
    module.net[0].register_forward_hook(make())
    trainer(2, DataParallelStrategy()).fit(module, loader(), loader())


def test_one_replica_reads_what_it_has_kept() -> None:
    module = Classifier()
    module.net[0].register_forward_hook(global_dict)
    trainer(2, DataParallelStrategy()).fit(module, loader(1, 1), loader(1, 1))
    assert KEPT["output"].shape[0] == 1


def test_after_some_steps_nobody_looks() -> None:
    root = nn.Sequential(nn.Linear(2, 2))
    root[0].register_forward_hook(global_dict)
    look = KeptByHooks(root)
    for training in (True, False):
        root.train(training)
        for _ in range(LOOKS):
            assert not look.is_done
            look.begin()
            look.end([0, 1])
    assert look.is_done
    with warnings.catch_warnings(action="error"):
        look.begin()
        root(torch.ones(1, 2))
        look.end([0, 1])
