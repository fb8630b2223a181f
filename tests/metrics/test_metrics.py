"""torchmetrics metrics inside steps: states, values and losses of one device."""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from support.oracle import (
    Classifier,
    assert_equal_trees,
    assert_same,
    loader,
    run,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    RunningMean,
)
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef, R2Score
from torchmetrics.text import CharErrorRate
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Own(Metric):
    """A metric of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.total / self.count


class Distinct(Metric):
    """How many classes were seen: needs its whole state in every update."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3), dist_reduce_fx=None)

    def update(self, target: Tensor) -> None:
        seen = self.seen.clone()
        seen[target.unique()] = 1
        self.seen = seen

    def compute(self) -> Tensor:
        return self.seen.sum()


class Ratio(Own):
    """Correct answers and their number, both counted by the step."""

    def update(self, correct: Any, total: int) -> None:
        self.total = self.total + correct
        self.count = self.count + total


class Scaled(Own):
    """A sum of rows, by a factor that is given beside them."""

    def update(self, rows: Tensor, *, by: float) -> None:
        self.total, self.count = self.total + by * rows.sum(), self.count + 1


def on_each_sample(metric: Any, x: Tensor, y: Tensor, z: Tensor) -> None:
    for row in x:
        metric(row[0], row[1])


def on_texts(metric: Any, x: Tensor, y: Tensor, z: Tensor) -> None:
    texts = [f"{value:.2f}" for value in x[:, 0]]
    metric(texts, [text.replace("1", "2") for text in texts])


def on_written(metric: Any, x: Tensor, y: Tensor, z: Tensor) -> None:
    """Writes to the argument after the call."""
    x = x.clone()
    metric(x)
    x.zero_()


Use = Callable[[Any, Tensor, Tensor, Tensor], Any]
on_logits: Use = lambda metric, x, y, z: metric(z.softmax(1), y)
on_inputs: Use = lambda metric, x, y, z: metric(x[:, 0], x[:, 1])
on_mean: Use = lambda metric, x, y, z: metric(z.mean())
on_column: Use = lambda metric, x, y, z: metric(z[:, 0])

METRICS: dict[str, tuple[Callable[[], Any], Use]] = {
    "accuracy": (lambda: MulticlassAccuracy(3), on_logits),
    "one sample at a time": (MeanSquaredError, on_each_sample),
    "correlation": (PearsonCorrCoef, on_inputs),
    "text": (CharErrorRate, on_texts),
    "mean of losses": (MeanMetric, on_mean),
    "weighted mean": (MeanMetric, lambda m, x, y, z: m(z.mean(), weight=len(y))),
    "full state update": (Distinct, lambda m, x, y, z: m(y)),
    "numbers counted by the step": (
        Ratio,
        lambda m, x, y, z: m((z.argmax(1) == y).sum().item(), len(y)),
    ),
    "a factor as large as a shard": (Scaled, lambda m, x, y, z: m(x, by=6)),
    "squeezed": (MeanSquaredError, lambda m, x, y, z: m(z[:, :1].squeeze(), y.to(z).squeeze())),
    "min and max": (lambda: MinMaxMetric(MulticlassAccuracy(3)), on_logits),
    "compute groups": (
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="c/"),
        on_logits,
    ),
    "composition": (lambda: MulticlassAccuracy(3) + MulticlassF1Score(3), on_logits),
    "reset in the step, written to afterwards": (MeanMetric, on_written),
    "window of means": (lambda: RunningMean(window=2), on_mean),
    "window of lists": (lambda: Running(CatMetric(), window=2), on_column),
}
NO_BATCH_VALUE = ("one sample at a time", "min and max", "window of lists")
"""The last sample's is logged there, or what no device can log: a dict, a list."""


class Measured(Classifier):
    """Calls every metric by forward and by update, and computes all after each batch."""

    validation_step = None

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})
        self.updated = nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})
        self.hidden = {"in a dict": [MulticlassAccuracy(3)]}  # which it moves itself
        self.history: list[dict[str, Any]] = []

    def on_fit_start(self) -> None:
        self.hidden["in a dict"][0].to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self.net(x)
        for name, (_, use) in METRICS.items():
            if "reset" in name:
                self.called[name].reset()
                self.updated[name].reset()
            use(self.called[name], x, y, z)
            use(self.updated[name].update, x, y, z)
            if isinstance(self.called[name], Metric) and name not in NO_BATCH_VALUE:
                self.log(name, self.called[name], on_step=True, on_epoch=False)
        self.hidden["in a dict"][0].update(z.softmax(1), y)
        return F.cross_entropy(z, y)

    def on_train_batch_end(self, *_: Any) -> None:
        row = {name: value.clone() for name, value in self.trainer.callback_metrics.items()}
        found = {"hidden": self.hidden["in a dict"][0].compute(), "on step": row}
        for name in METRICS:
            found[name] = [m[name].compute() for m in (self.called, self.updated)]
        self.history.append(found)


