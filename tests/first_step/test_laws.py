"""The first-step check names each step that shards cannot compute, with its cause, and no other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import laws
import numpy as np
import pytest
import torch
from laws import Cause, Contrastive, Normed
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from support.oracle import Classifier, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.first_step import Report

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

N, K = 25, 3
KNOWN = {"batch norm", "random"}


def variant(base: type[Any] = Classifier, /, **methods: Any) -> type[Any]:
    """A class with other methods; `init` runs after its `__init__`."""
    init = methods.pop("init", lambda self: None)

    def both(self: Any) -> None:
        base.__init__(self)
        init(self)

    return type("Variant", (base,), {**methods, "__init__": both})


def classes() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader([[torch.randn(N, 10), torch.randint(0, 3, (N,))]], batch_size=None)


def numbers() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader([[torch.randn(N, 4), torch.randn(N, 3)]], batch_size=None)


def report_of(
    kind: type[Any], step: str = "training_step", data: Any = classes, **options: Any
) -> Report:
    """What the check says of one kind of step."""
    strategy = DataParallelStrategy(check_first_step=True, **options)
    job = trainer(K, strategy, max_epochs=1, logger=DummyLogger())
    torch.manual_seed(0)
    module: LightningModule = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if step == "training_step":
            job.limit_val_batches = 0
            job.fit(module, data())
        else:
            run = job.validate if step == "validation_step" else job.predict
            run(module, data())
    return strategy.first_step[step]


def assert_named(report: Report, cause: Cause) -> None:
    assert not report.skipped, report.skipped
    if cause is None:
        assert report.is_same, str(report)
    else:
        assert cause in report.causes and report.is_same is (cause in KNOWN), str(report)


# --- pieces of a step -----------------------------------------------------------------------------


def of_loss(loss: laws.Loss) -> Report:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return loss(self.net(batch[0]), self.net, *batch)

    def init(self: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    return report_of(variant(init=init, training_step=training_step), data=numbers)


def of_number(number: laws.Number, **options: Any) -> Report:
    """What is said of a number that a step logs and returns."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        z, y = self(batch[0]), batch[1]
        self.log("own", number(z, y), **options)
        loss = F.cross_entropy(z, y)
        # As an output, options of `log` mean nothing, and one number with dimensions is a row.
        is_returned = not options and not getattr(number(z, y), "shape", ())
        return {"loss": loss, "own": {"number": number(z, y)}} if is_returned else loss

    return report_of(variant(training_step=training_step))


def of_meeting(piece: Callable[..., Tensor]) -> Report:
    return report_of(variant(loss=lambda self, batch: piece(self.net(batch[0]), *batch)))


def of_mixed(piece: Callable[[Tensor], Tensor]) -> Report:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return Classifier.training_step(self, (piece(batch[0]), batch[1]), batch_idx)

    return report_of(variant(training_step=training_step))


def of_layered(piece: Any) -> Report:
    make, does = piece

    def init(self: Any) -> None:
        torch.manual_seed(3)
        self.layer = make()

    return report_of(variant(init=init, forward=lambda self, x: does(self.layer, self.net(x))))


def of_inner(piece: laws.Step) -> Report:
    def loss(self: Any, batch: Any) -> Tensor:
        return piece(self, batch[0].clone().requires_grad_(), batch[1])

    return report_of(variant(loss=loss))


