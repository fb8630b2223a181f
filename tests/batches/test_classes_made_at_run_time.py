"""Named tuples and dataclasses whose classes are made in a call: each replica has its own class."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, devices_of, run
from spreading import compare
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import DataParallel, gather
from lightning_dp.parallel.batch.join import GatherError


def named(**fields: Any) -> Any:
    return namedtuple("Prediction", fields)(**fields)


def record(**fields: Any) -> Any:
    made = dataclasses.make_dataclass("Prediction", [(name, Any) for name in fields])
    return made(**fields)


def frozen(**fields: Any) -> Any:
    names = [(name, Any) for name in fields]
    return dataclasses.make_dataclass("Prediction", names, frozen=True, slots=True)(**fields)


def mapping(**fields: Any) -> Any:
    return type("Prediction", (OrderedDict,), {})(fields)


def items(**fields: Any) -> Any:
    return type("Prediction", (tuple,), {})(fields.values())


MAKERS: list[Callable[..., Any]] = [named, record, frozen, mapping, items]
makers = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def entries(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value.values() if isinstance(value, dict) else value)


@makers
@pytest.mark.parametrize("sizes", [(2, 1), (3, 3), (3,)])
def test_equal_names_and_fields_are_enough(make: Any, sizes: tuple[int, ...]) -> None:
    x = torch.randn(sum(sizes), 2)
    outputs = [make(y=part, inner=make(mean=part.mean())) for part in x.split(sizes)]
    joined = gather(outputs, "cpu", sizes=sizes)
    assert type(joined) is type(outputs[0])
    y, inner = entries(joined)
    assert torch.equal(y, x) and type(inner) is type(entries(outputs[0])[1])
    expected = sum(p.mean() * n for p, n in zip(x.split(sizes), sizes, strict=True)) / sum(sizes)
    torch.testing.assert_close(entries(inner)[0], expected)


@pytest.mark.parametrize(
    "first, second",
    [
        (named(a=torch.ones(1)), named(b=torch.ones(1))),
        (named(a=torch.ones(1)), record(a=torch.ones(1))),
        (named(a=torch.ones(1)), namedtuple("Another", "a")(torch.ones(1))),
        (record(a=torch.ones(1)), record(a=torch.ones(1), b=torch.ones(1))),
        (record(a=torch.ones(1)), {"a": torch.ones(1)}),
    ],
    ids=["fields", "kinds", "names", "more fields", "dict"],
)
def test_other_names_or_fields_are_not(first: Any, second: Any) -> None:
    with pytest.raises(GatherError, match="expected the same type from every replica"):
        gather([first, second], "cpu")


class Predicting(Classifier):
    """Makes classes in its steps, and in `forward`."""

    make: Any = staticmethod(named)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        return self.make(logits=logits, aux=self.make(norm=logits.square().mean()))

    def loss(self, batch: Any) -> Tensor:
        logits, aux = entries(self(batch[0]))
        self.latest = self.make(classes=3)
        if not self.training:
            self.seen.append(self.make(logits=logits.detach()))
        return F.cross_entropy(logits, batch[1]) + 0.1 * entries(aux)[0]

    def on_validation_epoch_end(self) -> None:
        self.log("rows", float(sum(len(entries(item)[0]) for item in self.seen)))
        self.log("sum", torch.cat([entries(item)[0] for item in self.seen]).square().sum())
        self.seen.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return entries(entries(self(batch[0]))[1])[0] * 0 + 1, entries(self(batch[0]))[0]


class Returning(Predicting):
    """And returns them."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "more": self.make(loss=loss.detach())}


@pytest.mark.usefixtures("on")
@makers
@pytest.mark.parametrize("executor", ["threads", pytest.param("inorder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("model", [Predicting, Returning])
def test_a_fit_gives_the_numbers_of_one_device(
    model: Any, mode: str, executor: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model is Returning and make is frozen:
        pytest.skip("Lightning refuses such outputs")
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(Predicting, "make", staticmethod(make))
    overrides = {"norm": "mean", "1.0": "mean"}  # by name, and where it has none
    strategy = {"mode": mode, "executor": executor, "gather_overrides": overrides}
    several, one = run(model, 3, strategy=strategy), run(model, 1)
    for job in (several, one):  # their classes are others in every call
        job.predictions = [_flat(value) for value in job.predictions]
    assert_same(several, one)


def _flat(value: Any) -> Any:
    return value if isinstance(value, Tensor) else [_flat(entry) for entry in entries(value)]


@pytest.mark.usefixtures("on")
@makers
def test_calls_that_are_spread(make: Any) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return make(y=super().forward(x), inner=make(z=2 * x))

    def use(net: nn.Module) -> Any:
        y, inner = entries(net(torch.ones(6, 4, dtype=torch.float64)))
        y.sum().backward()
        return y.detach(), entries(inner)[0]

    compare(lambda: Net(4, 2), use)
    devices = devices_of(3)
    wrapped = DataParallel(Net(4, 2).to(devices[0]), devices)
    assert entries(wrapped(torch.ones(5, 4, device=devices[0])))[0].shape == (5, 2)
    wrapped.close()
