"""What people's code has found on several devices: a row per report, by its line there.

A row is what `__init__` adds to a module, its `forward` or step, and what K=3 devices make of it:
None where they give one device's numbers, else words of the error or warning that names it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support import forward_twins, oracle
from support.oracle import assert_equal_trees, devices_of, gradients, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.scatter import tree

pytestmark = pytest.mark.usefixtures("on", "one_thread")

X = torch.arange(6.0)[:, None] - 2


class Net(LightningModule):
    """A layer, what a row adds, and a row's `forward` or step."""

    def __init__(self, add: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.layer, self.call = nn.Linear(1, 1), nn.Identity(), call
        self.total = torch.zeros(())
        vars(self).update(add(self) or {} if callable(add) else add)

    def on_fit_start(self) -> None:
        self.total = self.total.to(self.device)

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args) if self._trainer is None else self.lin(*args)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.call(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Scaled(nn.Parameter):
    """A class of parameters."""


class Holder:
    """A plain object; nothing knows how it is joined."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    """A dataclass that is a mapping, as those of transformers; one field is no item."""

    y: Any
    more: Any

    def __post_init__(self) -> None:
        self["y"] = self.y


def scaled(self: Any) -> None:
    self.lin.weight = Scaled(self.lin.weight.detach())
    self.lin.weight.scale = 5.0


def auxiliary(self: Any) -> None:
    self.aux = self.layer.aux = []
    self.layer.register_forward_hook(lambda layer, args, y: layer.aux.append(y.square().mean()))


def with_auxiliary(self: Any, x: Tensor) -> Tensor:
    self.aux.clear()
    return self.layer(self.lin(x)).mean() + sum(self.aux)


def of_samples(self: Any) -> None:
    keep = lambda layer, _, after: setattr(layer.weight, "grad_sample", after[0].clone())
    self.lin.register_full_backward_hook(keep)


def local(self: Any) -> None:
    self.held = Holder(local=threading.local(), net=self, layers=[self.lin])
    self.held.local.factor = 0.4


def integrates(self: Any, x: Tensor) -> Tensor:
    self.state = self.state / 2 + self.lin(x)
    return self.state


def joined(wrap: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    return lambda self, x: wrap(self.lin(x))


def square(self: Any, batch: Any) -> Tensor:
    for shared in (self.total, batch.get("scale", self.total)):
        shared += batch["x"].mean()
    return self(batch["x"]).square().mean() * batch.get("scale", torch.ones(())).clone()


plain, at_once = joined(lambda y: y), "more than one sample at a time"
sparse = lambda self: setattr(self, "w", nn.Parameter(torch.eye(2).to_sparse()))
table = lambda self: setattr(self, "table", nn.Parameter(X.clone()))
database = lambda self: setattr(self, "db", sqlite3.connect(":memory:"))
known = lambda self, x: self.held.net.lin(self.held.layers[0](x)) * self.held.local.factor
is_scaled = lambda s, x: s.lin(x) * isinstance(s.lin.weight, Scaled) * s.lin.weight.scale
own_parts = lambda self, x, lin, net: lin(x) * (lin is self.lin) * (net is self)
both = lambda self, b: self(b["labelled"][0]).mean() + self(b["unlabelled"]).mean()
ITEMS = [torch.tensor([float(i)]) for i in range(6)]
CALLS: dict[str, tuple[Any, Callable[..., Any], str | None]] = {
    "2 class of a parameter": (scaled, is_scaled, None),
    "3, 6 objects that know the module, threading.local": (local, known, None),
    "4 sparse": (sparse, lambda self, x: torch.sparse.mm(self.w, x.expand(-1, 2).T).T, None),
    "4 made in inference mode": ({}, plain, None),
    "6 a connection": (database, lambda self, x: self.db.execute("x"), 'executor="inorder" runs'),
    "7 unknown class": ({}, joined(lambda y: Holder(y=y)), "got Holder.*gather_overrides"),
    "7 generator": ({}, joined(iter), "got .*iterator.*gather_overrides"),
    "7 mapping with fields": ({}, joined(lambda y: Output(y, 2 * y)), None),
    "8 rows": ({}, joined(lambda y: torch.cat([y, 2 * y])), "one row for each of"),
    "10 one-row tensors": ({}, lambda self, x, items: self.lin(x) + torch.stack(items), None),
    "10 dicts": ({}, lambda s, x, items: s.lin(x) + torch.stack([i["v"] for i in items]), None),
    "12 parts as arguments": ({}, own_parts, None),
    "12 batch_size": ({"batch_size": lambda batch: batch["n"]}, plain, "cutting.*Net.batch_size"),
    "12 split_batch": ({"split_batch": lambda x, n: x["n"]}, plain, "cutting.*Net.split_batch"),
    "16 state": ({"state": 0.0}, integrates, "self.state"),
    "17 of samples": (of_samples, plain, "grad_sample"),
    "18 set from data": ({}, lambda self, x: x - self.lin.bias.data.copy_(x.mean(0)), at_once),
    "18 by place": (table, lambda self, x: x + self.table[: len(x)], at_once),
}
ARGUMENTS = {"10 one-row tensors": [ITEMS], "10 dicts": [[{"v": item} for item in ITEMS]]}
STEPS: dict[str, tuple[Any, Callable[..., Any], Any, str | None]] = {
    "1 one list under two names": (auxiliary, with_auxiliary, X, None),
    "17 of samples": (of_samples, square, {"x": X}, "grad_sample"),
    "19 on self": ({}, square, {"x": X}, "total"),
    "19 in the batch": ({}, square, {"x": X, "scale": torch.ones(())}, "inplace|The loss"),
    "21 two loaders": (
        {},
        both,
        {"labelled": [X, X], "unlabelled": X[:2]},
        "'unlabelled'. has 2|got none",
    ),
}


@contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Notes the words of errors and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            said.append(forward_twins.said(error))
    said += [str(w.message) for w in caught if re.search("replica|device", str(w.message))]


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    if "sparse" in name and oracle.ON == "sim":
        pytest.skip("simulated devices have no sparse tensors")
    (add, call, words), results, said = CALLS[name], [], list[str]()
    for devices in ([torch.device("cpu")], devices_of(3)):
        torch.manual_seed(0)
        with torch.inference_mode("inference" in name):
            net: Any = Net(add, call).to(devices[0])
        args = ARGUMENTS.get(name, [net.lin, net] if "parts" in name else [])
        wrapped = DataParallel(net, devices, "cpu", executor="threads")
        with heard(said):
            outputs = list(filter(torch.is_tensor, tree.leaves(wrapped(X, *args))))
            if "inference" not in name:
                torch.cat(outputs).sum().backward()
            results.append((outputs, gradients(net)))
        wrapped.close()
    assert re.search(words, "\n".join(said), re.DOTALL) if words else not said, said
    if words is None:
        assert_equal_trees(*results[::-1], name, atol=1e-5)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, mode: Any) -> None:
    (add, call, batch, words), said, jobs = STEPS[name], list[str](), []
    for strategy in ("auto", DataParallelStrategy(mode=mode)):
        torch.manual_seed(0)
        jobs.append(Net(add, call))
        data = DataLoader([deepcopy(batch)], batch_size=None)
        with heard(said):
            trainer(1 if strategy == "auto" else 3, strategy, max_epochs=1).fit(jobs[-1], data)
    try:
        assert_equal_trees(*(dict(job.cpu().named_parameters()) for job in jobs), name, atol=1e-6)
    except AssertionError:
        assert words and re.search(words, "\n".join(said), re.DOTALL), said
