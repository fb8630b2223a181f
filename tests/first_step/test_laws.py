"""The first-step check names each step that shards cannot compute, with its cause, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import laws
import numpy as np
import pytest
import torch
from laws import Cause, Contrastive, Normed, Number
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from support.oracle import Classifier, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.check import Report

pytestmark = pytest.mark.usefixtures("one_thread")

N, K = 25, 3
KNOWN = {"batch norm", "random"}
NOT_SEEN = {"overlap": "none of the first nine samples is predicted to be of the class"}
"""Rows that differ with other data only, each with the reason."""


@contextmanager
def silently() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def data(columns: int = 10, targets: Callable[[], Tensor] | None = None) -> DataLoader[Any]:
    torch.manual_seed(1)
    x = torch.randn(N, columns)
    y = torch.randint(0, 3, (N,)) if targets is None else targets()
    return DataLoader([[x, y]], batch_size=None)


def report_of(
    module: LightningModule, step: str = "training_step", batches: Any = None, **options: Any
) -> Report:
    """What the check says of one kind of step."""
    strategy = DataParallelStrategy(check_first_step=True, **options)
    job = trainer(K, strategy, max_epochs=1, logger=DummyLogger())
    batches = data() if batches is None else batches
    with silently():
        if step == "training_step":
            job.limit_val_batches = 0
            job.fit(module, batches)
        else:
            run = {"validation_step": job.validate, "test_step": job.test}
            run.get(step, job.predict)(module, batches)
    return strategy.first_step[step]


def assert_named(report: Report, cause: Cause) -> None:
    assert not report.skipped, report.skipped
    if cause is None:
        assert report.is_same, str(report)
    else:
        assert cause in report.causes and (report.differences or cause in KNOWN), str(report)


# --- losses ---------------------------------------------------------------------------------------


def of_loss(name: str) -> Report:
    loss = laws.LOSSES[name][0]

    class OfLoss(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    return report_of(OfLoss(), batches=data(4, lambda: torch.randn(N, 3)))


@pytest.mark.parametrize("name", laws.LOSSES)
def test_losses(name: str) -> None:
    assert_named(of_loss(name), laws.LOSSES[name][1])


# --- numbers --------------------------------------------------------------------------------------


def of_number(number: Number, where: str, **options: Any) -> Report:
    """What is said of a number that a step logs or returns."""

    class Numbers(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z, y = self(batch[0]), batch[1]
            if where == "log":
                self.log("own", number(z, y), **options)
                return F.cross_entropy(z, y)
            return {"loss": F.cross_entropy(z, y), "own": {"number": number(z, y)}}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            z, y = self(batch[0]), batch[1]
            if where == "log":
                self.log("val/own", number(z, y), **options)
                return None
            return [number(z, y)]

    torch.manual_seed(0)
    step = "training_step" if where != "validation" else "validation_step"
    return report_of(Numbers(), step)


@pytest.mark.parametrize("where", ["log", "output"])
@pytest.mark.parametrize("name", [name for name in laws.NUMBERS if name != "detached"])
def test_numbers(name: str, where: str) -> None:
    number, cause = laws.NUMBERS[name]
    of = {"log": "logged value", "output": "output"}
    assert_named(of_number(number, where), None if name in NOT_SEEN else cause and of[where])


@pytest.mark.parametrize(
    ("number", "options", "cause"),
    [
        (laws.NUMBERS["detached"][0], {}, None),  # in an output it would be a row
        (laws.NUMBERS["sum"][0], {"reduce_fx": "sum"}, None),
        (laws.NUMBERS["accuracy"][0], {"reduce_fx": torch.sum}, "logged value"),
        (lambda z, y: 1.0, {"reduce_fx": "sum"}, "logged value"),
        (lambda z, y: float(len(z)), {"reduce_fx": "sum"}, None),
        (laws.NUMBERS["largest"][0], {"reduce_fx": "max"}, None),
        (lambda z, y: z.std(), {"batch_size": 25}, "logged value"),
        (lambda z, y: _error(z, y).sqrt().item(), {}, "logged value"),
    ],
    ids=[
        "detached",
        "sums",
        "means as sums",
        "a constant as a sum",
        "samples",
        "largest",
        "std",
        "host",
    ],
)
def test_numbers_with_options(number: Number, options: dict[str, Any], cause: Cause) -> None:
    assert_named(of_number(number, "log", **options), cause)


def _error(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, F.one_hot(y, 3).float())


# --- samples that meet ----------------------------------------------------------------------------


def of_meeting(name: str) -> Report:
    class Meeting(Classifier):
        meets = laws.MEETING[name][0]

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return self.meets(self.net(x), x, y)

    torch.manual_seed(0)
    return report_of(Meeting())


@pytest.mark.parametrize("name", laws.MEETING)
def test_losses_in_which_samples_meet(name: str) -> None:
    assert_named(of_meeting(name), laws.MEETING[name][1])


def of_mixed(name: str) -> Report:
    class Mixing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return super().training_step((laws.MIXED[name][0](x), y), batch_idx)

    torch.manual_seed(0)
    return report_of(Mixing())


@pytest.mark.parametrize("name", laws.MIXED)
def test_data_in_which_samples_meet(name: str) -> None:
    assert_named(of_mixed(name), laws.MIXED[name][1])


def of_layered(name: str) -> Report:
    make, does, _ = laws.LAYERED[name]

    class Layered(Classifier):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer = make()

        def forward(self, x: Tensor) -> Any:
            return does(self.layer, self.net(x))

    return report_of(Layered())


@pytest.mark.parametrize("name", laws.LAYERED)
def test_layers(name: str) -> None:
    assert_named(of_layered(name), laws.LAYERED[name][2])


def of_inner(name: str) -> Report:
    class Inner(Classifier):
        of = laws.INNER[name][0]

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return self.of(x.clone().requires_grad_(), y)

    torch.manual_seed(0)
    return report_of(Inner())


@pytest.mark.parametrize("name", laws.INNER)
def test_gradients_inside_of_a_loss(name: str) -> None:
    assert_named(of_inner(name), laws.INNER[name][1])


# --- calls that are spread ------------------------------------------------------------------------


class Called(nn.Module):
    def __init__(self, does: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.does = nn.Linear(4, 4), nn.BatchNorm1d(4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def of_call(name: str) -> Report:
    spread = DataParallel(Called(laws.CALLS[name][0]), ["cpu"] * K, check_first_call=True)
    torch.manual_seed(1)
    with silently():
        spread(torch.randn(10, 4))
    spread.close()
    assert spread.first_call is not None
    return spread.first_call


@pytest.mark.parametrize("name", laws.CALLS)
def test_calls(name: str) -> None:
    assert_named(of_call(name), laws.CALLS[name][1])


# --- steps ----------------------------------------------------------------------------------------


class Summed(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Masked(Classifier):
    """A mean over some of the samples."""

    counts = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        valid = (batch[0][:, 0] > 0).to(batch[0])
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        loss = (each * valid).sum() / valid.sum()
        return {"loss": loss, "num_items": valid.sum()} if self.counts else loss


class Counting(Masked):
    counts = True


class Weighted(Classifier):
    """The classes weigh differently."""

    counts = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.tensor([1.0, 7.0, 0.3])
        loss: Any = F.cross_entropy(self(batch[0]), batch[1], weight)
        if self.counts:
            loss.num_items = weight[batch[1]].sum()
        return loss


class WeightedAndCounting(Weighted):
    counts = True


class Miscounting(Classifier):
    """A mean over samples with a count of something else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "num_items": (batch[0] > 0.5).sum()}


