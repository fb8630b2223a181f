"""A torchmetrics Metric whose value is differentiated: a module like any other on every replica."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import (
    ByHand,
    Classifier,
    assert_equal_trees,
    assert_same,
    devices_of,
    gradients,
    loader,
    run,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from lightning_dp import DataParallel, DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")
SLOW = pytest.mark.slow


class MeanLoss(Metric):
    """The mean over samples of losses, each weighted; the whole state is two sums."""

    is_differentiable = True
    higher_is_better = False
    full_state_update = False

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.factor = weight
        self.register_buffer("class_weights", torch.tensor([0.5, 1.0, 2.0]))
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="none") * self.class_weights[y]

    def update(self, z: Tensor, y: Tensor) -> None:
        self.total += self.factor * self.losses(z, y).sum()
        self.count += len(y)

    def compute(self) -> Tensor:
        return self.total / self.count


class FullState(MeanLoss):
    full_state_update = True


class Learnt(MeanLoss):
    """Has parameters, which are trained with those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Linear(3, 3)

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        return super().losses(self.shift(z), y) * (-self.log_scale).exp() + self.log_scale


class Parts(MeanLoss):
    """Keeps what its value is made of, in attributes of all kinds, where the step reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Tensor | None = None
        self.parts: dict[str, Tensor] = {}
        self.history: list[int] = []
        self.calls = 0
        self.register_buffer("average", torch.zeros(()))
        self.plain = torch.zeros(())

    def update(self, z: Tensor, y: Tensor) -> None:
        super().update(z, y)
        value = self.losses(z, y).mean().detach()
        self.latest = value
        self.parts["mean"] = value
        self.history.append(len(y))
        self.calls += 1
        self.average.mul_(0.9).add_(0.1 * value)
        self.plain += value.cpu()


class Listed(MeanLoss):
    """Keeps every loss in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, z: Tensor, y: Tensor) -> None:
        self.rows.append(self.factor * self.losses(z, y))

    def compute(self) -> Tensor:
        return torch.cat([row.flatten() for row in self.rows]).mean()


class Unregistered(MeanLoss):
    """Nobody moves it: it has no tensors but its state, and binds that."""

    def update(self, z: Tensor, y: Tensor) -> None:
        self.total = self.total + self.factor * F.cross_entropy(z, y, reduction="sum")
        self.count = self.count + len(y)


class Several(Metric):
    """Metrics in a plain list, each with a weight; calls them by itself, and wraps nothing."""

    full_state_update = False

    def __init__(self, *metrics: Metric) -> None:
        self.metrics = list(metrics)
        self.weights = [1.0, 0.5]
        super().__init__()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return compute

    def update(self, z: Tensor, y: Tensor) -> None:
        for metric in self.metrics:
            metric.update(z, y)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.weights, self.metrics, strict=True)
        return torch.stack([weight * metric(z, y) for weight, metric in pairs]).sum()

    def compute(self) -> Tensor:
        pairs = zip(self.weights, self.metrics, strict=True)
        return torch.stack([weight * metric.compute() for weight, metric in pairs]).sum()

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return [getattr(metric, name) for metric in self.metrics]


class Wrapped(Metric):
    """Hands on what it has changed to a metric in it."""

    full_state_update = False

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def update(self, z: Tensor, y: Tensor) -> None:
        self.metric.update(2 * z, y)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.metric(2 * z, y)
        return value

    def compute(self) -> Tensor:
        value: Tensor = self.metric.compute()
        return value

    def reset(self) -> None:
        self.metric.reset()


class Trained(Classifier):
    """Its loss is a metric, of which epochs and steps set attributes."""

    make: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = type(self).make()
        self.seen: list[Tensor] = []

    @property
    def metrics(self) -> list[Any]:
        found = list(self.criterion.modules())
        hidden = [m for own in found for m in getattr(own, "metrics", ())]
        return [m for m in [*found, *hidden] if isinstance(m, MeanLoss)]

    def on_train_epoch_start(self) -> None:
        for metric in self.metrics:
            metric.factor = 1.0 / (1 + self.current_epoch)
        if isinstance(self.criterion, Several):
            self.criterion.weights[0] = 2.0 + self.current_epoch

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        value = self.criterion(z, y)
        if isinstance(value, dict):
            return torch.stack([value["first"], value["second"]]).sum()
        return value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0])
        for metric in self.metrics:
            metric.factor = metric.factor * 0.99
        loss = self.value(z, batch[1])
        for metric in self.metrics:
            metric.factor = metric.factor * 1.1
        again = self.value(0.5 * z, batch[1])
        for metric in self.metrics:
            metric.factor = metric.factor / 1.1
        if isinstance(self.criterion, Parts):
            assert self.criterion.latest is self.criterion.parts["mean"]
            self.seen.append(self.criterion.latest)
        if not isinstance(self.criterion, MetricCollection):
            counted = getattr(self.criterion, "metric", self.criterion)
            self.log("train/loss", counted, on_step=True, on_epoch=True)
        return loss + again

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.value(self.net(batch[0]), batch[1]))