class Called(nn.Module):
    def __init__(self, does: laws.Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.does = nn.Linear(4, 4), nn.BatchNorm1d(4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer(x), self, x)


def of_call(piece: laws.Call) -> Report:
    spread = DataParallel(Called(piece), ["cpu"] * K, check_first_call=True)
    torch.manual_seed(1)
    spread(torch.randn(10, 4))
    spread.close()
    assert spread.first_call is not None
    return spread.first_call


TABLES: dict[str, tuple[Callable[[Any], Report], dict[Cause, dict[str, Any]]]] = {
    "losses": (of_loss, laws.LOSSES),
    "numbers": (of_number, laws.NUMBERS),
    "meeting": (of_meeting, laws.MEETING),
    "mixed": (of_mixed, laws.MIXED),
    "layered": (of_layered, laws.LAYERED),
    "inner": (of_inner, laws.INNER),
    "calls": (of_call, laws.CALLS),
}
ROWS = [
    (table, cause, name)
    for table, (_, causes) in TABLES.items()
    for cause, pieces in causes.items()
    for name in pieces
]


@pytest.mark.parametrize(("table", "cause", "name"), ROWS)
def test_pieces(table: str, cause: Cause, name: str) -> None:
    of, causes = TABLES[table]
    report = of(causes[cause][name])
    assert_named(report, cause)
    if cause == "logged value":
        assert_named(report, "output")


def _value(cause: Cause, name: str) -> Any:
    return laws.NUMBERS[cause][name]


@pytest.mark.parametrize(
    ("number", "options", "cause"),
    [
        (_value("logged value", "sum"), {"reduce_fx": "sum"}, None),
        (_value(None, "accuracy"), {"reduce_fx": torch.sum}, "logged value"),
        (lambda z, y: float(len(z)), {"reduce_fx": "sum"}, None),
        (_value("logged value", "largest"), {"reduce_fx": "max"}, None),
        (lambda z, y: z.std(), {"batch_size": 25}, "logged value"),
    ],
)
def test_numbers_with_options(number: Any, options: dict[str, Any], cause: Cause) -> None:
    assert_named(of_number(number, **options), cause)


# --- whole steps ----------------------------------------------------------------------------------


def masked(self: Any, batch: Any, batch_idx: int) -> Any:
    """A mean over some of the samples."""
    valid = (batch[0][:, 0] > 0).to(batch[0])
    each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
    loss = (each * valid).sum() / valid.sum()
    return {"loss": loss, "num_items": valid.sum()} if self.counts else loss


def miscounted(self: Any, batch: Any, batch_idx: int) -> Any:
    """A mean over samples with a count of something else."""
    return {"loss": self.loss(batch), "num_items": (batch[0] > 0.5).sum()}


def summed(base: type[Any]) -> type[Any]:
    return variant(base, loss=lambda self, batch: base.loss(self, batch) * len(batch[0]))


class Dropping(Classifier):
    """Dropout of layers, of attention and of recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.4)
        self.attention = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True)
        self.rnn = nn.GRU(2, 2, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).view(-1, 5, 2)
        x = self.attention(x, x, x, need_weights=False)[0] + self.rnn(x)[0]
        return self.net(x.flatten(1))


def noisy(self: Any, x: Tensor) -> Any:
    return self.net(x + torch.randn_like(x) + torch.rand_like(x))


def drawing(draw: Callable[[Tensor], Tensor]) -> type[Any]:
    return variant(forward=lambda self, x: self.net(draw(x)))


ELSEWHERE = torch.Generator()


def noisy_elsewhere(self: Any, x: Tensor) -> Any:
    return self.net(x) * torch.rand((), generator=ELSEWHERE)


def mixed_in_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As most people write it, with NumPy's random numbers and torch's."""
    x, y = batch
    share, order = float(np.random.beta(1, 1)), torch.randperm(len(x))
    z = self(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, y[order])


def mixed(self: Any, batch: Any, dataloader_idx: int) -> Any:
    """As Lightning's documentation has it: augmentation on the device."""
    return [0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]]


class Timed(Classifier):
    """Logs a time, which differs from run to run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seconds", time.perf_counter())
        return super().training_step(batch, batch_idx)


def before(act: Callable[[Any, Any], object], **methods: Any) -> type[Any]:
    """A classifier whose training step does something else first."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        act(self, batch)
        return Classifier.training_step(self, batch, batch_idx)

    return variant(training_step=training_step, **methods)


def makes_head(self: Any, batch: Any, batch_idx: int) -> Any:
    """The first step makes a layer."""
    if not hasattr(self, "head"):
        torch.manual_seed(0)
        self.head = nn.Linear(3, 3)
    return F.cross_entropy(self.head(self(batch[0])), batch[1])


def averages(self: Any, batch: Any) -> None:
    self.centre = 0.9 * self.centre + 0.1 * self(batch[0]).detach().mean(0)


class Meter:
    """An object that all replicas share."""

    count = 0

    def add(self) -> None:
        self.count += 1


def keeps_rows(self: Any, batch: Any) -> None:
    self.kept.append(self(batch[0]).detach())
    self.kept.append(self.loss(batch).detach())


def keeps_valid(self: Any, batch: Any) -> None:
    """One item for each valid sample."""
    x, y = batch
    self.kept.extend(row for row in x[y > 0])
    self.log("mean", x[y > 0].mean(), batch_size=int((y > 0).sum()))


def holding(**values: Callable[[], Any]) -> Callable[[Any], None]:
    """Gives a module attributes; tensors become buffers."""

    def init(self: Any) -> None:
        for name, make in values.items():
            value = make()
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    return init


def predicts(does: Callable[[Any, Tensor], Any], **methods: Any) -> type[Any]:
    return variant(predict_step=lambda self, batch, batch_idx: does(self, batch[0]), **methods)


