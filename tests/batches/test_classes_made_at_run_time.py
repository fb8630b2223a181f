"""Named tuples and dataclasses whose classes are made in a call: each replica has its own class."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from spreading import compare
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import gather
from lightning_dp.parallel.gather.join import GatherError


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


makers = pytest.mark.parametrize(
    "make", [named, record, frozen, mapping, items], ids=lambda make: make.__name__
)


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
    torch.testing.assert_close(entries(inner)[0], x.mean())


@pytest.mark.parametrize(
    "first, second",
    [
        (named(a=torch.ones(1)), named(b=torch.ones(1))),
        (record(a=torch.ones(1), b=1), record(b=torch.ones(1), a=1)),
        (named(a=torch.ones(1)), record(a=torch.ones(1))),
        (named(a=torch.ones(1)), namedtuple("Another", "a")(torch.ones(1))),
        (record(a=torch.ones(1)), {"a": torch.ones(1)}),
    ],
    ids=["fields", "order", "kinds", "names", "dict"],
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
        if not self.training:
            self.seen.append(self.make(logits=logits.detach()))
        return F.cross_entropy(logits, batch[1]) + 0.1 * entries(aux)[0]

    def on_validation_epoch_end(self) -> None:
        self.log("sum", torch.cat([entries(item)[0] for item in self.seen]).square().sum())
        self.seen.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "more": self.make(loss=loss.detach())}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return entries(self(batch[0]))[0]


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("make", [named, record], ids=lambda make: make.__name__)
def test_a_fit_gives_the_numbers_of_one_device(
    mode: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(Predicting, "make", staticmethod(make))
    strategy = {"mode": mode, "gather_overrides": {"norm": "mean"}}
    assert_same(run(Predicting, 3, strategy=strategy), run(Predicting, 1))


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