class TrainedByHand(ByHand, Trained):
    pass


LOSSES: dict[str, Callable[[], Any]] = {
    "two sums": MeanLoss,
    "whole state": FullState,
    "parameters": Learnt,
    "parts": Parts,
    "list": Listed,
    "plain list of metrics": lambda: Several(Unregistered(), Unregistered()),
    "wrapped": lambda: Wrapped(Learnt()),
    "sum": lambda: 0.5 * Learnt() + FullState(),
    "collection": lambda: MetricCollection({"first": Learnt(), "second": FullState()}),
}

HOW: dict[str, tuple[type[Trained], dict[str, Any]]] = {
    "threads": (Trained, {"executor": "threads"}),
    "inorder": (Trained, {"executor": "inorder"}),
    "manual": (TrainedByHand, {"mode": "forward", "parallel_modules": ["net"]}),
    "forward": (Trained, {"mode": "forward", "parallel_modules": ["net"]}),
}


def attributes_of(module: Trained) -> dict[str, Any]:
    names = ("factor", "calls", "history", "plain", "average", "latest", "parts")
    found = [{n: vars(m)[n] for n in names if n in vars(m)} for m in module.metrics]
    return {str(i): values for i, values in enumerate(found)}


SOME = {("inorder", "parameters"), ("manual", "parameters"), ("forward", "parts")}
CASES = [
    pytest.param(name, how, marks=() if how == "threads" or (how, name) in SOME else SLOW)
    for name in LOSSES
    for how in HOW
]


@pytest.mark.parametrize("name, how", CASES)
def test_a_metric_as_the_loss_is_as_on_one_device(name: str, how: str) -> None:
    torch.set_default_dtype(torch.float64)
    kind, strategy = HOW[how]
    make = type(kind.__name__, (kind,), {"make": staticmethod(LOSSES[name])})
    options: dict[str, Any] = {"data": lambda: loader(50, 20), "max_epochs": 2}
    several, one = run(make, 3, strategy=strategy, **options), run(make, 1, **options)
    assert_same(several, one)
    assert_equal_trees(gradients(several.module), gradients(one.module), "grad", atol=1e-10, rtol=0)
    for module in (several.module, one.module):
        for metric in module.metrics:
            metric.to("cpu")
    actual, expected = attributes_of(several.module), attributes_of(one.module)
    assert_equal_trees(actual, expected, "attributes", atol=1e-10, rtol=0)
    if name == "parameters":
        assert one.module.criterion.log_scale.item() != 0.3


class Faulty(MeanLoss):
    """Fails for one sample, in a way that is chosen."""

    error: BaseException = AttributeError("no such name")

    def update(self, z: Tensor, y: Tensor) -> None:
        if (z.detach()[:, 0] == z.detach()[:, 0].max()).any() and len(z) < 7:
            raise self.error
        super().update(z, y)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize(
    "error", [AttributeError("a name"), KeyError("a key"), ValueError("a value"), TypeError("it")]
)
def test_an_error_of_a_metric_is_an_error(error: Exception, executor: str) -> None:
    error = type(error)(*error.args)  # one that is kept keeps the frames that it came through
    kind = type("Failing", (Faulty,), {"error": error})
    module = type("Trained", (Trained,), {"make": kind})()
    strategy = DataParallelStrategy(executor=executor)
    with pytest.raises(type(error), match=str(error.args[0])):
        trainer(3, strategy, num_sanity_val_steps=0).fit(module, loader(20, 20), loader(5))


class AtLeastTwo(MeanLoss):
    """Has no value of fewer than two samples, as the coefficient of determination."""

    def compute(self) -> Tensor:
        if self.count < 2:
            raise ValueError("Needs at least two samples")
        return super().compute()


class Measuring(Classifier):
    """Calls a metric beside the loss, and may use what it returns."""

    use: Callable[[Any, Any], Any] = staticmethod(lambda module, value: None)

    def __init__(self) -> None:
        super().__init__()
        self.score = AtLeastTwo()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.score(self.net(batch[0]), batch[1])
        extra = type(self).use(self, value)
        self.log("score", self.score, on_step=True, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        return loss if extra is None else {"loss": loss, "extra": extra}


def test_a_shard_without_a_value_matters_to_nobody_who_does_not_ask() -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(23, 20)}
    assert_same(run(Measuring, 3, **options), run(Measuring, 1, **options))


@pytest.mark.parametrize(
    "use",
    [
        lambda module, value: 2 * value,
        lambda module, value: bool(value > 0),
        lambda module, value: torch.stack([value]),
        lambda module, value: value.detach(),
        lambda module, value: value,
        lambda module, value: setattr(module, "value", value),
    ],
)
def test_a_value_that_there_is_not_is_an_error_to_whom_it_is_asked(use: Any) -> None:
    module = type("Measuring", (Measuring,), {"use": staticmethod(use)})()
    with pytest.raises(ValueError, match="at least two samples"):
        trainer(3).fit(module, loader(3, 3), loader(5))


