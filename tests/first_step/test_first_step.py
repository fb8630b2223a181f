"""The first-step check: when it runs, what it says, and that it leaves no trace.

Which losses, logs and outputs it names is the law table's, `test_laws`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import logging
import random
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from oracle import (
    Classifier,
    accelerator,
    assert_equal_trees,
    assert_same,
    devices_of,
    gradients,
    loader,
    run,
    trainer,
)
from places import on_accelerators, on_separate
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.check import Report, first_call
from lightning_dp.parallel.check.compare import distance, rounding
from lightning_dp.parallel.check.draws import OneNumberPerDraw
from lightning_dp.parallel.devices import reset_peak_memory

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

LOGGERS = [f"{name}.utilities.rank_zero" for name in ("lightning.pytorch", "pytorch_lightning")]
"""Of Lightning's lines at INFO: both packages write to that of the one imported last."""


def checked(
    make: Callable[[], Any], *, k: int = 3, check: Any = True, **options: Any
) -> dict[str, Report]:
    """What the check finds in a fit of two batches."""
    of_trainer = {n: options.pop(n) for n in ("precision", "plugins", "data") if n in options}
    if "fast_dev_run" in options:
        of_trainer["fast_dev_run"] = options.pop("fast_dev_run")
    data = of_trainer.pop("data", loader)
    strategy = DataParallelStrategy(check_first_step=check, **options)
    torch.manual_seed(0)
    job = trainer(k, strategy, max_epochs=1, limit_train_batches=2, **of_trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.fit(make(), data(), data())
    return strategy.first_step


class Contrastive(Classifier):
    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self(batch[0]), dim=1)
        return (z @ z.T).exp().mean()


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.norm(x))


# --- what it compares -----------------------------------------------------------------------------


def test_every_kind_of_step_is_checked_once_in_a_run() -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    job = trainer(3, strategy, max_epochs=2)
    module = Classifier()
    job.fit(module, loader(), loader())
    reports = dict(strategy.first_step)
    assert set(reports) == {"training_step", "validation_step"}
    assert all(report.is_same and report.sizes == (4, 3, 2) for report in reports.values())
    job.test(module, loader(), verbose=False)
    assert set(strategy.first_step) == {"test_step"}
    job.predict(module, loader())
    assert set(strategy.first_step) == {"predict_step"}


