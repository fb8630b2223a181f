"""The check of the first step: its verdict for every cause, and that it leaves no trace."""

import copy
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from oracle import (
    ByHand,
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.first_step.check import FirstStep, rounding
from lightning_dp.parallel.devices import reset_peak_memory

pytestmark = [
    pytest.mark.usefixtures("on"),
    # What is wrong with losses is wrong with their logs.
    pytest.mark.filterwarnings("ignore:.*expected numbers for self.log:UserWarning"),
]


def checked(make: Callable[[], Any], *, k: int = 4, **options: Any) -> FirstStep:
    """The result of the check in a fit of two batches; warnings are expected where it warns."""
    of_trainer = {n: options.pop(n) for n in ("precision", "plugins", "data") if n in options}
    data = of_trainer.pop("data", loader)
    strategy = DataParallelStrategy(check_first_step=True, **options)
    torch.manual_seed(0)
    job = trainer(k, strategy, max_epochs=1, limit_train_batches=2, **of_trainer)
    job.fit(make(), data(), data())
    assert strategy.first_step is not None
    return strategy.first_step


def named(value: Any) -> str | None:
    """An id of a test's parameter that is the same in every process."""
    if isinstance(value, dict):
        return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in value.items()) or "{}"
    return getattr(value, "__name__", None)