class NormedSum(Normed):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class InstanceNormed(Classifier):
    """Normalizes each sample by itself, and keeps statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.norm(x.view(-1, 2, 5)).flatten(1))


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


class DroppingSum(Dropping):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class Noisy(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss([x + torch.randn_like(x) + torch.rand_like(x), y])


class MixedUpInStep(Classifier):
    """As most people write it, with NumPy's random numbers and torch's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, order = float(np.random.beta(1, 1)), torch.randperm(len(x))
        z = self(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, y[order])


class MixedUp(Classifier):
    """As Lightning's documentation has it: augmentation on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]]


class MixedBefore(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]]


class CentringTransfer(Classifier):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, *args: Any) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, *args)
        return [x - x.mean(0), y]


class EachInTransfer(Classifier):
    """Of each sample by itself, and some of them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        x = F.normalize(x.clamp(-2, 2), dim=1)
        return [torch.where(x[:, :1] > 0, x.flip(1), x), y]


class MakesHead(Classifier):
    """The first step makes a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "head"):
            torch.manual_seed(0)
            self.head = nn.Linear(3, 3)
        return F.cross_entropy(self.head(self(batch[0])), batch[1])


class MakesBuffer(Classifier):
    """A buffer has the mean of the first shard."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "mean" not in dict(self.named_buffers()):
            self.register_buffer("mean", batch[0].mean(0))
        return F.cross_entropy(self(batch[0] - self.mean), batch[1])