class SumOfSamples(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Costly(Classifier):
    def sample_cost(self, batch: Any) -> Tensor:
        return batch[0].abs().sum(1)


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "sum": (SumOfSamples, {"loss_reduction": "sum"}),
    "forward": (Contrastive, {"mode": "forward", "parallel_modules": ["net"]}),
    "forward, output elsewhere": (Classifier, {"mode": "forward", "output_device": 1}),
    "an idle device": (Classifier, {"weights": [0, 1, 2]}),
    "adaptive": (Classifier, {"split": "adaptive", "output_device": "cpu"}),
    "by cost": (Costly, {"split": "cost"}),
    "bf16": (Classifier, {"precision": "bf16-mixed"}),
    "float64": (Classifier, {"precision": "64-true"}),
    "three samples": (Classifier, {"data": lambda: loader(n=6, batch_size=3)}),
    "two samples": (Classifier, {"data": lambda: loader(n=4, batch_size=2)}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_step_of_one_device_has_no_difference(name: str) -> None:
    kind, options = SAME[name]
    for report in checked(kind, **options).values():
        assert report.is_same and not report.causes, str(report)


@on_accelerators  # float16 is for them
def test_half_precision_with_a_scaler_is_compared_by_its_own_measure() -> None:
    plugin = MixedPrecision("16-mixed", accelerator())
    report = checked(Classifier, precision=None, plugins=[plugin])["training_step"]
    assert report.is_same


def test_rounding_that_a_module_amplifies_is_no_difference() -> None:
    class Chaotic(Classifier):
        """A logistic map doubles an error in each of its steps."""

        def loss(self, batch: Any) -> Tensor:
            z = self(batch[0]).sigmoid()
            for _ in range(25):
                z = 3.99 * z * (1 - z)
            return z.mean()

    assert checked(Chaotic)["training_step"].is_same


# --- what it says ---------------------------------------------------------------------------------


def test_one_warning_names_all_that_differs_with_values_cause_and_way_out() -> None:
    class Many(Contrastive):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z = self(batch[0])
            self.log("spread", z.std())
            return {"loss": self.loss(batch), "largest": z.max()}

    strategy = DataParallelStrategy()
    torch.manual_seed(0)
    with pytest.warns(UserWarning) as caught:
        job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        job.fit(Many(), loader())
    [text] = [str(w.message) for w in caught if "check_first_step" in str(w.message)]
    lines = text.splitlines()
    assert lines[0] == (
        "check_first_step: on the first 9 samples, split as 4, 3, 2, training_step does not give "
        "the numbers of one device."
    )
    assert any("It looks at the whole batch at once" in line for line in lines)
    assert any('mode="forward"' in line for line in lines)
    for name in ("the loss", "the gradient of net.0.weight", "self.log('spread')"):
        assert any(line.startswith(f"- {name}: ") and " on 3 devices" in line for line in lines)
    assert any(line.startswith("- output['largest']: ") for line in lines)


@pytest.mark.parametrize("kind", ["Normed", "VAE", "Dropped", "Path", "NumPy"])
def test_what_every_data_parallel_trainer_has_is_one_line_at_info(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class VAE(Classifier):
        def forward(self, x: Tensor) -> Any:
            h = self.net(x)
            return h + torch.randn_like(h) * torch.distributions.Normal(0.0, 1.0).rsample(
                h.shape
            ).to(h)

    class Dropped(Classifier):
        def forward(self, x: Tensor) -> Any:
            return self.net(F.dropout(x, 0.5, self.training))

    class Path(Classifier):
        def forward(self, x: Tensor) -> Any:
            keep = x.new_empty(len(x), 1).bernoulli_(0.7)
            return self.net(x * keep / 0.7)

    class NumPy(Classifier):
        def forward(self, x: Tensor) -> Any:
            return self.net(x + torch.as_tensor(np.random.randn(*x.shape)).to(x))

    kinds: dict[str, Any] = {"Normed": Normed, "VAE": VAE, "Dropped": Dropped, "Path": Path}
    kinds["NumPy"] = NumPy
    strategy = DataParallelStrategy()
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, LOGGERS[0]), caplog.at_level(logging.INFO, LOGGERS[1]):
        job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        job.fit(kinds[kind](), loader())
    [line] = [m for m in caplog.messages if "check_first_step" in m]
    assert "gives the numbers of one device" in line and "but: " in line
    [cause] = strategy.first_step["training_step"].causes
    assert cause == ("batch norm" if kind == "Normed" else "random")


def test_noise_does_not_hide_a_sum() -> None:
    class Noisy(Classifier):
        """As a variational autoencoder, whose terms are sums."""

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(x + torch.randn_like(x)), y, reduction="sum")

    report = checked(Noisy)["training_step"]
    assert {"sum", "random"} <= set(report.causes) and report.differences


def test_success_is_a_line_at_info_only_where_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for check, count in ((True, 2), ("auto", 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            checked(Classifier, check=check)
        assert sum("check_first_step" in m for m in caplog.messages) == count


def test_what_a_step_prints_warns_and_logs_in_the_check_is_not_shown() -> None:
    class Talking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            print("printed")
            print("to stderr", file=sys.stderr)
            logging.getLogger("talking").warning("logged")
            warnings.warn("warned", stacklevel=2)
            return super().training_step(batch, batch_idx)

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # the whole handler
    logging.getLogger("talking").addHandler(handler)
    shown, strategy = io.StringIO(), DataParallelStrategy(check_first_step=True)
    try:
        with redirect_stdout(shown), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
            job.fit(Talking(), loader())
    finally:
        logging.getLogger("talking").removeHandler(handler)
    assert strategy.first_step["training_step"].is_same
    assert shown.getvalue().count("printed") == len(records) == 3
    assert sum(str(w.message) == "warned" for w in caught) == 3


class Dropping(Classifier):
    """Looks at the whole batch, and then drops half of it by hand."""

    def drop(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.5)

    def forward(self, x: Tensor) -> Any:
        z = self.net(x)
        return self.drop(z - z.mean(0))


class DroppingPaths(Dropping):
    def drop(self, z: Tensor) -> Tensor:
        return z * (0.3 + torch.rand(len(z), 1, device=z.device)).floor()


class Masking(Dropping):
    def drop(self, z: Tensor) -> Tensor:
        return z.masked_fill(torch.rand_like(z) < 0.75, 0.0)


@pytest.mark.parametrize("kind", [Dropping, DroppingPaths, Masking])
def test_a_mask_drawn_at_random_does_not_hide_a_loss_over_the_whole_batch(kind: Any) -> None:
    assert "whole batch" in checked(kind)["training_step"].causes


class Timed(Classifier):
    """Logs how long it took, beside a loss that is a sum."""

    reduction = "mean"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        begun = time.perf_counter()
        loss = F.cross_entropy(self(batch[0]), batch[1], reduction=self.reduction)
        self.log("seconds", time.perf_counter() - begun)
        return loss


class TimedSum(Timed):
    reduction = "sum"


def test_a_logged_time_is_no_difference_and_hides_none() -> None:
    assert checked(Timed)["training_step"].is_same
    report = checked(TimedSum)["training_step"]
    assert set(report.causes) == {"sum"} and "seconds" not in str(report)


def test_a_sum_that_is_meant_is_not_advised() -> None:
    class Shared(SumOfSamples):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.scale = Scale.value = Scale.value + 1.0
            return super().training_step(batch, batch_idx) * Scale.value

    class Scale:
        value = 0.0

    causes = checked(Shared, loss_reduction="sum")["training_step"].causes
    assert causes and not any("loss_reduction" in text for text in causes.values())


class Mixing(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        return super().loss([0.7 * x + 0.3 * x[torch.randperm(len(x))], batch[1]])


def test_mixed_samples_are_a_loss_over_the_whole_batch_and_no_chance() -> None:
    assert set(checked(Mixing)["training_step"].causes) == {"whole batch"}


def test_equal_digits_are_told_apart() -> None:
    class Nearly(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            # Seven digits of a mean over the batch are the same for every shard.
            self.log("val/n", 0.6931471 + 1e-9 * len(batch[0]))

    torch.set_default_dtype(torch.float64)
    [_, report] = checked(Nearly, precision="64-true", k=2).values()
    text = str(checked(Nearly, precision="64-true", k=2)["validation_step"])
    assert report is not None and "0.693147 on one device, 0.693147" not in text


# --- when it is left out --------------------------------------------------------------------------


class Failing(Classifier):
    """Fails with few samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < 4:
            raise KeyError("in the check")
        return super().training_step(batch, batch_idx)


class Reading(Classifier):
    """Takes numbers from an iterator, which nothing can set back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(100))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * next(self.numbers)


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)


class Infinite(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.inf


class CompiledPart(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.compile(lambda x: x * 2, backend="eager")


SKIPPED: dict[str, tuple[Any, dict[str, Any], str, bool]] = {
    "an error in the check alone": (
        Failing,
        {"data": lambda: loader(75)},
        "KeyError: 'in the check'",
        True,
    ),
    "an iterator": (Reading, {}, "may move self.numbers on", False),
    "no number": (Infinite, {}, "not finite on the root alone", False),
    "one sample": (Classifier, {"data": lambda: loader(n=1)}, "for one replica alone", False),
    "one replica": (Classifier, {"weights": [0, 1, 0]}, "for one replica alone", False),
    "compiled": (CompiledPart, {}, "compiled parts", False),
    "fast_dev_run": (Classifier, {"fast_dev_run": True}, "fast_dev_run", False),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_where_nothing_is_compared_a_line_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, options, reason, is_info = SKIPPED[name]
    with caplog.at_level(logging.DEBUG):
        report = checked(kind, check="auto", **options)["training_step"]
    assert reason in report.skipped and not report.is_same
    [record] = [
        r for r in caplog.records if reason in r.getMessage() and "training_step" in r.getMessage()
    ]
    assert record.levelno == (logging.INFO if is_info else logging.DEBUG)


def test_a_large_module_is_left_out_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_call, "MOST_BYTES", 100)
    assert "GiB" in checked(Classifier, check="auto")["training_step"].skipped
    assert checked(Classifier)["training_step"].is_same


def test_asked_for_it_runs_in_fast_dev_run_and_on_compiled_parts() -> None:
    assert checked(Classifier, fast_dev_run=True)["training_step"].is_same
    assert checked(CompiledPart)["training_step"].is_same


def test_turned_off_it_does_nothing() -> None:
    assert checked(Contrastive, check=False) == {}


def test_one_device_has_nothing_to_compare() -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    trainer(1, strategy, max_epochs=1).fit(Classifier(), loader(), loader())
    assert strategy.first_step == {}


def test_an_error_of_training_is_raised_as_before() -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("always")

    with pytest.raises(KeyError, match="always"):
        trainer(3).fit(Broken(), loader(), loader())


def test_batches_that_cannot_be_cut_are_not_compared() -> None:
    class Alone(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(2, 10).to(self.device)).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    seeds = DataLoader([{"seed": 1}, {"seed": 2}], batch_size=None)
    assert "for one replica alone" in checked(Alone, data=lambda: seeds)["training_step"].skipped


# --- the pieces -----------------------------------------------------------------------------------


@pytest.fixture
def exact_products() -> Iterator[list[Any]]:
    """What may have short products on GPUs, and now has none."""
    kinds = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    yield kinds
    for kind, precision in zip(kinds, before, strict=True):
        kind.fp32_precision = precision


def test_differences_that_count_are_larger_than_roundings(exact_products: list[Any]) -> None:
    def of(kind: torch.dtype, device: str = "cuda") -> float:
        return rounding([kind, torch.float64], device) ** 0.5

    exact = torch.finfo(torch.float32).eps ** 0.5
    assert of(torch.float32) == of(torch.float32, "cpu") == exact
    for layers in exact_products:
        layers.fp32_precision = "tf32"
        assert of(torch.float32) == 1e-2 and of(torch.float32, "cpu") == exact
        assert of(torch.float64) < 1e-7 and of(torch.bfloat16) > 1e-2
        layers.fp32_precision = "ieee"


DRAWS: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda n: torch.rand(n, 2),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 2)),
    "randint": lambda n: torch.randint(0, 1000, (n, 2)),
    "normal_": lambda n: torch.empty(n, 2).normal_(3.0, 2.0),
    "bernoulli_": lambda n: torch.empty(n, 2).bernoulli_(0.5),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 2), 0.5)),
    "normal": lambda n: torch.normal(torch.ones(n, 2), torch.full((n, 2), 0.5)),
    "exponential_": lambda n: torch.empty(n, 2).exponential_(),
    "dropout": lambda n: F.dropout(torch.ones(n, 2), 0.5),
    "rsample": lambda n: torch.distributions.Normal(torch.ones(n, 2), 2.0).rsample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_shards_draw_what_the_whole_batch_does(name: str) -> None:
    draw, found = DRAWS[name], []
    for n in (5, 3):
        torch.manual_seed(7)
        with OneNumberPerDraw() as draws:
            found.append([draw(n), draw(n)])
        assert draws.names and not draws.uncontrolled
    whole, shard = found
    for a, b in zip(whole, shard, strict=True):
        assert a.shape == (5, 2) and torch.equal(a[:3], b) and a.unique().numel() == 1


