"""The first-step check names each step that shards cannot compute, with its cause, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import laws
import numpy as np
import pytest
import torch
from laws import Cause
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from oracle import Classifier, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.check import Report

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

N, K = 25, 3
KNOWN = {"batch norm", "random"}


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
    job = trainer(K, strategy, max_epochs=1, logger=DummyLogger(), limit_val_batches=1)
    batches = data() if batches is None else batches
    if step == "training_step":
        job.limit_val_batches = 0
        job.fit(module, batches)
    else:
        run = {"validation_step": job.validate, "test_step": job.test}
        run.get(step, job.predict)(module, batches)
    return strategy.first_step[step]


def assert_named(report: Report, *causes: Cause) -> None:
    assert not report.skipped, report.skipped
    for cause in causes:
        if cause is None:
            assert report.is_same, str(report)
        else:
            assert cause in report.causes and (report.differences or cause in KNOWN), str(report)


def rows(*tables: str) -> Any:
    """A parameter for each row of these tables: which table, what a user writes, the cause."""
    return pytest.mark.parametrize(
        ("table", "piece", "cause"),
        [
            pytest.param(table, piece, cause, id=f"{table}-{name}")
            for table in tables
            for cause, pieces in getattr(laws, table).items()
            for name, piece in pieces.items()
        ],
    )


class Linear(LightningModule):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.net, self.of = nn.Linear(4, 3), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.of(self.net, *batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class Layered(Classifier):
    """With another layer, and what the layer is called with."""

    def __init__(self, make: Any, does: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.does = make(), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer, self.net(x))


def training(does: Callable[[Any, Tensor, Tensor], Any], *bases: type[Classifier]) -> Any:
    """A class of Classifiers whose training step is this."""
    step = lambda self, batch, batch_idx: does(self, *batch)
    return type("Step", bases or (Classifier,), {"training_step": step})


def mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x), y)


@rows("LOSSES", "MEETING", "MIXED", "LAYERED", "INNER")
def test_losses(table: str, piece: Any, cause: Cause) -> None:
    torch.manual_seed(0)
    if table == "LOSSES":
        report = report_of(Linear(piece), batches=data(4, lambda: torch.randn(N, 3)))
    elif table == "LAYERED":
        report = report_of(Layered(*piece))
    else:
        kinds = {
            "MEETING": lambda self, x, y: piece(self.net(x), x, y),
            "MIXED": lambda self, x, y: mean(self, piece(x), y),
            "INNER": lambda self, x, y: piece(self, x.clone().requires_grad_(), y),
        }
        report = report_of(training(kinds[table])())
    assert_named(report, cause)
    assert table != "MIXED" or "random" not in report.causes  # mixed samples are no chance


def logging(number: Any, **options: Any) -> LightningModule:
    """A step that logs and returns a number."""

    def step(self: Any, x: Tensor, y: Tensor) -> Any:
        z = self(x)
        value = number(z, y)
        self.log("own", value, **options)
        return {"loss": F.cross_entropy(z, y)} | ({} if options else {"own": {"number": value}})

    torch.manual_seed(0)
    module: LightningModule = training(step)()
    return module


@rows("NUMBERS")
def test_numbers(table: str, piece: Any, cause: Cause) -> None:
    assert_named(report_of(logging(piece)), *((cause, "output") if cause else (None,)))


@pytest.mark.parametrize(
    ("name", "number", "options", "cause"),
    [
        ("of size 1", lambda z, y: z.mean().detach().unsqueeze(0), {"prog_bar": False}, None),
        ("sum", lambda z, y: z.abs().sum(), {"reduce_fx": "sum"}, None),
        ("mean as sum", lambda z, y: z.mean(), {"reduce_fx": torch.sum}, "logged value"),
        ("constant as sum", lambda z, y: 1.0, {"reduce_fx": "sum"}, "logged value"),
        ("samples", lambda z, y: float(len(z)), {"reduce_fx": "sum"}, None),
        ("largest", lambda z, y: z.max(), {"reduce_fx": "max"}, None),
        ("std", lambda z, y: z.std(), {"batch_size": 25}, "logged value"),
        ("host", lambda z, y: z.square().mean().sqrt().item(), {"prog_bar": False}, "logged value"),
    ],
)
def test_numbers_with_options(name: str, number: Any, options: Any, cause: Cause) -> None:
    assert_named(report_of(logging(number, **options)), cause)


class Called(nn.Module):
    def __init__(self, does: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.norm, self.does = nn.Linear(4, 4), nn.BatchNorm1d(4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


@rows("CALLS")
def test_calls(table: str, piece: Any, cause: Cause) -> None:
    torch.manual_seed(0)
    spread = DataParallel(Called(piece), ["cpu"] * K, check_first_call=True)
    torch.manual_seed(1)
    spread(torch.randn(10, 4))
    spread.close()
    assert spread.first_call is not None
    assert_named(spread.first_call, cause)


# --- steps ----------------------------------------------------------------------------------------


def summed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x), y, reduction="sum")


def masked(self: Any, x: Tensor, y: Tensor, counts: bool = False) -> Any:
    """A mean over some of the samples."""
    valid = (x[:, 0] > 0).to(x)
    loss = (F.cross_entropy(self(x), y, reduction="none") * valid).sum() / valid.sum()
    return {"loss": loss, "num_items": valid.sum()} if counts else loss


def weighted(self: Any, x: Tensor, y: Tensor, counts: bool = False) -> Tensor:
    """The classes weigh differently."""
    weight = torch.tensor([1.0, 7.0, 0.3])
    loss: Any = F.cross_entropy(self(x), y, weight)
    if counts:
        loss.num_items = weight[y].sum()
    return loss


def miscounted(self: Any, x: Tensor, y: Tensor) -> Any:
    """A mean over samples with a count of something else."""
    return {"loss": mean(self, x, y), "num_items": (x > 0.5).sum()}


def contrastive(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(self(x), dim=1)
    return (z @ z.T).exp().mean()


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.norm(x))


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


def noisy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean(self, x + torch.randn_like(x) + torch.rand_like(x), y)


def noisy_sum(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As a variational autoencoder, whose terms are sums."""
    return summed(self, x + torch.randn_like(x), y)


