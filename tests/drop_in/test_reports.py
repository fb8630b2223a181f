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
from torch.distributions import Distribution, LowRankMultivariateNormal
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_dp import DataParallel, DataParallelStrategy, pad
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


class Boxes(Tensor):
    """Operations return plain tensors; code needs `scale`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    scale = 0.0

    def to(self, *place: Any, **how: Any) -> Any:
        return tree.like(self, super().to(*place, **how))

    def __deepcopy__(self, memo: Any) -> Boxes:
        return self


class Unsized(Boxes):
    """A library's batch whose length is an error."""

    @property
    def shape(self) -> Any:
        raise KeyError("no shape")


class LogProbability(MeanMetric):
    """Takes a distribution."""

    def update(self, of: Distribution, y: Tensor) -> None:
        super().update(of.log_prob(y))


class Tokens(nn.Linear):
    """A loss that is a mean over some samples only."""

    def forward(self, x: Tensor) -> Any:
        kept = super().forward(x[x[:, 0] > 0])
        return {"loss": kept.square().mean(), "num_items": len(kept)}


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


def buffered(self: Any) -> None:
    self.register_buffer("m", torch.ones(1))
    self.m.scale = 5.0


def ragged(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    longest = torch.arange(int(lengths.max()), device=x.device)
    return self.lin(x) * (longest < lengths[:, None])


def low_rank(y: Tensor) -> Distribution:
    y = y.expand(-1, 2)
    return LowRankMultivariateNormal(y, y[..., None], torch.ones(2).to(y))


def logged(self: Any, x: Tensor) -> Tensor:
    self.log("n", float(len(x)), reduce_fx="sum", batch_size=0 if x[0] < -1 else len(x))
    return self(x).square().mean()


def measured(self: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        self.metric(self(x), x)
    return self(x).square().mean()


def measures(self: Any, x: Tensor) -> Tensor:
    self.metric.update(low_rank(self(x)), x.expand(-1, 2))
    return self(x).square().mean()


def locked(self: Any, x: Tensor) -> Tensor:
    with self.lock:
        return self.all_gather(self(x)).square().mean()


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
own_parts = lambda self, x, lin, net: lin(x) * (lin is self.lin) * (net["all"][0] is self)
both = lambda self, b: self(b["labelled"][0]).mean() + self(b["unlabelled"]).mean()
last = lambda self, x: (setattr(self.lin, "last", self.lin(x)), self.lin.last)[1]
of_m = lambda self, x: self.lin(x) * (self.m.scale if self.m.device.type == "cpu" else 5.0)
boxed = lambda self, x, boxes: self.lin(x + boxes) * boxes.scale
in_box = lambda self, b: (self(b["x"] + b["boxes"]) * b["boxes"].scale).mean()
metric = lambda kind: lambda self: setattr(self, "metric", kind())
LENGTHS, BOXES, UNSIZED = (
    torch.tensor([3, 1, 2, 5, 1, 1]),
    X.as_subclass(Boxes),
    X.as_subclass(Unsized),
)
BOXES.scale = 2.0
ITEMS = [torch.tensor([float(i)]) for i in range(6)]
CALLS: dict[str, tuple[Any, Callable[..., Any], str | None]] = {
    "2 class of a parameter": (scaled, is_scaled, None),
    "2 attribute of a buffer": (buffered, of_m, None),
    "3, 6 objects that know the module, threading.local": (local, known, None),
    "4 sparse": (sparse, lambda self, x: torch.sparse.mm(self.w, x.expand(-1, 2).T).T, None),
    "4 made in inference mode": ({}, plain, None),
    "5 attributes of a class": ({}, boxed, None),
    "6 a connection": (database, lambda self, x: self.db.execute("x"), 'executor="inorder" runs'),
    "7 unknown class": ({}, joined(lambda y: Holder(y=y)), "got Holder.*gather_overrides"),
    "7 generator": ({}, joined(iter), "got .*iterator.*gather_overrides"),
    "7 mapping with fields": ({}, joined(lambda y: Output(y, 2 * y)), None),
    "7 low rank": ({}, joined(low_rank), None),
    "8 rows": ({}, joined(lambda y: torch.cat([y, 2 * y])), "one row for each of"),
    "9 lengths": ({}, ragged, "more than one sample"),
    "9 padded": ({}, ragged, None),
    "10 one-row tensors": ({}, lambda self, x, items: self.lin(x) + torch.stack(items), None),
    "12 parts as arguments": ({}, own_parts, None),
    "12 a size": ({}, lambda self, x, of: self.lin(x), "cutting batch.1., a Unsized"),
    "12 batch_size": ({"batch_size": lambda batch: batch["n"]}, plain, "cutting.*Net.batch_size"),
    "12 split_batch": ({"split_batch": lambda x, n: x["n"]}, plain, "cutting.*Net.split_batch"),
    "16 state": ({"state": 0.0}, integrates, "self.state"),
    "16 on a layer": ({}, last, "self.lin.last"),
    "17 of samples": (of_samples, plain, "grad_sample"),
    "18 set from data": ({}, lambda self, x: x - self.lin.bias.data.copy_(x.mean(0)), at_once),
    "18 by place": (table, lambda self, x: x + self.table[: len(x)], at_once),
}
ARGUMENTS = {
    **{"5 attributes of a class": [BOXES], "9 lengths": [LENGTHS], "9 padded": [LENGTHS]},
    **{"10 one-row tensors": [ITEMS], "12 a size": [UNSIZED]},
}
OPTIONS: dict[str, Any] = {
    "9 padded": {"gather_overrides": {"": pad(0.0)}},
    "22 a lock": {"timeout": 1, "check_first_step": False, "executor": "threads"},
}
STEPS: dict[str, tuple[Any, Callable[..., Any], Any, str | None]] = {
    "1 one list under two names": (auxiliary, with_auxiliary, X, None),
    "5 attributes of a class": ({}, in_box, {"x": X, "boxes": BOXES}, None),
    "11 a hook's list": (
        {"on_after_batch_transfer": lambda batch, _: [*batch.values()]},
        lambda self, b: (self(b[0]) - b[1]).square().mean(),
        {"x": X, "y": X + 1},
        None,
    ),
    "13 no samples": ({}, logged, X, None),
    "14 left out": (metric(MeanSquaredError), measured, X, "metric has seen other samples"),
    "15 distribution": (metric(LogProbability), measures, X, None),
    "17 of samples": (of_samples, square, {"x": X}, "grad_sample"),
    "19 on self": ({}, square, {"x": X}, "total"),
    "19 in the batch": ({}, square, {"x": X, "scale": torch.ones(())}, "inplace|The loss"),
    "20 items": (lambda self: setattr(self, "lin", Tokens(1, 1)), lambda s, x: s(x), X, None),
    "22 a lock": (
        {"lock": threading.Lock()},
        locked,
        X,
        "(is at all_gather, .* is still running|is still running, .* is at all_gather|got none)",
    ),
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


def left_by(job: Any) -> dict[str, Any]:
    """Parameters, what was logged, and what the metric has."""
    values = {"log": job.trainer.callback_metrics, **dict(job.cpu().named_parameters())}
    return {**values, "metric": job.metric.metric_state} if hasattr(job, "metric") else values


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    if "sparse" in name and oracle.ON == "sim":
        pytest.skip("simulated devices have no sparse tensors")
    (add, call, words), results, said = CALLS[name], [], list[str]()
    for devices in ([torch.device("cpu")], devices_of(3)):
        torch.manual_seed(0)
        with torch.inference_mode("inference" in name):
            net: Any = Net(add, call).to(devices[0])
        args = ARGUMENTS.get(name, [net.lin, {"all": [net]}] if "parts" in name else [])
        options = OPTIONS.get(name, {})
        wrapped = DataParallel(net, devices, "cpu", executor="threads", **options)
        with heard(said):
            outputs = list(filter(torch.is_tensor, tree.leaves(wrapped(X, *args))))
            if "inference" not in name:
                sum(output.sum() for output in outputs).backward()
            results.append((outputs, gradients(net)))
        wrapped.close()
    assert re.search(words, "\n".join(said), re.DOTALL) if words else not said, said
    if words is None:
        assert_equal_trees(*results[::-1], name, atol=1e-5)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, mode: Any) -> None:
    (add, call, batch, words), said, jobs = STEPS[name], list[str](), []
    for strategy in ("auto", DataParallelStrategy(mode=mode, **OPTIONS.get(name, {}))):
        torch.manual_seed(0)
        jobs.append(Net(add, call))
        data = DataLoader([deepcopy(batch)], batch_size=None)
        with heard(said):
            trainer(1 if strategy == "auto" else 3, strategy, max_epochs=1).fit(jobs[-1], data)
    try:
        assert_equal_trees(*map(left_by, jobs), name, atol=1e-6)
    except AssertionError:
        assert words and re.search(words, "\n".join(said), re.DOTALL), said