def test_a_permutation_reverses_and_a_multinomial_is_drawn_as_it_is() -> None:
    with OneNumberPerDraw() as draws:
        assert torch.randperm(5).tolist() == [4, 3, 2, 1, 0]
        torch.multinomial(torch.ones(5), 2)
    assert list(draws.names) == ["randperm", "multinomial"] and draws.uncontrolled


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (np.array(["a", "b"]), np.array(["a", "b"]), True),
        (np.array(["a", "b"]), np.array(["a", "c"]), False),
        (np.array([1, 2]), np.array([1, 2]), True),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), True),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
    ],
)
def test_values_of_every_kind_are_compared(a: Any, b: Any, is_same: bool) -> None:
    assert (distance(a, b) == 0) is is_same


# --- no trace -------------------------------------------------------------------------------------


class Average:
    """An object of the user's own, with state."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.count += 1


class Leaving(Normed):
    """Leaves something everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.teacher = nn.Linear(10, 10).requires_grad_(False)
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []
        self.latest: deque[int] = deque(maxlen=2)
        self.by_name: dict[str, list[Any]] = {"x": []}
        self.average = Average()
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.drop(x) + 0.1 * self.teacher(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x.add_(0.5))  # in place: the batch is the step's
        noise = torch.rand(1, generator=self.generator).item() + random.random() + np.random.rand()
        loss = F.cross_entropy(z, y) * (1 + 1e-3 * noise)
        self.calls += 1
        self.seen.append(z.detach())
        self.by_name["x"].append(loss.detach())
        with torch.no_grad():
            self.steps += 1
            self.teacher.weight.mul_(0.99)
            self.teacher.bias.data.add_(0.01)
        self.acc(z, y)
        self.log("train/acc", self.acc, on_step=True, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        self.logger.log_metrics({"calls": 1})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self(batch[0]))
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.add(float(self.seen[-1].sum()))
        self.latest.append(len(self.seen))


