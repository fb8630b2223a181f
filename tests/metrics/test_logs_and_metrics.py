"""`self.log` and torchmetrics inside steps: the values of one device, on step and on epoch."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from oracle import Classifier, assert_equal_trees, assert_same, loader, run, samples, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.text import CharErrorRate
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on")

Step = Callable[[Any, Any, int], Any]


class Stepwise(Classifier):
    """Calls `step(self, batch, batch_idx)` in training and validation, and keeps what is logged."""

    def __init__(self, step: Step, make: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.step = step
        self.metrics = nn.ModuleDict({"in train": make(), "in val": make()})

    @property
    def stage(self) -> str:
        return "train" if self.training else "val"

    @property
    def metric(self) -> Any:
        return self.metrics[f"in {self.stage}"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(self, batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)


class History(Callback):
    """The metrics after every training batch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, job: Any, *_: Any) -> None:
        self.rows.append({k: v.clone() for k, v in job.callback_metrics.items()})


def logged(
    step: Step,
    devices: int,
    make: Callable[[], nn.Module] = nn.Identity,
    data: Callable[[], Any] = loader,
    **kwargs: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    history = History()
    job = trainer(devices, max_epochs=2, callbacks=[history], **kwargs)
    module = Stepwise(step, make)
    job.fit(module, data(), data())
    result = {"fit": dict(job.callback_metrics), "logged": dict(job.logged_metrics)}
    result["steps"] = history.rows
    result["test"] = job.test(module, data(), verbose=False)
    return result


def assert_same_logs(step: Step, devices: int = 4, *, atol: float = 1e-10, **kwargs: Any) -> None:
    torch.set_default_dtype(torch.float64)
    expected = logged(step, 1, **kwargs)
    assert_equal_trees(logged(step, devices, **kwargs), expected, "logged", atol=atol, rtol=atol)
    assert expected["test"], "nothing was logged"


def log_with(**options: Any) -> Step:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        value = {"min": x.min(), "max": x.max(), "sum": x.sum()}.get(
            options.get("reduce_fx", ""), x.mean()
        )
        module.log("value", value, **options)

    return step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_step": True, "on_epoch": True},
        {"reduce_fx": "min"},
        {"reduce_fx": "max", "on_step": True, "on_epoch": True},
        {"reduce_fx": "sum"},
        {"prog_bar": True, "logger": False},
        {"add_dataloader_idx": False},
    ],
    ids=str,
)
def test_logged_values_are_those_of_the_whole_batch(options: dict[str, Any]) -> None:
    assert_same_logs(log_with(**options))


def test_options_of_log_may_be_given_by_position() -> None:
    assert_same_logs(lambda module, batch, i: module.log("value", batch[0].mean(), True, False))


def test_low_precision_and_plain_numbers_are_averaged_in_full_precision() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        module.log_dict({"float": batch[0].mean().item(), "flag": True, "index": float(batch_idx)})
        module.log("numpy", np.float64(batch_idx + 0.1))

    assert_same_logs(step)


@pytest.mark.parametrize(
    "batch_size",
    [
        lambda x: len(x),
        lambda x: 1,
        lambda x: 64,
        lambda x: 7 * len(x),
        lambda x: int((x[:, 0] > 0).sum()),
        lambda x: (x[:, 0] > 0).sum(),
    ],
    ids=["samples", "one", "constant", "tokens", "valid items", "tensor"],
)
@pytest.mark.usefixtures("unchecked")
def test_a_given_batch_size_weighs_as_on_one_device(batch_size: Callable[[Tensor], Any]) -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        n = batch_size(x)
        is_count = n == int((x[:, 0] > 0).sum()) and n != len(x)
        value = x[x[:, 0] > 0].mean() if is_count else x.mean()
        module.log("value", value, on_epoch=True, batch_size=n)

    assert_same_logs(step, 3)


def test_a_mean_over_nothing_counts_for_nothing() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        valid = batch[0][batch[0][:, 0] > 1.2]
        module.log("value", valid.mean(), on_epoch=True, on_step=False, batch_size=len(valid))

    assert_same_logs(step, 7, data=lambda: loader(n=50))


def test_the_same_key_twice_in_a_step_is_merged_call_by_call() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        for column in (0, 1):
            module.log("value", batch[0][:, column].mean())

    assert_same_logs(step)


def test_keys_that_only_some_replicas_log_are_an_error_that_names_both() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        if batch[0][0, 0].item() == samples()[0][0][0].item():
            module.log("first", 1.0)

    with pytest.raises(
        ValueError,
        match=r"'first'.*got it from replica 0 on \S+:0 .*, but not from replica 1",
    ):
        logged(step, 2)


