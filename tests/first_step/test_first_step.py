"""The first-step check: when it runs, what it says, and that it leaves no trace.

Which losses, logs and outputs it names is the law table's, `test_laws`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from laws import Contrastive, Normed
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, run, trainer
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.first_step import Report, first_call
from lightning_dp.first_step.compare import distance, rounding
from lightning_dp.first_step.snapshot import Snapshot

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

LOGGERS = [f"{name}.utilities.rank_zero" for name in ("lightning.pytorch", "pytorch_lightning")]
"""Of Lightning's lines at INFO: both packages write to that of the one imported last."""
OF_TRAINER = ("precision", "plugins", "fast_dev_run", "logger", "limit_train_batches")


def fit(
    module: Any, *, k: int = 3, check: Any = True, data: Any = loader, **options: Any
) -> dict[str, Report]:
    """What the check finds in a fit of one batch."""
    own = {name: options.pop(name) for name in OF_TRAINER if name in options}
    strategy = DataParallelStrategy(check_first_step=check, **options)
    job = trainer(k, strategy, **{"max_epochs": 1, "limit_train_batches": 1, **own})
    job.fit(module, data(), data())
    return strategy.first_step


# --- when it runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, "auto"])
def test_every_kind_of_step_is_checked_once_in_a_run(
    check: Any, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = DataParallelStrategy(check_first_step=check)
    job, module = trainer(3, strategy, max_epochs=2), Classifier()
    with caplog.at_level(logging.INFO):
        job.fit(module, loader(), loader())
    # Success is worth a line where somebody has asked.
    assert sum("check_first_step" in m for m in caplog.messages) == (2 if check is True else 0)
    reports = dict(strategy.first_step)
    assert set(reports) == {"training_step", "validation_step"}
    assert all(report.is_same and report.sizes == (4, 3, 2) for report in reports.values())
    job.test(module, loader(), verbose=False)
    assert set(strategy.first_step) == {"test_step"}
    job.predict(module, loader())
    assert set(strategy.first_step) == {"predict_step"}


class Costly(Classifier):
    def sample_cost(self, batch: Any) -> Tensor:
        return batch[0].abs().sum(1)


class CompiledPart(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.compile(lambda x: x * 2, backend="eager")


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "forward": (Contrastive, {"mode": "forward", "parallel_modules": ["net"]}),
    "forward, output elsewhere": (Classifier, {"mode": "forward", "output_device": 1}),
    "an idle device": (Classifier, {"weights": [0, 1, 2]}),
    "by cost": (Costly, {"split": "cost"}),
    "bf16": (Classifier, {"precision": "bf16-mixed"}),
    "two samples": (Classifier, {"data": lambda: loader(n=4, batch_size=2)}),
    "asked for in fast_dev_run": (Classifier, {"fast_dev_run": True}),
    "asked for on compiled parts": (CompiledPart, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_step_of_one_device_has_no_difference(name: str) -> None:
    kind, options = SAME[name]
    for report in fit(kind(), **options).values():
        assert report.is_same and not report.causes, str(report)


class Failing(Classifier):
    """Fails with few samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < 4:
            raise KeyError("in the check")
        return super().training_step(batch, batch_idx)


class Reading(Classifier):
    """Takes numbers from a generator, which cannot be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)


class Infinite(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.inf


SKIPPED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a generator": (Reading, {}, "self.numbers is a Generator"),
    "no number": (Infinite, {}, "not finite on the root alone"),
    "one sample": (Classifier, {"data": lambda: loader(n=1)}, "for one replica alone"),
    "one replica": (Classifier, {"weights": [0, 1, 0]}, "for one replica alone"),
    "compiled": (CompiledPart, {}, "compiled parts"),
    "fast_dev_run": (Classifier, {"fast_dev_run": True}, "fast_dev_run"),
    "an error in the check": (Failing, {"data": lambda: loader(75)}, "KeyError: 'in the check'"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_where_nothing_is_compared_a_line_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, options, reason = SKIPPED[name]
    with caplog.at_level(logging.DEBUG):
        report = fit(kind(), check="auto", **options)["training_step"]
    assert reason in report.skipped and not report.is_same
    [level] = [r.levelno for r in caplog.records if str(report) in r.getMessage()]
    assert level == (logging.INFO if kind is Failing else logging.DEBUG)


def test_a_large_module_is_left_out_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_call, "MOST_BYTES", 100)
    assert "GiB" in fit(Classifier(), check="auto")["training_step"].skipped
    assert fit(Classifier())["training_step"].is_same
    assert fit(Contrastive(), check=False) == fit(Contrastive(), k=1) == {}


# --- what it says ---------------------------------------------------------------------------------


def test_one_warning_names_all_that_differs_with_values_cause_and_way_out() -> None:
    class Many(Contrastive):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z = self(batch[0])
            self.log("spread", z.std())
            return {"loss": self.loss(batch), "largest": z.max()}

    with pytest.warns(UserWarning) as caught:
        fit(Many(), check="auto")
    [text] = [str(w.message) for w in caught if ", training_step does not" in str(w.message)]
    lines = text.splitlines()
    assert lines[0] == (
        "check_first_step: on the first 9 samples, split as 4, 3, 2, training_step does not give "
        "the numbers of one device."
    )
    assert "It looks at the whole batch at once" in text and 'mode="forward"' in text
    for name in ("the loss", "the gradient of net.0.weight", "self.log('spread')"):
        assert any(line.startswith(f"- {name}: ") and " on 3 devices" in line for line in lines)
    assert any(line.startswith("- output['largest']: ") for line in lines)


def test_what_every_data_parallel_trainer_has_is_one_line_at_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, LOGGERS[0]), caplog.at_level(logging.INFO, LOGGERS[1]):
        fit(Normed(), check="auto")
    [line] = [m for m in caplog.messages if "check_first_step" in m and "training_step" in m]
    assert "gives the numbers of one device" in line and ", but for this: batch norm" in line


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
    try:
        with redirect_stdout(io.StringIO()) as shown, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert fit(Talking())["training_step"].is_same
    finally:
        logging.getLogger("talking").removeHandler(handler)
    assert shown.getvalue().count("printed") == len(records) == 3
    assert sum(str(w.message) == "warned" for w in seen) == 3


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (np.array(["a", "b"]), np.array(["a", "c"]), False),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
    ],
)
def test_values_of_every_kind_are_compared(a: Any, b: Any, is_same: bool) -> None:
    assert (distance(a, b) == 0) is is_same