class Counting(DummyLogger):
    """A logger that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1


class Scheduled(Leaving):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithClosures(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SteppingInBackward(Classifier):
    """Each parameter's optimizer steps as soon as its gradient is there."""

    def on_fit_start(self) -> None:
        own = {p: torch.optim.SGD([p], 0.05) for p in self.parameters()}

        def step(parameter: nn.Parameter) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(step)

    def configure_optimizers(self) -> None:
        return None


class Generating(Classifier):
    """Draws from generators of its own, of torch, NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)]

    def loss(self, batch: Any) -> Tensor:
        scale = torch.rand(1, generator=self.own[0]).item() + self.own[1].random()
        return super().loss(batch) * (scale + self.own[2].random())


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


class EMA(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, new, n: 0.9 * average + 0.1 * new)


PUT_BACK: dict[str, tuple[Any, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "everything": (Leaving, {}, dict),
    "forward mode": (Leaving, {"mode": "forward"}, dict),
    "accumulation": (Leaving, {}, lambda: {"accumulate_grad_batches": 2}),
    "buffers mean": (Leaving, {"buffers": "mean", "output_device": 1}, dict),
    "schedules": (Scheduled, {}, dict),
    "averaged weights": (Normed, {}, lambda: {"callbacks": [EMA()]}),
    "a gradient scaler": (Normed, {}, scaled),
    "L-BFGS": (WithClosures, {}, dict),
    "an optimizer in the backward": (SteppingInBackward, {}, dict),
    "generators": (Generating, {}, dict),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUT_BACK)
def test_an_epoch_with_the_check_is_that_without_to_the_bit(name: str, on: str) -> None:
    kind, strategy, options = PUT_BACK[name]
    if name == "a gradient scaler" and on != "cpu":
        pytest.skip("the scaler is the CPU's")
    torch.set_default_dtype(torch.float64)
    left = []
    for check in (True, False):
        random.seed(0)
        np.random.seed(0)
        counting = Counting()
        of_strategy = {**strategy, "executor": "inorder", "check_first_step": check}
        own = {"max_epochs": 1, "logger": counting, "data": lambda: loader(n=50), **options()}
        result = run(kind, 3, strategy=of_strategy, **own)
        module: Any = result.module
        names = ("seen", "by_name", "calls")
        state = [getattr(module, n, None) for n in names], list(getattr(module, "latest", []))
        average = vars(module.average) if hasattr(module, "average") else None
        numbers = random.random(), np.random.rand(), torch.rand(3)
        left.append((result, [list(state), average, numbers, counting.calls]))
        if check:
            assert result.trainer.strategy.first_step
    (with_check, left_with_check), (without, left_without) = left
    # Several autograd threads add to one gradient there, in an order of their own.
    rounding = 1e-12 if on != "cpu" and strategy.get("mode") == "forward" else 0.0
    assert_same(with_check, without, atol=rounding)
    assert_equal_trees(left_with_check, left_without, "left", atol=rounding, rtol=0.0)


def epoch_in_process(check: bool) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    random.seed(0)
    np.random.seed(0)
    strategy = DataParallelStrategy(check_first_step=check, executor="inorder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = trainer(4, strategy, max_epochs=1, logger=Counting())
        module = Leaving()
        job.fit(module, loader(), loader())
    checked = {name: not report.skipped for name, report in strategy.first_step.items()}
    metrics = {name: float(value) for name, value in job.callback_metrics.items()}
    return checked, module.state_dict(), metrics, torch.rand(2), len(module.seen)


@pytest.mark.on("cpu")
def test_an_epoch_of_two_processes_with_the_check_is_that_without_to_the_bit() -> None:
    with_check, without = [run_in_processes(epoch_in_process, 2, check) for check in (True, False)]
    for (looked, *left), (did_not, *expected) in zip(with_check, without, strict=True):
        assert looked == {"training_step": True, "validation_step": True} and not did_not
        assert_equal_trees(left, expected, "left", atol=0.0, rtol=0.0)


class Picturing(Leaving):
    """Keeps pictures of itself as it was before and after the check, and may fail in a shard."""

    def __init__(self, failure: type[BaseException] | None) -> None:
        super().__init__()
        self.failure = failure
        self.pictures: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.failure is not None and len(batch[0]) < 5:
            raise self.failure("in a shard")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        weight.register_hook(lambda g: self.seen.append("hook"))
        weight.register_post_accumulate_grad_hook(lambda p: self.seen.append("hook"))
        weight.grad = torch.ones_like(weight)
        self.take_picture()

    def take_picture(self) -> None:
        others = ("_trainer", "_current_fx_name", "pictures")
        attributes = {name: value for name, value in vars(self).items() if name not in others}
        random_numbers = torch.get_rng_state(), np.random.get_state(), random.getstate()
        hooks = self.net[0].weight._backward_hooks, self.net[0].weight._post_accumulate_grad_hooks
        text = str((attributes, vars(self.acc), vars(self.average), random_numbers, hooks))
        self.pictures.append((copy.deepcopy(self.state_dict()), gradients(self), text))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("failure", [None, KeyError, KeyboardInterrupt])
def test_nothing_is_left_behind_right_after_the_check(failure: type[BaseException] | None) -> None:
    module, strategy = Picturing(failure), DataParallelStrategy(check_first_step=True)
    job = trainer(3, strategy, logger=Counting(), num_sanity_val_steps=0)
    before_step = strategy._step_of_all

    def step(mode: Any, method: str, batch: Any, rest: Any) -> Any:
        checks: Any = strategy._first_steps
        try:
            checks.check(mode, method, batch, rest, None)
            raise InterruptedError
        finally:
            module.take_picture()

    strategy._step_of_all = step  # type: ignore[method-assign]  # stops behind the check
    # Lightning turns Ctrl-C into the end of the program.
    with pytest.raises(SystemExit if failure is KeyboardInterrupt else InterruptedError):
        job.fit(module, loader(), loader())
    assert before_step is not None
    before, after = module.pictures
    assert_equal_trees(after, before, "picture", atol=0, rtol=0)


class Language(Classifier):
    """A language model whose logits take more memory than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 16), nn.Linear(16, 512)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        [words] = batch
        logits = self.head(self.embedding(words[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


@on_separate  # the CPU does not count its memory
def test_the_check_takes_less_memory_than_a_step_whose_activations_dominate() -> None:
    words = TensorDataset(torch.randint(0, 512, (64, 17)))
    peaks = []
    for check in (True, False):
        gc.collect()
        for device in devices_of(4):
            reset_peak_memory(device)
        strategy = DataParallelStrategy(check_first_step=check)
        job = trainer(4, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        job.fit(Language(), DataLoader(words, 64))
        peaks.append([usage.peak_bytes for usage in strategy.usage])
    assert all(a <= 1.02 * b for a, b in zip(*peaks, strict=True)), peaks


SEEN: list[int] = []


def test_lists_outside_of_the_module_are_put_back() -> None:
    """Of a notebook, to which a step or a hook appends."""
    kept: list[int] = []

    class Collecting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            SEEN.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    SEEN.clear()
    module = Collecting()
    module.net.register_forward_hook(lambda layer, args, output: kept.append(len(output)))
    strategy = DataParallelStrategy(check_first_step=True, executor="inorder")
    job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    job.fit(module, loader())
    assert strategy.first_step["training_step"].is_same and SEEN == kept == [9, 8, 8]


KEPT: list[int] = []


class Stock(torch.utils.data.Dataset[Any]):
    """The user's own, on the module."""

    used = 0

    def __len__(self) -> int:
        return 0


class Sharing(Classifier):
    """Its list is a global one, too, and it counts on objects of other libraries' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = KEPT
        self.options = argparse.Namespace(calls=0)
        self.stock = Stock()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        KEPT.append(len(batch[0]))
        self.options.calls += 1
        self.stock.used += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:check_first_step")
def test_state_on_shared_lists_and_on_subclasses_of_a_library_is_put_back() -> None:
    KEPT.clear()
    module = Sharing()
    strategy = DataParallelStrategy(check_first_step=True, executor="inorder")
    job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    job.fit(module, loader())
    assert KEPT == [9, 8, 8] and module.options.calls == module.stock.used == 3
    assert set(strategy.first_step["training_step"].causes) == {"list", "state"}


class Directory(DummyLogger):
    """Has an attribute that is named like a method that writes."""

    log_dir = "somewhere"


@pytest.mark.filterwarnings("ignore:training_step. expected what is logged")
def test_attributes_of_loggers_are_theirs_in_the_check() -> None:
    class Saving(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.logger.log_dir == "somewhere"
            return super().training_step(batch, batch_idx)

    strategy = DataParallelStrategy(check_first_step=True)
    job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, logger=Directory())
    job.fit(Saving(), loader())
    assert strategy.first_step["training_step"].is_same


# --- the drop-in ----------------------------------------------------------------------------------


def test_the_drop_in_checks_its_first_call_and_the_first_one_in_training() -> None:
    devices = devices_of(3)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(devices[0])
    spread = DataParallel(net, devices, check_first_call=True)
    assert spread.first_call is None
    spread.eval()
    spread(torch.randn(10, 4))
    in_evaluation = spread.first_call
    spread.train()
    spread(torch.randn(10, 4))
    in_training = spread.first_call
    assert in_evaluation is not None and in_training is not None
    assert in_evaluation is not in_training and in_evaluation.is_same and in_training.is_same
    spread(torch.randn(10, 4))
    assert spread.first_call is in_training and all(p.grad is None for p in net.parameters())


def test_the_drop_in_warns_of_what_nn_data_parallel_was_silent_about() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    devices = devices_of(3)
    spread = DataParallel(Centred(4, 2).to(devices[0]), devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spread(torch.randn(10, 4))
    text = str(next(w.message for w in caught if "check_first_call" in str(w.message)))
    assert "looks at more than one sample at a time" in text and "output: " in text


@pytest.mark.filterwarnings("ignore:check_first_call")  # of items in a list, which is not joined
def test_the_drop_in_puts_back_what_a_call_leaves() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.norm(x) + torch.rand(1, device=x.device)
            self.seen.append(z.detach())
            return z

    left = []
    for check in (True, False):
        torch.manual_seed(0)
        devices = devices_of(3)
        spread = DataParallel(
            Left().to(devices[0]), devices, executor="inorder", check_first_call=check
        )
        x = torch.randn(10, 4).requires_grad_()
        spread(x).sum().backward()
        left.append([spread.state_dict(), spread.module.seen, x.grad, torch.rand(2)])
    assert_equal_trees(left[0], left[1], "left", atol=0.0, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_drop_in_takes_a_number_for_a_sum_or_a_mean(reduction: str, dtype: Any) -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = getattr(super().forward(x).square(), reduction)()
            return loss

    devices = devices_of(3)
    torch.manual_seed(0)
    spread = DataParallel(Loss(4, 2, dtype=dtype).to(devices[0]), devices, check_first_call=True)
    spread(torch.randn(10, 4, dtype=dtype))
    assert spread.first_call is not None and spread.first_call.is_same, str(spread.first_call)


def test_the_drop_in_checks_the_first_call_that_has_samples_for_two() -> None:
    devices = devices_of(3)
    spread = DataParallel(nn.Linear(4, 4).to(devices[0]), devices, check_first_call=True)
    spread(torch.randn(1, 4))
    assert spread.first_call is None
    spread(torch.randn(10, 4))
    assert spread.first_call is not None and spread.first_call.is_same


def test_arguments_that_cannot_be_copied_are_no_error() -> None:
    class Locked(nn.Linear):
        def forward(self, x: Tensor, lock: Any) -> Tensor:
            with lock:
                return super().forward(x)

    devices = devices_of(3)
    spread = DataParallel(Locked(4, 4).to(devices[0]), devices, check_first_call=True)
    spread(torch.randn(10, 4), threading.Lock())
    assert spread.first_call is not None and "pickle" in spread.first_call.skipped