ELSEWHERE = torch.Generator()


def noisy_elsewhere(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean(self, x, y) * torch.rand((), generator=ELSEWHERE)


def mixed_up(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As most people write it, with NumPy's random numbers and torch's."""
    share, order = float(np.random.beta(1, 1)), torch.randperm(len(x))
    z = self(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, y[order])


def less_the_mean(self: Any, x: Tensor) -> Tensor:
    """Looks at the whole batch; steps then drop half of it by hand."""
    z: Tensor = self(x)
    return z - z.mean(0)


def dropped(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(less_the_mean(self, x), 0.5), y)


def dropped_paths(self: Any, x: Tensor, y: Tensor) -> Tensor:
    kept = (0.3 + torch.rand(len(x), 1)).floor()
    return F.cross_entropy(less_the_mean(self, x) * kept, y)


def dropped_by_mask(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = less_the_mean(self, x)
    return F.cross_entropy(z.masked_fill(torch.rand_like(z) < 0.75, 0.0), y)


def chaotic(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A logistic map doubles an error in each of its steps."""
    z = self(x).sigmoid()
    for _ in range(25):
        z = 3.99 * z * (1 - z)
    loss: Tensor = z.mean()
    return loss


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


def makes_head(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The first step makes a layer."""
    if not hasattr(self, "head"):
        torch.manual_seed(0)
        self.head = nn.Linear(3, 3)
    return F.cross_entropy(self.head(self(x)), y)


def makes_buffer(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A buffer has the mean of the first shard."""
    if "mean" not in dict(self.named_buffers()):
        self.register_buffer("mean", x.mean(0))
    return mean(self, x - self.mean, y)


def makes_constant(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A buffer that is the same on every replica, and a layer without parameters."""
    if not hasattr(self, "drop"):
        self.drop = nn.Identity()
        self.register_buffer("steps", torch.arange(10.0))
    return F.cross_entropy(self.drop(self(x + self.steps)), y)


class Meter:
    count = 0


class Keeping(Classifier):
    """Has something of each kind to which a step may write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.teacher = nn.Linear(10, 3).requires_grad_(False)
        self.meter, self.kept = Meter(), []


def queue(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0)
    return F.cross_entropy(z, y)


def teacher(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The step itself moves the average of the weights."""
    with torch.no_grad():
        self.teacher.weight.mul_(0.9)
    return mean(self, x, y)


def shrinking(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The step itself writes to weights that are trained, which replicas on the CPU share."""
    self.net[0].weight.data.mul_(0.9)
    return mean(self, x, y)


def drawing(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Logs a picture of its own."""
    self.logger.experiment.add_image("batch", x)
    return mean(self, x, y)


def metered(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """An object that all replicas share counts the calls."""
    self.meter.count += 1
    return mean(self, x, y)


def keeping(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Keeps a deviation of each batch."""
    self.kept.append(self(x).detach().std())
    return mean(self, x, y)


def keeping_rows(self: Any, x: Tensor, y: Tensor) -> Tensor:
    self.kept.append(self(x).detach())
    self.kept.append(mean(self, x, y).detach())
    return mean(self, x, y)


def keeping_valid(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """One item for each valid sample."""
    self.kept.extend(row for row in x[y > 0])
    self.log("mean", x[y > 0].mean(), batch_size=int((y > 0).sum()))
    return mean(self, x, y)


def predicting(does: Callable[[Any, Tensor], Any], *bases: type[Classifier]) -> Any:
    step = lambda self, batch, batch_idx: does(self, batch[0])
    return type("Step", bases or (Classifier,), {"predict_step": step})


def of_each(self: Any, x: Tensor) -> Tensor:
    """Dropout and batch norm do nothing in evaluation."""
    z = F.dropout(self(x), 0.5, self.training)
    return (z - z.mean(1, keepdim=True)).softmax(1)


def padded(self: Any, x: Tensor) -> Tensor:
    """Predictions as long as the longest of the shard."""
    lengths = x.argmax(1) + 1
    return torch.ones(len(lengths), int(lengths.max()))


class Confusion(Classifier):
    """Counts in a buffer, in whatever step."""

    gathers = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(3, 3))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        pairs = 3 * batch[1] + self(batch[0]).argmax(1)
        pairs = self.all_gather(pairs).flatten() if self.gathers else pairs
        self.confusion += torch.bincount(pairs, minlength=9).view(3, 3)
        return batch[1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.predict_step(batch, batch_idx)

    test_step = validation_step


class Gathered(Confusion):
    gathers = True


FORWARD = {"mode": "forward"}
STEPS: dict[str, tuple[Any, Cause, dict[str, Any]]] = {
    "plain": (Classifier, None, {}),
    "sum": (summed, "sum", {}),
    "sum as a sum": (summed, None, {"loss_reduction": "sum"}),
    "mean as a sum": (Classifier, "mean", {"loss_reduction": "sum"}),
    "masked": (masked, "items", {}),
    "masked and counted": (lambda *args: masked(*args, counts=True), None, {}),
    "class weights": (weighted, "items", {}),
    "class weights, counted": (lambda *args: weighted(*args, counts=True), None, {}),
    "miscounted": (miscounted, "mean", {}),
    "contrastive": (contrastive, "whole batch", {}),
    "contrastive in forward mode": (contrastive, None, FORWARD),
    "batch norm": (Normed, "batch norm", {}),
    "batch norm, a sum": (training(summed, Normed), "sum", {}),
    "batch norm in forward mode": (Normed, "batch norm", FORWARD),
    "statistics of instances": (InstanceNormed, None, {}),
    "dropout": (Dropping, None, {}),
    "dropout, a sum": (training(summed, Dropping), "sum", {}),
    "noise": (noisy, "random", {}),
    "noise, a sum": (noisy_sum, "sum", {}),
    "noise elsewhere": (noisy_elsewhere, "not repeatable", {}),
    "rounding that is amplified": (chaotic, None, {}),
    "dropped after a mean": (dropped, "whole batch", {}),
    "paths dropped after a mean": (dropped_paths, "whole batch", {}),
    "mask after a mean": (dropped_by_mask, "whole batch", {}),
    "mixup in the step": (mixed_up, "whole batch", {}),
    "mixup after the transfer": (MixedUp, "transfer hook", {}),
    "mixup before the transfer": (MixedBefore, None, {}),
    "centred in the transfer": (CentringTransfer, "transfer hook", {}),
    "each in the transfer": (EachInTransfer, None, {}),
    "makes a layer": (makes_head, "made in step", {}),
    "makes a buffer": (makes_buffer, "buffer", {}),
    "makes a constant": (makes_constant, None, {}),
    "queue": (training(queue, Keeping), "buffer", {}),
    "teacher": (training(teacher, Keeping), "parameter", {}),  # every replica writes to it
    "shrinking weights": (shrinking, "parameter", {}),
    "logger": (drawing, "logger", {}),
    "meter": (training(metered, Keeping), "state", {}),
    "deviations in a list": (training(keeping, Keeping), "list", {}),
    "rows in a list": (training(keeping_rows, Keeping), None, {}),
    "valid rows in a list": (training(keeping_valid, Keeping), None, {}),
    "centred predictions": (predicting(less_the_mean), "output", {}),
    "shares as predictions": (predicting(lambda self, x: self(x).softmax(0)), "output", {}),
    "predictions of each": (predicting(of_each, Normed), None, {}),
    "padded predictions": (predicting(padded), "shapes", {}),
    "confusion in validation": (Confusion, "buffer", {"step": "validation_step"}),
    "confusion in test": (Confusion, "buffer", {"step": "test_step"}),
    "confusion in predict": (Confusion, "buffer", {"step": "predict_step"}),
    "gathered in validation": (Gathered, None, {"step": "validation_step"}),
    "gathered in predict": (Gathered, None, {"step": "predict_step"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    piece, cause, options = STEPS[name]
    kind = piece if isinstance(piece, type) else training(piece)
    step = "predict_step" if "predictions" in name else "training_step"
    torch.manual_seed(0)
    assert_named(report_of(kind(), **{"step": step, **options}), cause)


def test_hooks_of_a_data_module() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return data()

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]]

    strategy = DataParallelStrategy(check_first_step=True)
    trainer(K, strategy, max_epochs=1, limit_val_batches=0).fit(Classifier(), Data())
    assert_named(strategy.first_step["training_step"], "transfer hook")