def test_float32_is_compared_as_tf32_only_where_a_gpu_computes_so() -> None:
    cudnn: Any = torch.backends.cudnn
    kinds = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    eps = torch.finfo(torch.float32).eps
    for short in (*kinds, None):
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.callback(setattr, kind, "fp32_precision", kind.fp32_precision)
                kind.fp32_precision = "tf32" if kind is short else "ieee"
            assert rounding([torch.float32], "cuda") == (1e-4 if short else eps)
            assert rounding([torch.float32], "cpu") == eps
            assert rounding([torch.float64], "cuda") < 1e-15


# --- no trace -------------------------------------------------------------------------------------


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
        self.shared = SimpleNamespace(count=0)
        self.own = torch.Generator().manual_seed(1)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.drop(x) + 0.1 * self.teacher(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x.add_(0.5))  # in place: the batch is the step's
        noise = torch.rand(1, generator=self.own).item() + random.random() + np.random.rand()
        loss = F.cross_entropy(z, y) * (1 + 1e-3 * float(noise))
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
        self.latest.append(len(self.seen))


class FailingThere(Leaving):
    """Raises in the check alone, when all is left."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shared.count += len(batch[0]) < 5
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) < 5:
            raise KeyError("in a shard of the check")
        return loss


class Counting(DummyLogger):
    """A logger that counts its calls."""

    calls = 0
    log_dir = "somewhere"  # named like a method that writes

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        assert self.log_dir == "somewhere"
        self.calls += 1


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


def averaging() -> dict[str, Any]:
    if not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("Lightning averages weights from 2.6 on")
    average = lambda average, new, n: 0.9 * average + 0.1 * new
    return {"callbacks": [lightning_callbacks.WeightAveraging(avg_fn=average)]}


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


PUT_BACK: dict[str, tuple[Any, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "lists, metrics, generators": (Leaving, {"buffers": "mean"}, dict),
    "forward mode": (Leaving, {"mode": "forward"}, dict),
    "accumulation": (Leaving, {"output_device": 1}, lambda: {"accumulate_grad_batches": 2}),
    "an error in the check": (FailingThere, {}, dict),
    "averaged weights": (Normed, {}, averaging),
    "a gradient scaler": (Normed, {}, scaled),
    "L-BFGS": (WithClosures, {}, dict),
    "an optimizer in the backward": (SteppingInBackward, {}, dict),
}


def epoch(check: bool, kind: Any, count: int, strategy: Any = None, **options: Any) -> Any:
    """Whether first steps were checked, and what an epoch leaves."""
    torch.set_default_dtype(torch.float64)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    counting = Counting()
    strategy = {**(strategy or {}), "executor": "inorder", "check_first_step": check}
    own = {"max_epochs": 1, "logger": counting, "data": lambda: loader(n=50), **options}
    result = run(kind, count, strategy=strategy, **own)
    names = "seen", "by_name", "calls", "latest"
    left = [getattr(result.module, name, None) for name in names]
    left[-1] = list(left[-1] or ())
    left += [getattr(getattr(result.module, "shared", None), "count", None), counting.calls]
    is_checked = bool(result.trainer.strategy.first_step)
    drawn = random.random(), np.random.rand(), torch.rand(3)
    values = result.module.state_dict(), dict(result.callback_metrics)
    return is_checked, [*values, *left, drawn]


@pytest.mark.parametrize("name", PUT_BACK)
def test_an_epoch_with_the_check_is_that_without_to_the_bit(name: str, on: str) -> None:
    kind, strategy, options = PUT_BACK[name]
    if name == "a gradient scaler" and on != "cpu":
        pytest.skip("the scaler is the CPU's")
    (checked, left), (was_checked, expected) = (
        epoch(check, kind, 3, strategy, **options()) for check in (True, False)
    )
    assert checked and not was_checked
    # Several autograd threads add to one gradient there, in an order of their own.
    rounding = 1e-12 if on != "cpu" and strategy.get("mode") == "forward" else 0.0
    assert_equal_trees(left, expected, "left", atol=rounding, rtol=0.0)


def epochs_in_process() -> Any:
    """With and without the check; a rank's own samples are split over two replicas."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [epoch(check, Leaving, 4) for check in (True, False)]