def per_sample(module: Classifier, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")


class Summed(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return per_sample(self, batch).sum()


class Masked(Classifier):
    """A mean over some of the samples."""

    tells = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        valid = (batch[0][:, 0] > 0).to(batch[0])
        loss = (per_sample(self, batch) * valid).sum() / valid.sum()
        return {"loss": loss, "num_items": valid.sum()} if self.tells else loss


class Telling(Masked):
    tells = True


class Miscounting(Classifier):
    """A mean over samples with a count of something else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "num_items": (batch[0] > 0.5).sum()}


class Contrastive(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)

    def loss(self, batch: Any) -> Tensor:
        z = self(batch[0])
        return (z @ z.T).exp().mean()


class RootOfMean(Classifier):
    """Nearly a mean over samples."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).sqrt()


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class NormedSum(Normed):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class Dropping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        # Two of them: in order, one alone draws the batch's numbers on the CPU.
        self.first, self.second = nn.Dropout(0.4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.second(self.first(x)))


class DroppingSum(Dropping):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class Attentive(Classifier):
    """Dropout that no dropout layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True)
        self.rnn = nn.GRU(2, 2, num_layers=2, dropout=0.5, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].view(-1, 5, 2)
        x = self.attention(x, x, x, need_weights=False)[0] + self.rnn(x)[0]
        return F.cross_entropy(self.net(x.flatten(1)), batch[1])


class Noisy(Dropping):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss([x + torch.randn_like(x) + torch.rand_like(x), y])


class NoisyByItself(Classifier):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        noise = torch.as_tensor(self.generator.standard_normal((2, *x.shape)))
        return super().loss([x + noise.sum(0).to(x), y])


ELSEWHERE = np.random.default_rng(0)


class NoisyElsewhere(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float(ELSEWHERE.random())


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
        return rounding([kind, torch.float64], device)

    exact = torch.finfo(torch.float32).eps ** 0.5
    assert of(torch.float32) == of(torch.float32, "cpu") == exact
    for layers in exact_products:
        layers.fp32_precision = "tf32"
        assert of(torch.float32) == 1e-2 and of(torch.float32, "cpu") == exact
        assert of(torch.float64) < 1e-7 and of(torch.bfloat16) > 1e-2
        layers.fp32_precision = "ieee"


@pytest.mark.parametrize(
    ("kind", "options", "causes"),
    [
        (Summed, {}, {"sum": 'choose loss_reduction="sum"'}),
        (Classifier, {"loss_reduction": "sum"}, {"mean": 'choose loss_reduction="mean"'}),
        (Masked, {}, {"items": '"num_items": n'}),
        (Miscounting, {}, {"mean": "leave them out"}),
        (Contrastive, {}, {"whole batch": 'choose mode="forward"'}),
        (RootOfMean, {}, {"whole batch": 'choose mode="forward"'}),
        (Normed, {}, {"batch norm": r"\(norm\).*sync_batchnorm=True"}),
        (NormedSum, {}, {"sum": "loss_reduction", "batch norm": "sync_batchnorm"}),
        (Dropping, {}, {"dropout": r"\(first, second\).*choose p=0"}),
        (DroppingSum, {}, {"dropout": "choose p=0", "sum": "loss_reduction"}),
        (Attentive, {}, {"dropout": r"\(attention, rnn\)"}),
        (Noisy, {}, {"random": "also with all dropout layers turned off"}),
        (NoisyByItself, {}, {"random": "also with all dropout layers turned off"}),
        (NoisyElsewhere, {}, {"not repeatable": "on one device"}),
        (Normed, {"mode": "forward"}, {"batch norm": "sync_batchnorm"}),
        (Dropping, {"mode": "forward"}, {"dropout": "choose p=0"}),
    ],
    ids=named,
)
@pytest.mark.filterwarnings("ignore:.*expected a loss that is a mean over samples")
def test_the_verdict_names_the_cause_and_what_to_choose(
    kind: type[Classifier], options: dict[str, Any], causes: dict[str, str]
) -> None:
    with pytest.warns(UserWarning, match="do not give the step of the root alone"):
        report = checked(kind, **options)
    assert report.difference is not None and report.difference.largest > report.tolerance
    assert list(report.causes) == list(causes)
    for name, text in causes.items():
        assert re.search(text, report.causes[name]), report.causes[name]
        assert report.causes[name] in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {}),
        (Summed, {"loss_reduction": "sum"}),
        (Telling, {}),
        (Contrastive, {"mode": "forward"}),
        (Contrastive, {"mode": "forward", "output_device": 1}),
        (Classifier, {"weights": [0, 1, 2, 3]}),
        (Classifier, {"split": "adaptive", "output_device": "cpu"}),
        (Classifier, {"precision": "bf16-mixed"}),
        (Classifier, {"precision": "64-true"}),
        (Classifier, {"data": lambda: loader(n=6, batch_size=3)}),
    ],
    ids=named,
)
def test_what_to_choose_is_the_cure(
    kind: type[Classifier], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if options.get("mode") == "forward":
        options = {**options, "parallel_modules": ["net"]}
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        report = checked(kind, **options)
    assert report.is_same and not report.causes
    assert str(report) in caplog.messages
    assert "give the step of the root alone" in str(report)


@pytest.mark.filterwarnings("ignore:forward. expected outputs that samples have by themselves")
def test_forward_that_looks_at_the_whole_batch_is_told_in_forward_mode() -> None:
    class Centred(Contrastive):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.warns(UserWarning, match="do not give"):
        report = checked(Centred, mode="forward")
    assert list(report.causes) == ["forward"]


@on_accelerators  # float16 is for them
def test_half_precision_with_a_scaler_is_compared_by_its_own_measure() -> None:
    plugin = MixedPrecision("16-mixed", accelerator())
    report = checked(Classifier, precision=None, plugins=[plugin])
    assert report.is_same and report.tolerance > 1e-2
    with pytest.warns(UserWarning, match="loss_reduction"):
        assert list(checked(Summed, precision=None, plugins=[plugin]).causes) == ["sum"]


# --- nothing to compare ---------------------------------------------------------------------------


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


class Infinite(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.inf


class Failing(Classifier):
    """Fails on the root alone, which has the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 12:
            raise torch.OutOfMemoryError("out of memory here")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Silent, {}, "training_step returned None"),
        (Infinite, {}, "no number, on the root alone"),
        (Failing, {}, "OutOfMemoryError: out of memory here"),
        (Classifier, {"data": lambda: loader(n=1)}, "ran on one device"),
        (Classifier, {"weights": [0, 1, 0, 0]}, "ran on one device"),
    ],
    ids=named,
)
def test_where_nothing_can_be_compared_training_goes_on(
    kind: type[Classifier],
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        report = checked(kind, **options)
    assert report.difference is None and not report.is_same
    assert reason in report.not_checked and reason in caplog.text


def test_a_difference_without_a_cause_is_told_all_the_same() -> None:
    class Skipping(Summed):
        """Leaves out the shard of 7 samples."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if len(batch[0]) == 7 else self.loss(batch)

    with (
        pytest.warns(UserWarning, match="The cause was not found .*returned None"),
        pytest.warns(UserWarning, match="got None from 1 of "),
    ):
        assert list(checked(Skipping).causes) == ["unknown"]


def test_manual_optimisation_is_not_compared() -> None:
    class Manual(ByHand, Classifier):
        pass

    assert "manual optimisation" in checked(Manual, mode="forward").not_checked


def test_batches_that_cannot_be_cut_are_not_compared() -> None:
    class Alone(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(2, 10).to(self.device)).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    seeds = DataLoader([{"seed": 1}, {"seed": 2}], batch_size=None)
    with pytest.warns(UserWarning, match="no tensor and no list that could be cut"):
        report = checked(Alone, data=lambda: seeds)
    assert "ran on one device" in report.not_checked


@pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte.")
def test_a_batch_that_does_not_fit_on_the_root_alone_is_not_compared() -> None:

    class Wide(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x = batch[0].repeat(1, 2000)
            return super().loss(batch) + x.exp().log().square().mean()

    torch.sim.set_memory_limit(0, 4 * 2**20)
    try:
        report = checked(Wide)
    finally:
        torch.sim.set_memory_limit(0, None)
    assert "OutOfMemoryError" in report.not_checked


def test_one_device_has_nothing_to_compare() -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    trainer(1, strategy, max_epochs=1).fit(Classifier(), loader(), loader())
    assert strategy.first_step is None


# --- no trace -------------------------------------------------------------------------------------


class Average:
    """An object of the user's own, with state."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.count += 1


class Leaving(Dropping):
    """Leaves something everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.teacher = nn.Linear(10, 10).requires_grad_(False)
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []
        self.latest: deque[int] = deque(maxlen=2)
        self.by_name: dict[str, list[Any]] = {"x": []}
        self.average = Average()
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) + 0.1 * self.teacher(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x.add_(0.5))  # in place: the batch is the step's
        loss = F.cross_entropy(z, y)
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


@pytest.mark.filterwarnings("ignore:check_first_step", "ignore:A step binds Leaving.calls")
@pytest.mark.filterwarnings("ignore:A step writes in place to 2 parameters")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({"mode": "step"}, {}),
        ({"mode": "forward"}, {}),
        ({"mode": "step"}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        ({"mode": "step", "buffers": "mean", "output_device": 1}, {}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*expected what is logged to go through self.log")
def test_training_afterwards_is_training_without_the_check(
    strategy: dict[str, Any], options: dict[str, Any], on: str
) -> None:
    torch.set_default_dtype(torch.float64)
    data = lambda: loader(n=50)
    left = []
    for check in (True, False):
        random.seed(0)
        np.random.seed(0)
        counting = Counting()
        of_strategy = {**strategy, "executor": "inorder", "check_first_step": check}
        result = run(Leaving, 3, strategy=of_strategy, logger=counting, data=data, **options)
        module: Any = result.module
        state = [module.seen, module.by_name, list(module.latest), vars(module.average)]
        numbers = random.random(), np.random.rand(), torch.rand(3)
        left.append((result, [state, numbers, module.calls, counting.calls]))
    (with_check, left_with_check), (without, left_without) = left
    assert with_check.trainer.strategy.first_step.difference is not None
    # Several autograd threads add to one gradient there, in an order of their own.
    rounding = 1e-12 if on != "cpu" and strategy["mode"] == "forward" else 0.0
    assert_same(with_check, without, atol=rounding)
    assert_equal_trees(left_with_check, left_without, "left", atol=rounding, rtol=0.0)


class Picturing(Leaving):
    """Keeps pictures of itself as it was before and after the check, and may fail in a shard."""

    def __init__(self, failure: type[BaseException] | None) -> None:
        super().__init__()
        self.failure = failure
        self.pictures: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.failure is not None and len(batch[0]) < 20:
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


@pytest.mark.filterwarnings("ignore:check_first_step")
@pytest.mark.parametrize("failure", [None, KeyError, KeyboardInterrupt])
def test_nothing_is_left_behind_right_after_the_check(failure: type[BaseException] | None) -> None:
    class Watched(DataParallelStrategy):
        def _compare_first_step(self, *args: Any) -> None:
            try:
                super()._compare_first_step(*args)
                raise InterruptedError
            finally:
                self.lightning_module.take_picture()

    module, strategy = Picturing(failure), Watched(check_first_step=True)
    job = trainer(3, strategy, logger=Counting())
    # Lightning turns Ctrl-C into the end of the program.
    with pytest.raises(SystemExit if failure is KeyboardInterrupt else InterruptedError):
        job.fit(module, loader(), loader())
    report = strategy.first_step
    if failure is None:
        assert report is not None and report.causes
    elif failure is KeyError:
        assert report is not None and "in a shard" in report.not_checked
    before, after = module.pictures
    assert_equal_trees(after, before, "picture", atol=0, rtol=0)


def test_the_check_looks_once_in_every_fit() -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    job = trainer(2, strategy, max_epochs=2)
    reports = []
    for epochs in (2, 4):
        job.fit_loop.max_epochs = epochs
        job.fit(Classifier(), loader(), loader())
        reports.append(strategy.first_step)
    assert reports[0] is not reports[1] and all(report.is_same for report in reports)
    job.validate(Classifier(), loader(), verbose=False)
    assert strategy.first_step is reports[1]


@on_separate  # the CPU does not count its memory
def test_memory_of_the_check_does_not_count() -> None:
    peaks = []
    for check in (True, False):
        for device in devices_of(4):
            reset_peak_memory(device)
        strategy = DataParallelStrategy(check_first_step=check)
        trainer(4, strategy, max_epochs=1).fit(
            Classifier(), loader(n=400, batch_size=100), loader()
        )
        peaks.append([usage.peak_bytes for usage in strategy.usage])
    assert peaks[0] == peaks[1]