class MakesConstant(Classifier):
    """A buffer that is the same on every replica, and a layer without parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "drop"):
            self.drop = nn.Identity()
            self.register_buffer("steps", torch.arange(10.0))
        return F.cross_entropy(self.drop(self(batch[0] + self.steps)), batch[1])


class Queue(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0)
        return F.cross_entropy(z, batch[1])


class Teacher(Classifier):
    """The step itself moves the average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(10, 3).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class Shrinking(Classifier):
    """The step itself writes to weights that are trained, which replicas on the CPU share."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].weight.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


class Drawing(Classifier):
    """Logs a picture of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logger: Any = self.logger
        logger.experiment.add_image("batch", batch[0])
        return super().training_step(batch, batch_idx)


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Metered(Classifier):
    """An object that all replicas share counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.meter.count += 1
        return super().training_step(batch, batch_idx)


class Keeping(Classifier):
    """Keeps a deviation of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(self(batch[0]).detach().std())
        return super().training_step(batch, batch_idx)


class KeepingRows(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(self(batch[0]).detach())
        self.kept.append(self.loss(batch).detach())
        return super().training_step(batch, batch_idx)


class KeepingValid(Classifier):
    """One item for each valid sample."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.errors.extend(row for row in x[y > 0])
        self.log("mean", x[y > 0].mean(), batch_size=int((y > 0).sum()))
        return super().training_step(batch, batch_idx)


ELSEWHERE = torch.Generator()


class NoisyElsewhere(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand((), generator=ELSEWHERE)


class Centred(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        return z - z.mean(0)


class Shared(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(0)


class Alone(Classifier):
    """Dropout and batch norm do nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(self.norm(batch[0]))
        return (z - z.mean(1, keepdim=True)).softmax(1)


class Padded(Classifier):
    """Predictions as long as the longest of the shard."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        lengths = batch[0].argmax(1) + 1
        return torch.ones(len(lengths), int(lengths.max()))


class Confusion(Classifier):
    """Counts in a buffer, in whatever step."""

    gathers = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(3, 3))

    def count(self, batch: Any) -> None:
        pairs = 3 * batch[1] + self(batch[0]).argmax(1)
        pairs = self.all_gather(pairs).flatten() if self.gathers else pairs
        self.confusion += torch.bincount(pairs, minlength=9).view(3, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(batch)
        return batch[1]


class Gathered(Confusion):
    gathers = True


STEPS: dict[str, tuple[type[Classifier], str, dict[str, Any], Cause]] = {
    "plain": (Classifier, "training_step", {}, None),
    "sum": (Summed, "training_step", {}, "sum"),
    "mean as a sum": (Classifier, "training_step", {"loss_reduction": "sum"}, "mean"),
    "masked": (Masked, "training_step", {}, "items"),
    "masked and counted": (Counting, "training_step", {}, None),
    "class weights": (Weighted, "training_step", {}, "items"),
    "class weights, counted": (WeightedAndCounting, "training_step", {}, None),
    "miscounted": (Miscounting, "training_step", {}, "mean"),
    "contrastive": (Contrastive, "training_step", {}, "whole batch"),
    "batch norm": (Normed, "training_step", {}, "batch norm"),
    "batch norm, a sum": (NormedSum, "training_step", {}, "sum"),
    "batch norm in forward mode": (Normed, "training_step", {"mode": "forward"}, "batch norm"),
    "statistics of instances": (InstanceNormed, "training_step", {}, None),
    "dropout": (Dropping, "training_step", {}, None),
    "dropout, a sum": (DroppingSum, "training_step", {}, "sum"),
    "noise": (Noisy, "training_step", {}, "random"),
    "noise elsewhere": (NoisyElsewhere, "training_step", {}, "not repeatable"),
    "contrastive in forward mode": (
        Contrastive,
        "training_step",
        {"mode": "forward"},
        None,
    ),
    "mixup in the step": (MixedUpInStep, "training_step", {}, "whole batch"),
    "mixup after the transfer": (MixedUp, "training_step", {}, "whole batch"),
    "mixup before the transfer": (MixedBefore, "training_step", {}, None),
    "centred in the transfer": (CentringTransfer, "training_step", {}, "whole batch"),
    "each in the transfer": (EachInTransfer, "training_step", {}, None),
    "makes a layer": (MakesHead, "training_step", {}, "replicas"),
    "makes a buffer": (MakesBuffer, "training_step", {}, "buffer"),
    "makes a constant": (MakesConstant, "training_step", {}, None),
    "queue": (Queue, "training_step", {}, "buffer"),
    "teacher": (Teacher, "training_step", {}, "parameter"),  # every replica writes to it
    "shrinking weights": (Shrinking, "training_step", {}, "parameter"),
    "logger": (Drawing, "training_step", {}, "logger"),
    "meter": (Metered, "training_step", {}, "state"),
    "deviations in a list": (Keeping, "training_step", {}, "list"),
    "rows in a list": (KeepingRows, "training_step", {}, None),
    "valid rows in a list": (KeepingValid, "training_step", {}, None),
    "centred predictions": (Centred, "predict_step", {}, "output"),
    "shares as predictions": (Shared, "predict_step", {}, "output"),
    "predictions of each": (Alone, "predict_step", {}, None),
    "padded predictions": (Padded, "predict_step", {}, "output"),
    "confusion in validation": (Confusion, "validation_step", {}, "buffer"),
    "confusion in test": (Confusion, "test_step", {}, "buffer"),
    "confusion in predict": (Confusion, "predict_step", {}, "buffer"),
    "gathered in validation": (Gathered, "validation_step", {}, None),
    "gathered in predict": (Gathered, "predict_step", {}, None),
}


def of_step(name: str) -> Report:
    kind, step, options, _ = STEPS[name]
    torch.manual_seed(0)
    return report_of(kind(), step, **options)


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    assert_named(of_step(name), STEPS[name][3])


def test_nearly_all_rows_that_differ_are_seen() -> None:
    tables = (laws.LOSSES, laws.NUMBERS, laws.MEETING, laws.MIXED, laws.LAYERED, laws.INNER)
    rows = [row for table in (*tables, laws.CALLS, STEPS) for row in table.values()]
    differing = sum(row[-1] is not None for row in rows)
    assert len(rows) >= 290 and differing >= 150 and len(NOT_SEEN) <= 0.05 * differing


def test_hooks_of_a_data_module() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return data()

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]]

    strategy = DataParallelStrategy(check_first_step=True)
    with silently():
        trainer(K, strategy, max_epochs=1, limit_val_batches=0).fit(Classifier(), Data())
    assert_named(strategy.first_step["training_step"], "whole batch")