def padded(self: Any, x: Tensor) -> Tensor:
    """Predictions as long as the longest of the shard."""
    lengths = x.argmax(1) + 1
    return torch.ones(len(lengths), int(lengths.max()))


def counting(gathers: bool) -> type[Any]:
    """Counts in a buffer."""

    def count(self: Any, batch: Any, batch_idx: int) -> None:
        pairs = 3 * batch[1] + self(batch[0]).argmax(1)
        pairs = self.all_gather(pairs).flatten() if gathers else pairs
        self.confusion += torch.bincount(pairs, minlength=9).view(3, 3)

    init = holding(confusion=lambda: torch.zeros(3, 3))
    return variant(init=init, validation_step=count)


kept = holding(kept=list)
in_eval = holding(norm=lambda: nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5)))
teacher = holding(teacher=lambda: nn.Linear(10, 3).requires_grad_(False))
TRAINING: dict[Cause, dict[str, type[Any] | tuple[type[Any], dict[str, Any]]]] = {
    None: {
        "plain": Classifier,
        "masked and counted": variant(training_step=masked, counts=True),
        "dropout": Dropping,
        "contrastive in forward mode": (Contrastive, {"mode": "forward"}),
        "mixup before the transfer": variant(on_before_batch_transfer=mixed),
        "rows in a list": before(keeps_rows, init=kept),
        "valid rows in a list": before(keeps_valid, init=kept),
    },
    "sum": {
        "sum": summed(Classifier),
        "batch norm, a sum": summed(Normed),
        "a logged time, a sum": summed(Timed),
    },
    "mean": {
        "mean as a sum": (Classifier, {"loss_reduction": "sum"}),
        "miscounted": variant(training_step=miscounted),
    },
    "items": {
        "masked": variant(training_step=masked, counts=False),
    },
    "whole batch": {
        "contrastive": Contrastive,
        "mixup in the step": variant(training_step=mixed_in_step),
        "mixup after the transfer": variant(on_after_batch_transfer=mixed),
    },
    "batch norm": {
        "batch norm": Normed,
        "batch norm in forward mode": (Normed, {"mode": "forward"}),
    },
    "random": {
        "noise": variant(forward=noisy),
        "functional dropout": drawing(lambda x: F.dropout(x, 0.5)),
        "numpy": drawing(lambda x: x + torch.as_tensor(np.random.randn(*x.shape)).to(x)),
    },
    "not repeatable": {"noise elsewhere": variant(forward=noisy_elsewhere)},
    "made in step": {"makes a layer": variant(training_step=makes_head)},
    "buffer": {
        "queue": before(averages, init=holding(centre=lambda: torch.zeros(3))),
    },
    "parameter": {  # every replica writes to it; those on the CPU share trained weights
        "teacher": before(lambda self, batch: self.teacher.weight.data.mul_(0.9), init=teacher),
        "shrinking": before(lambda self, batch: self.net[0].weight.data.mul_(0.9)),
    },
    "logger": {
        "picture": before(lambda self, batch: self.logger.experiment.add_image("batch", batch[0])),
    },
    "state": {"meter": before(lambda self, batch: self.meter.add(), init=holding(meter=Meter))},
    "list": {
        "deviations": before(
            lambda self, batch: self.kept.append(self(batch[0]).detach().std()), init=kept
        ),
    },
}
EVALUATION: dict[Cause, dict[str, tuple[str, type[Any]]]] = {
    None: {
        "of each": (
            "predict_step",
            predicts(lambda self, x: self(self.norm(x)).softmax(1), init=in_eval),
        ),
        "gathered in validation": ("validation_step", counting(True)),
    },
    "output": {
        "centred": ("predict_step", predicts(lambda self, x: self(x) - self(x).mean(0))),
        "padded": ("predict_step", predicts(padded)),
    },
    "buffer": {
        "confusion in validation": ("validation_step", counting(False)),
    },
}
STEPS = [
    (name, cause, *((row, {}) if isinstance(row, type) else row), "training_step")
    for cause, steps in TRAINING.items()
    for name, row in steps.items()
] + [
    (name, cause, kind, {}, step)
    for cause, rows in EVALUATION.items()
    for name, (step, kind) in rows.items()
]


@pytest.mark.parametrize(
    ("cause", "kind", "options", "step"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS]
)
def test_steps(cause: Cause, kind: type[Any], options: dict[str, Any], step: str) -> None:
    assert_named(report_of(kind, step, **options), cause)