def test_logged_it_is_that_of_the_batch() -> None:
    def log(module: Any, value: Any) -> None:
        module.log("value", value)

    make = type("Measuring", (Measuring,), {"use": staticmethod(log)})
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(23, 20)}
    assert_same(run(make, 3, **options), run(make, 1, **options))


def test_a_metric_that_a_step_copies_is_one_of_its_own() -> None:
    class Cloning(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanLoss()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clone = self.metric.clone()
            clone.reset()
            z = self.net(batch[0]).detach()
            for _ in range(2):
                clone.update(torch.cat([z, z]), torch.cat([batch[1], batch[1]]))
            assert int(clone.count) == 4 * len(z) and clone.compute() > 0
            self.metric(z, batch[1])
            self.log("metric", self.metric)
            return super().training_step(batch, batch_idx)

    options: dict[str, Any] = {"data": lambda: loader(40, 20)}
    torch.set_default_dtype(torch.float64)
    assert_same(run(Cloning, 3, **options), run(Cloning, 1, **options))


class Scored(nn.Module):
    """Its forward is that of a network and of a metric, which it returns for every sample."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.net, self.metric = nn.Linear(10, 3), metric

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.metric(self.net(x), y)
        return value.expand(len(x))


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [MeanLoss, FullState, Learnt])
@pytest.mark.usefixtures("unchecked")
def test_a_metric_inside_the_drop_in_is_a_module(make: type[MeanLoss], executor: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    devices = devices_of(3)
    net = Scored(make())
    x, y = torch.randn(9, 10), torch.arange(9) % 3
    several = DataParallel(copy.deepcopy(net).to(devices[0]), devices, executor=executor)
    for factor in (1.0, 0.3):
        net.metric.factor = several.module.metric.factor = factor
        # A mean over shards of one size is that of the batch.
        net(x, y).mean().backward()
        several(x.to(devices[0]), y.to(devices[0])).mean().backward()
    actual, expected = gradients(several.module), gradients(net)
    assert_equal_trees(actual, expected, "grad", atol=1e-10, rtol=0)
    several.close()


@pytest.mark.parametrize("output", [None, 1])
@pytest.mark.usefixtures("unchecked")
def test_a_metric_inside_a_spread_forward_may_have_parameters(output: int | None, on: str) -> None:
    class Inside(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Learnt()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.net(x)
            return self.inner(z, y).expand(len(x))

        def loss(self, batch: Any) -> Tensor:
            return self(*batch).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("inner", self.inner, on_step=True, on_epoch=True)
            return loss

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(40, 20)}
    strategy = {"mode": "forward", "output_device": devices_of(2)[output] if output else None}
    strategy["parallel_modules"] = ["net"]
    if output and on == "cpu":
        pytest.skip("one CPU has no other output device")
    assert_same(run(Inside, 3, strategy=strategy, **options), run(Inside, 1, **options))


@pytest.mark.parametrize(
    "strategy",
    [{"weights": [0, 1, 1]}, {"weights": [1, 0, 1]}, {"weights": [5, 1, 1]}, {"buffers": "mean"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["parts", "parameters"])
def test_a_metric_as_the_loss_whoever_has_samples(name: str, strategy: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    make = type("Trained", (Trained,), {"make": staticmethod(LOSSES[name])})
    options: dict[str, Any] = {"data": lambda: loader(41, 20), "max_epochs": 2}
    several, one = run(make, 3, strategy=strategy, **options), run(make, 1, **options)
    assert_same(several, one)
    actual, expected = attributes_of(several.module), attributes_of(one.module)
    assert_equal_trees(actual, expected, "attributes", atol=1e-10, rtol=0)


def test_an_error_leaves_the_metrics_as_they_were() -> None:
    class Failing(MeanLoss):
        fails = True

        def compute(self) -> Tensor:
            if type(self).fails and self.count < 7:
                raise KeyError("a key")
            return super().compute()

    torch.set_default_dtype(torch.float64)
    module = type("Trained", (Trained,), {"make": Failing})()
    before = {name: set(vars(own)) for name, own in module.criterion.named_modules()}
    with pytest.raises(KeyError, match="a key"):
        trainer(3, num_sanity_val_steps=0).fit(module, loader(40, 20), loader(5))
    after = {name: set(vars(own)) for name, own in module.criterion.named_modules()}
    assert after == before
    assert not module.criterion.update_called and module.criterion.total == 0
    Failing.fails = False
    module.criterion.to("cpu")
    module.criterion(torch.zeros(4, 3), torch.arange(4) % 3)
    assert int(module.criterion.count) == 4