@pytest.mark.slow
def test_an_epoch_of_two_processes_with_the_check_is_that_without_to_the_bit() -> None:
    for (checked, left), (was_checked, expected) in run_in_processes(epochs_in_process, 2):
        assert checked and not was_checked
        assert_equal_trees(left, expected, "left", atol=0.0, rtol=0.0)


KEPT: list[int] = []


def test_lists_that_hooks_append_to_are_put_back_and_named() -> None:
    KEPT.clear()
    hooked: list[int] = []
    data = [torch.zeros(1, requires_grad=True) * 2]  # nothing puts back a tensor with a graph
    module = Classifier()

    def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
        if layer.training and data:
            hooked.append(len(output))
            KEPT.append(len(output))

    module.net.register_forward_hook(keep)
    report = fit(module, executor="inorder")["training_step"]
    assert hooked == KEPT == [9, 8, 8]
    assert {key.name.rpartition(".")[2] for key in report.differences} == {"hooked", "KEPT"}


class Holder(nn.Module):
    """Holds what a snapshot has to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)
        self.tensor, self.array = torch.arange(4.0), np.arange(4.0)
        self.set, self.count = {1, 2}, Counter("abca")
        self.ordered, self.default = OrderedDict(a=1, b=2), defaultdict(list, a=[1])
        self.pair = ([1], {"a": [2]})
        self.lock, self.weight_again = threading.Lock(), self.layer.weight


def state(module: Holder) -> str:
    values = {name: t for name, t in module.state_dict().items()}
    more = module.norm.training, module.optimizer.param_groups[0]["lr"], module.layer.weight.grad
    objects = *vars(module).values(), module.pair[0], module.norm.running_mean
    memory = module.layer.weight.data_ptr(), module.layer.bias.data_ptr()
    hooks = module.layer.weight._backward_hooks, module.layer._forward_hooks
    return str((vars(module), values, more, list(map(id, objects)), memory, hooks))


def change_everything(module: Any) -> None:
    module.layer.weight.data.add_(1)
    module.layer.bias.data = torch.ones(2)
    module.layer.bias.requires_grad_(False)
    module.norm.running_mean += 1
    module.norm.num_batches_tracked = torch.tensor(9)
    module.norm.eval()
    module.optimizer.param_groups[0]["lr"] = 0.2
    module.tensor[1:].mul_(5)
    module.array[0] = 7
    module.set.add(3)
    module.count.update("a")
    module.ordered.move_to_end("a")
    module.default["b"].append(1)
    module.pair[0].append(1)
    module.pair[1]["a"].clear()
    module.new = 1
    module.register_buffer("late", torch.ones(1))
    module.add_module("later", nn.Linear(1, 1))
    module.layer.register_forward_hook(lambda *_: None)
    del module.weight_again
    module.layer(torch.ones(1, 2)).sum().backward()


def test_a_snapshot_puts_everything_back() -> None:
    module = Holder()
    module.layer.weight.grad = torch.ones(2, 2)
    module.layer.weight.register_hook(lambda gradient: gradient * 2)
    pictured = state(module)
    before = Snapshot(module, [torch.device("cpu")], {})
    for _ in range(2):
        change_everything(module)
        before.restore()
        assert module.layer.weight.grad is None and not module.layer.weight._backward_hooks
    before.end()
    assert state(module) == pictured


# --- the drop-in ----------------------------------------------------------------------------------


def spread(module: nn.Module, **options: Any) -> DataParallel[Any]:
    devices = devices_of(3)
    return DataParallel(module.to(devices[0]), devices, **{"check_first_call": True, **options})


def test_the_drop_in_checks_its_first_call_with_samples_for_two_and_the_first_in_training() -> None:
    net = spread(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    net(torch.randn(1, 4))
    assert net.first_call is None
    net(torch.randn(10, 4))
    in_evaluation = net.first_call
    net.train()
    net(torch.randn(10, 4))
    in_training = net.first_call
    assert in_evaluation is not None and in_training is not None
    assert in_evaluation is not in_training and in_evaluation.is_same and in_training.is_same
    net(torch.randn(10, 4))
    assert net.first_call is in_training and all(p.grad is None for p in net.parameters())


@pytest.mark.filterwarnings("default")
def test_the_drop_in_warns_of_what_nn_data_parallel_was_silent_about() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.warns(UserWarning, match="looks at more than one sample at a time") as caught:
        spread(Centred(4, 2), check_first_call="auto")(torch.randn(10, 4))
    [text] = [str(w.message) for w in caught]
    assert "check_first_call" in text and "output: " in text


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_drop_in_takes_a_number_for_a_sum_or_a_mean(reduction: str) -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor, lock: Any = None) -> Tensor:
            loss: Tensor = getattr(super().forward(x).square(), reduction)()
            return loss

    torch.manual_seed(0)
    net = spread(Loss(4, 2, dtype=torch.bfloat16))
    x = torch.randn(10, 4, dtype=torch.bfloat16)
    net(x)
    assert net.first_call is not None and net.first_call.is_same, str(net.first_call)
    net = spread(net.module)
    net(x, threading.Lock())  # an argument that cannot be copied is no error
    assert net.first_call is not None and "pickle" in net.first_call.skipped