@cache
def measured(devices: int, on: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module = Measured()
    overrides = {"gather_overrides": {"target": "first", "0": "first"}}  # not for arguments
    strategy = DataParallelStrategy(**overrides) if devices > 1 else "auto"
    trainer(devices, strategy, max_epochs=2).fit(module, loader(51, 17))
    return module.history


@pytest.mark.parametrize("name", [*METRICS, "hidden"])
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.usefixtures("unchecked")
def test_every_metric_gives_the_values_of_one_device(name: str, on: str) -> None:
    actual, expected = (
        [(row[name], row["on step"].get(name, 0)) for row in measured(k, on)] for k in (3, 1)
    )
    assert len(expected) == 6
    assert_equal_trees(actual, expected, name, atol=1e-6, rtol=1e-6)


class Learnt(Metric):
    """The mean of scaled losses; the scale may be trained, and an epoch sets a factor."""

    is_differentiable, full_state_update = True, False

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.factor = 1.0
        self.history: list[int] = []
        self.log_scale = nn.Parameter(torch.tensor(0.3), requires_grad=trains)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, z: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(z, y, reduction="none") * (-self.log_scale).exp()
        self.total = self.total + self.factor * losses.sum() + len(y) * self.log_scale
        self.count = self.count + len(y)
        self.history.append(len(y))

    def compute(self) -> Tensor:
        return self.total / self.count


class Returned(Classifier):
    """Trains with what a metric returns, and logs what others return."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(3, average="macro")
        self.error = MeanSquaredError(squared=False)
        self.fit = R2Score()  # for two samples at least
        self.largest = torchmetrics.MaxMetric()
        self.both = MetricCollection({"acc": MulticlassAccuracy(3), "macro": MulticlassF1Score(3)})
        self.single = torchmetrics.MeanAbsoluteError()
        self.criterion, self.plain = Learnt(trains=True), Learnt(trains=False)

    def on_train_epoch_start(self) -> None:
        self.criterion.factor = self.plain.factor = 1.0 / (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x)
        self.log("f1", self.f1(z, y), on_step=True, on_epoch=True)
        first = self.error(z, F.one_hot(y, 3).to(z))
        second = self.error(2 * z, F.one_hot(y, 3).to(z))
        self.log("second", second, batch_size=len(x))
        self.log("first", first)
        self.log("fit", self.fit(z[:, 0], y.to(z)))
        self.log("largest", self.largest(z), reduce_fx="max")
        self.log_dict(self.both(z, y))
        values = [self.single(row.mean(), label.to(row)) for row, label in zip(x, y, strict=True)]
        self.log("of samples", torch.stack(values).mean())
        return self.criterion(z, y) + self.plain(z, y)


HOW: dict[str, dict[str, Any]] = {
    "threads": {"executor": "threads"},
    "idle root": {"weights": [0, 1, 1], "executor": "inorder"},
    "forward": {"mode": "forward"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.usefixtures("unchecked")
def test_what_metrics_return_is_one_devices(how: str) -> None:
    """Batches of 20 and 3: then each of three shards is too small for some of them."""
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(23, 20), "max_epochs": 2}
    several, one = run(Returned, 3, strategy=HOW[how], **options), run(Returned, 1, **options)
    assert_same(several, one)
    assert several.module.criterion.history == one.module.criterion.history


class Stepwise(Classifier):
    """Calls `step(self, batch)` beside the loss."""

    validation_step = None

    def __init__(self, step: Any, make: Callable[[], Any] = MeanMetric) -> None:
        super().__init__()
        self.step, self.metric = step, make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        extra = self.step(self, batch)
        loss = self.loss(batch)
        return loss if extra is None else {"loss": loss, "extra": extra}


def fit(module: Any, n: int = 6, devices: int = 3, **options: Any) -> Any:
    job = trainer(devices, DataParallelStrategy(**options), num_sanity_val_steps=0, max_epochs=1)
    job.fit(module, loader(n, n))
    return module


@pytest.mark.usefixtures("unchecked")
def test_the_value_in_a_step_is_its_shards_and_recorded_arguments_are_let_go() -> None:
    shards: list[tuple[float, float]] = []

    def step(module: Any, batch: Any) -> None:
        shards.append((float(module.metric(batch[0].flatten())), float(batch[0].mean())))

    module = Stepwise(step)
    before = set(vars(module.metric))
    fit(module)
    assert len(shards) == 3 and all(math.isclose(a, b, abs_tol=1e-6) for a, b in shards)
    assert set(vars(module.metric)) == before
    module.metric.reset()
    module.metric.update(torch.tensor([1.0, 3.0]))
    assert module.metric.compute() == 2


@pytest.mark.usefixtures("unchecked")
def test_a_metric_that_only_some_shards_update_is_named_once() -> None:
    def step(module: Any, batch: Any) -> None:
        if len(batch[0]) > 1:
            module.metric.update(batch[0])

    with pytest.warns(
        UserWarning, match=r"metric \(MeanMetric\).*replica 0.*not on replica 1"
    ) as all_:
        trainer(2, max_epochs=2).fit(Stepwise(step), loader(6, 3))
    assert [w.filename for w in all_ if "MeanMetric" in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*MeanMetric")
        fit(Stepwise(step))


class Faulty(Own):
    """Fails on a replica."""

    def update(self, x: Tensor) -> None:
        raise KeyError("a key")


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.usefixtures("unchecked")
def test_an_error_of_a_metric_is_an_error_and_leaves_it_as_it_was(executor: str) -> None:
    module = Stepwise(lambda m, b: m.metric(b[0]), Faulty)
    before = set(vars(module.metric))
    with pytest.raises(KeyError, match="a key"):
        fit(module, executor=executor)
    assert set(vars(module.metric)) == before
    assert not module.metric.update_called and module.metric.total == 0


@pytest.mark.usefixtures("unchecked")
def test_compute_inside_a_step_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"compute\(\) of MeanMetric.*self.log\(name, metric\)"):
        fit(Stepwise(lambda m, b: m.metric.compute()))