def test_arguments_that_differ_between_replicas_are_an_error() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        module.log("value", 1.0, prog_bar=batch[0][0, 0].item() == samples()[0][0][0].item())

    with pytest.raises(ValueError, match=r"self.log\('value'\).*prog_bar=True.*prog_bar=False"):
        logged(step, 2)


def test_the_user_may_override_log() -> None:
    class Prefixed(Classifier):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().log(f"mine/{name}", *args, **kwargs)

    job = trainer(3, max_epochs=1)
    module = Prefixed()
    job.fit(module, loader(), loader())
    assert set(job.callback_metrics) >= {"mine/val/loss", "mine/train/loss"}
    assert "log" not in module.__dict__


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


class Largest(Metric):
    """Keeps all values in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values.flatten())

    def compute(self) -> Tensor:
        return torch.cat(list(self.values)).topk(3).values.sum()


class Ratio(Metric):
    """Correct answers and their number, both counted by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, correct: Any, total: int) -> None:
        self.correct = self.correct + correct
        self.total = self.total + total

    def compute(self) -> Tensor:
        return self.correct / self.total


def on_logits(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(module.net(batch[0]).softmax(1), batch[1])


def on_targets(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(batch[1])


def on_inputs(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(batch[0][:, 0], batch[0][:, 1])


def on_values(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(batch[0])


def on_loss(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(module.loss(batch))


def on_loss_item(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(module.loss(batch).item())


def on_weighted_loss(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(module.loss(batch), weight=len(batch[1]))


def on_summed_loss(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(module.loss(batch) * len(batch[1]))


def on_largest(module: Stepwise, metric: Any, batch: Any) -> None:
    metric(batch[0].max())


def on_counts(module: Stepwise, metric: Any, batch: Any) -> None:
    correct = module.net(batch[0]).argmax(1) == batch[1]
    metric(correct.sum().item(), len(correct))


def on_each_sample(module: Stepwise, metric: Any, batch: Any) -> None:
    for x in batch[0]:
        metric(x[0], x[1])


def on_queries(module: Stepwise, metric: Any, batch: Any) -> None:
    scores = module.net(batch[0])
    indexes = (batch[0][:, 0] > 0).long()
    metric(scores.softmax(1)[:, 0], batch[1] == 0, indexes=indexes)


def on_texts(module: Stepwise, metric: Any, batch: Any) -> None:
    texts = [f"{x:.2f}" for x in batch[0][:, 0]]
    metric(texts, [text.replace("1", "2") for text in texts])


METRICS: dict[str, tuple[Callable[[], Any], Any]] = {
    "accuracy": (lambda: MulticlassAccuracy(3), on_logits),
    "macro F1": (lambda: MulticlassF1Score(3, average="macro"), on_logits),
    "AUROC": (lambda: MulticlassAUROC(3), on_logits),
    "squared error": (MeanSquaredError, on_inputs),
    "squared error, one sample at a time": (MeanSquaredError, on_each_sample),
    "correlation": (PearsonCorrCoef, on_inputs),
    "R2": (R2Score, on_inputs),
    "retrieval": (RetrievalMAP, on_queries),
    "text": (CharErrorRate, on_texts),
    "mean of losses": (torchmetrics.MeanMetric, on_loss),
    "mean of loss items": (torchmetrics.MeanMetric, on_loss_item),
    "weighted mean of losses": (torchmetrics.MeanMetric, on_weighted_loss),
    "sum of sums": (torchmetrics.SumMetric, on_summed_loss),
    "largest value": (torchmetrics.MaxMetric, on_largest),
    "full state update": (Distinct, on_targets),
    "list state": (Largest, on_values),
    "numbers counted by the step": (Ratio, on_counts),
    "min and max": (lambda: MinMaxMetric(MulticlassAccuracy(3)), on_logits),
    "class by class": (
        lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None), labels=["a", "b", "c"]),
        on_logits,
    ),
    "compute groups": (
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="c/"),
        on_logits,
    ),
    "nested collection": (
        lambda: MetricCollection(
            {
                "a": MetricCollection([MulticlassAccuracy(3)], postfix="_x"),
                "b": MulticlassAUROC(3),
            }
        ),
        on_logits,
    ),
    "composition": (lambda: MulticlassAccuracy(3) + MulticlassF1Score(3), on_logits),
}


COMPUTED_AT_THE_END = ("min and max", "class by class")  # they return dicts


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("how", ["forward", "update"])
def test_every_metric_gives_the_value_of_one_device(name: str, how: str) -> None:
    make, use = METRICS[name]

    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        metric, options = module.metric, {"on_epoch": True, "on_step": how == "forward"}
        use(module, metric if how == "forward" else metric.update, batch)
        if isinstance(metric, MetricCollection):
            names = {f"{module.stage}/{key}": m for key, m in metric.items(copy_state=False)}
            module.log_dict(names, **options)
        elif name not in COMPUTED_AT_THE_END:
            module.log(f"{module.stage}/metric", metric, **options)

    def compute(module: Stepwise) -> None:
        """What cannot be logged as an object is computed at the epoch's end."""
        module.log_dict(module.metric.compute())
        module.metric.reset()

    class AtEnd(Stepwise):
        def on_validation_epoch_end(self) -> None:
            compute(self)

        def on_test_epoch_end(self) -> None:
            compute(self)

    torch.set_default_dtype(torch.float64)
    results = []
    for devices in (1, 3):
        torch.manual_seed(0)
        history = History()
        job = trainer(devices, max_epochs=2, callbacks=[history], num_sanity_val_steps=0)
        module = (AtEnd if name in COMPUTED_AT_THE_END else Stepwise)(step, make)
        data = loader(n=51, batch_size=17)
        job.fit(module, data, data)
        result = {"fit": dict(job.callback_metrics), "steps": history.rows}
        results.append({**result, "test": job.test(module, data, verbose=False)})
    expected, result = results
    assert expected["test"]
    # A few metrics keep single precision, whatever the default.
    assert_equal_trees(result, expected, name, atol=1e-6, rtol=1e-6)


class Scaled(Metric):
    """A sum of rows, by a factor that is given beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, rows: Tensor, *, by: float) -> None:
        self.sum = self.sum + by * rows.sum()

    def compute(self) -> Tensor:
        return self.sum


@pytest.mark.parametrize("by", [2, 2.0, True])
def test_a_number_for_a_metric_may_happen_to_be_the_size_of_the_shards(by: Any) -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        module.metric.update(batch[0], by=by)
        module.log(module.stage, module.metric)

    for size in (2, 1):
        assert_same_logs(step, make=Scaled, data=lambda n=4 * size: loader(12, n))


def test_overrides_of_outputs_do_not_join_arguments_of_metrics() -> None:
    torch.set_default_dtype(torch.float64)

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.metric.update(preds=module(batch[0]), target=batch[1])
        module.log("acc", module.metric)

    def make() -> Any:
        return Stepwise(step, lambda: MulticlassAccuracy(num_classes=3))

    strategy = {"gather_overrides": {"target": "first", "0": "first"}}
    assert_same(run(make, 3, strategy=strategy), run(make, 1))


class Squeezing(Classifier):
    """Its numbers are 0-dim where a shard has one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.metric.update(self.net(x)[:, :1].squeeze(), y.float().squeeze())
        self.log("val/mse", self.metric)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])[:, :1].squeeze()


def test_a_squeeze_may_take_the_dim_of_a_shard_of_one_sample() -> None:
    actual, expected = (run(Squeezing, k, data=lambda: loader(14, 7)) for k in (4, 1))
    assert_same(actual, expected, atol=1e-5)


class InDict(Classifier):
    """Metrics that nobody registered, and that it moves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = {"auroc": MulticlassAUROC(3), "acc": [MulticlassAccuracy(3)]}

    def all_metrics(self) -> list[Any]:
        return [self.by_name["auroc"], *self.by_name["acc"]]

    def on_validation_start(self) -> None:
        for metric in self.all_metrics():
            metric.to(self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for metric in self.all_metrics():
            metric.update(self.net(batch[0]).softmax(1), batch[1])

    def on_validation_epoch_end(self) -> None:
        for i, metric in enumerate(self.all_metrics()):
            self.log(f"val/{i}", metric.compute())
            metric.reset()


def test_metrics_in_plain_containers_see_the_whole_batch() -> None:
    assert_same(run(InDict, 4), run(InDict, 1), atol=1e-5)


def test_metrics_are_reset_where_the_module_resets_them() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.metric.reset()
        module.metric(batch[0].flatten())
        module.log(module.stage, module.metric)

    assert_same_logs(step, make=torchmetrics.MeanMetric)


def test_tensors_that_the_step_changes_after_the_call_do_not_change_the_metric() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        x = batch[0].clone()
        value = x.mean()
        module.metric(x)
        module.log(module.stage, module.metric)
        module.log("value", value)
        x.zero_()
        value.zero_()

    assert_same_logs(step, make=torchmetrics.MeanMetric)


def test_compute_inside_a_step_is_refused_with_the_way_out() -> None:
    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        module.metric.update(batch[0])
        module.metric.compute()

    with pytest.raises(RuntimeError, match=r"compute\(\) of MeanMetric.*self.log\(name, metric\)"):
        logged(step, 2, make=torchmetrics.MeanMetric)


def test_what_a_metric_returns_inside_a_step_is_its_shards_value() -> None:
    shards: list[tuple[float, float]] = []

    def step(module: Stepwise, batch: Any, batch_idx: int) -> None:
        value = module.metric(batch[0].flatten())
        shards.append((float(value), float(batch[0].mean())))

    logged(step, 3, make=torchmetrics.MeanMetric)
    assert shards and all(math.isclose(a, b, abs_tol=1e-6) for a, b in shards)


def test_metrics_are_the_users_own_again_after_the_run() -> None:
    module = Stepwise(
        lambda module, batch, i: on_logits(module, module.metric, batch),
        lambda: MulticlassConfusionMatrix(3),
    )
    metric = module.metrics["in train"]
    before = set(metric.__dict__)
    trainer(3, max_epochs=1).fit(module, loader(), loader())
    assert set(metric.__dict__) == before
    metric.reset()
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert int(metric.compute().sum()) == 2


class Words(Dataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(i)), "word": f"word {i}"}


def collecting(append: Callable[[Any, Any, int], None]) -> Callable[[int], Any]:
    class Collecting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.items: list[Any] = []
            self.by_name: dict[str, list[Any]] = {"x": [], "word": []}
            self.per_loader: list[list[Any]] = [[], []]

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            append(self, batch, batch_idx)
            return batch["x"]

    def collected(devices: int) -> Any:
        module = Collecting()
        trainer(devices).predict(
            module, DataLoader(Words(), batch_size=4), return_predictions=False
        )
        return [module.items, module.by_name, module.per_loader]

    return collected


def append_tensors(module: Any, batch: Any, batch_idx: int) -> None:
    module.items.append(batch["x"])


def append_means(module: Any, batch: Any, batch_idx: int) -> None:
    module.items.append({"mean": batch["x"].mean(), "index": batch_idx})


def append_to_dict(module: Any, batch: Any, batch_idx: int) -> None:
    module.by_name["x"].append(batch["x"])
    module.by_name["word"].extend(batch["word"])
    module.by_name.setdefault("new", []).append(batch["x"].sum(1))


def count_in_dict(module: Any, batch: Any, batch_idx: int) -> None:
    module.by_name["calls"] = module.by_name.get("calls", 0)
    module.by_name["x"].append(batch["x"])
    module.by_name[f"batch {batch_idx}"] = batch["x"].sum(1)


def append_labels(module: Any, batch: Any, batch_idx: int) -> None:
    module.items.extend(batch["x"][:, 0].long().tolist())


def append_arrays(module: Any, batch: Any, batch_idx: int) -> None:
    module.items.append(batch["x"].cpu().numpy())


def append_to_inner_list(module: Any, batch: Any, batch_idx: int) -> None:
    module.per_loader[batch_idx % 2].append(batch["x"])


def append_per_sample(module: Any, batch: Any, batch_idx: int) -> None:
    for row, word in zip(batch["x"], batch["word"], strict=True):
        module.items.append((word, row))


@pytest.mark.parametrize(
    "append",
    [
        append_tensors,
        append_means,
        append_to_dict,
        append_to_inner_list,
        append_per_sample,
        append_labels,
        append_arrays,
        count_in_dict,
    ],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_lists_that_steps_append_to_hold_what_one_device_appends(append: Any, devices: int) -> None:
    collected = collecting(append)
    assert_equal_trees(collected(devices), collected(1), "items", atol=1e-6, rtol=0)


def test_labels_of_shards_of_one_sample_are_not_added_up() -> None:
    collected = collecting(append_labels)
    assert_equal_trees(collected(7), collected(1), "items", atol=0, rtol=0)


def test_an_attribute_bound_to_different_values_is_named_once() -> None:
    class Binding(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += len(batch[0])
            self.same = batch_idx
            return super().training_step(batch, batch_idx)

    module = Binding()
    with pytest.warns(UserWarning) as caught:
        trainer(3, max_epochs=2).fit(module, loader(), loader())
    messages = [str(w.message) for w in caught if "binds" in str(w.message)]
    assert len(messages) == 1 and "Binding.seen to different values" in messages[0]
    assert module.seen == 2 * (9 + 9 + 1) and module.same == 2


def test_attributes_of_a_step_reach_a_root_that_has_no_samples() -> None:
    class Binding(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.latest = batch_idx
            return super().training_step(batch, batch_idx)

    module = Binding()
    strategy = DataParallelStrategy(weights=[0, 1, 1])
    trainer(3, strategy, max_epochs=1).fit(module, loader(), loader())
    assert module.latest == 2
    assert module.device == torch.device("cpu") and "log" not in module.__dict__
