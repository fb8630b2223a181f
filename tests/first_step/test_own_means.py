"""A loss that is no mean over samples is told, and only that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, devices_of, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on", "one_thread")

WEIGHT = [1.0, 7.0, 0.3]
NO_MEAN = "expected a loss that is a mean over samples, got "
TOLD = NO_MEAN + "a cross entropy"


class Weighted(Classifier):
    """Its classes weigh differently, and it may say what its loss is a mean over."""

    tells = False

    def loss(self, batch: Any) -> Any:
        x, y = batch
        weight = torch.tensor(WEIGHT, device=x.device)
        loss: Any = F.cross_entropy(self(x), y, weight)
        if self.tells and self.trainer.training:
            loss.num_items = weight[y].sum()
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs weigh by batch_size, which is not of interest here."""


class WeightedByHand(ByHand, Weighted):
    pass


def trained(make: Any, devices: int, told: bool, **strategy: Any) -> Any:
    made = type(make.__name__, (make,), {"tells": told})
    return run(made, devices, strategy=strategy)


@pytest.mark.filterwarnings("ignore:.*expected numbers for self.log")
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [Weighted, WeightedByHand])
def test_class_weights_are_told_and_with_their_sum_are_as_on_one_device(
    make: Any, executor: str, on: str
) -> None:
    with pytest.warns(UserWarning, match=TOLD) as records:
        trained(make, 3, told=False, executor=executor)
    assert sum(TOLD in str(record.message) for record in records) == 1
    expected = trained(make, 1, told=False)
    assert_same(trained(make, 3, told=True, executor=executor), expected, atol=1e-5)
    assert_same(trained(make, 3, told=False, mode="forward"), expected, atol=1e-5)


class Net(nn.Linear):
    """Its loss has the options that a test gives."""

    def __init__(self, weights: list[float] | None = None, **options: Any) -> None:
        super().__init__(4, 3)
        self.options = options
        self.register_buffer("weights", None if weights is None else torch.tensor(weights))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, self.weights, **self.options)


BATCH = torch.randn(6, 4), torch.tensor([0, 0, 1, 2, 1, 1])
WITH_PADDING = torch.randn(4, 5, 4), torch.tensor([[0, 1, 2, 1, 0], [1, 1, -100, -100, -100]] * 2)


def messages(net: Net, batch: Any, count: int = 1, **options: Any) -> list[str]:
    """What is told in so many steps."""
    devices = devices_of(2)
    net, batch = net.to(devices[0]), [part.to(devices[0]) for part in batch]
    own = {"output_device": devices[0], "split": lambda n: (n - n // 2, n // 2)}
    engine = StepParallel(net, devices, **own, **options)
    with closing(engine), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(count):
            engine.train("training_step", batch).backward()
    return [str(record.message) for record in records if TOLD in str(record.message)]


class Sequences(Net):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


def test_the_numbers_are_told() -> None:
    """The first batch is cut unequally, whatever the split."""
    [told] = messages(Net(WEIGHT), BATCH, count=3)
    assert told.startswith("training_step: ") and ": 9.3, 14 in shards of 4, 2 samples." in told


@pytest.mark.parametrize(("rows", "is_told"), [([0, 1], True), ([0, 2], False), ([1, 3], False)])
def test_ignored_targets_are_told_where_shards_have_more_or_fewer(
    rows: list[int], is_told: bool
) -> None:
    assert bool(messages(Sequences(), [part[rows] for part in WITH_PADDING])) == is_told


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weights": [2.0, 2.0, 2.0]}],
    ids=str,
)
def test_means_over_samples_are_not_told(options: dict[str, Any]) -> None:
    assert not messages(Net(**options), BATCH)


def test_sums_and_what_has_said_its_items_are_not_told() -> None:
    class Telling(Net):
        def training_step(self, batch: Any) -> Any:
            loss: Any = super().training_step(batch)
            loss.num_items = self.weights[batch[1]].sum()
            return loss

    assert not messages(Telling(WEIGHT), BATCH)
    assert not messages(Net(WEIGHT), BATCH, loss_reduction="sum")
    assert not messages(Net(WEIGHT, reduction="sum"), BATCH, loss_reduction="sum")


def test_looks_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first, the 16th and the 256th batch."""
    looks: list[int] = []
    monkeypatch.setattr(
        "lightning_dp.parallel.additive.own_means.divisors_of_means",
        lambda loss: looks.append(1) or [],
    )
    assert not messages(Net(), BATCH, count=260)
    assert len(looks) == 3 * 2


class Padded(nn.Linear):
    """Its loss is a mean over the samples that count."""

    picks = False

    def training_step(self, batch: Any) -> Tensor:
        x, counts = batch
        values = self(x)[:, 0]
        return values[counts > 0].mean() if self.picks else (values * counts).sum() / counts.sum()


ALL, SOME = [1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]
ONE_SIDE, NONE = [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([ALL] * 15 + [SOME], "a sum divided by 3, 0 in shards of 4, 2"),
        ([ONE_SIDE], "a sum divided by 4, 0 in shards of 4, 2"),
        ([NONE, SOME], "a sum divided by 3, 0 in shards of 4, 2"),
    ],
    ids=["padding comes later", "a shard of nothing", "a batch of nothing"],
)
@pytest.mark.parametrize("picks", [False, True])
def test_items_are_told_as_soon_as_they_can_be(
    picks: bool, batches: list[list[int]], expected: str
) -> None:
    net, cpu = Padded(4, 1), torch.device("cpu")
    net.picks = picks
    engine = StepParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (n // 2, n - n // 2))
    with closing(engine), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for counts in batches:
            assert not any(NO_MEAN in str(record.message) for record in records)
            engine.train("training_step", (torch.ones(6, 4), torch.tensor(counts))).backward()
        for _ in range(20):
            engine.train("training_step", (torch.ones(6, 4), torch.tensor(SOME))).backward()
    assert sum(NO_MEAN + expected in str(record.message) for record in records) == 1


Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]
CLASSES = torch.tensor([1.0, 5.0, 0.3])
MEANS: dict[str, Loss] = {
    "mean": lambda net, x, y: (net(x) - y).square().mean(),
    "sum by samples": lambda net, x, y: F.mse_loss(net(x), y, reduction="sum") / len(x),
    "sum by elements": lambda net, x, y: (net(x) * y).sum() * (1 / y.numel()),
    "scaled mean": lambda net, x, y: 0.5 * F.l1_loss(net(x), y) - 2 * (net(x) * y).sum(1).mean(),
    "mean of sums": lambda net, x, y: F.smooth_l1_loss(net(x), y, reduction="none").sum(1).mean(),
    "sum of means": lambda net, x, y: (net(x) * y).mean(0).sum(),
    "batchmean": lambda net, x, y: F.kl_div(net(x), y.softmax(1), reduction="batchmean"),
    "penalty": lambda net, x, y: F.mse_loss(net(x), y) + sum(p.norm() for p in net.parameters()),
    "learnt scale": lambda net, x, y: F.mse_loss(net(x), y) * net.bias[0].exp() + net.bias[0],
    "stack": lambda net, x, y: torch.stack([F.mse_loss(net(x), y), net(x).mean()]).mean(),
    "weights": lambda net, x, y: (torch.full((len(x), 1), 1 / len(x)) * net(x)).sum(),
    "divided before": lambda net, x, y: (net(x) / len(x) + y / len(x)).sum(),
    "divided apart": lambda net, x, y: (net(x) / len(x) + net(x).square() / len(x)).sum(),
    "function of each": lambda net, x, y: (net(x) - y).square().sum(1).sqrt().mean(),
    "classes": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1), label_smoothing=0.1),
    "probabilities": lambda net, x, y: F.cross_entropy(net(x), y.softmax(1)),
    "logits": lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y.sigmoid()),
    "learnt weight": lambda net, x, y: F.mse_loss(net(x), y) / net.bias.exp().sum() + net.bias[0],
    "of each class": lambda net, x, y: (
        (net(x).mean(0) * net.bias).sum() - net(x).mean(0) @ net.bias
    ),
    "mean for each": lambda net, x, y: (net(x).square().sum(1) + F.mse_loss(net(x), y)).mean(),
    "over classes": lambda net, x, y: (net(x).amax(1) - net(x).logsumexp(1)).mean(),
    "variance of each": lambda net, x, y: (net(x).std(1) + net(x).norm(dim=1)).mean(),
    "order of classes": lambda net, x, y: (net(x).sort(1)[0].cumsum(1) * y.roll(1, 1)).mean(),
    "products of each": lambda net, x, y: (net(x)[:, None] @ net(x)[:, :, None]).square().mean(),
    "own pairs": lambda net, x, y: (net(x) @ net(x).T / 2).diagonal().square().mean(),
    "trace": lambda net, x, y: (net(x) @ net(x).T).trace() / len(x),
    "limit of each": lambda net, x, y: F.relu(1 - net(x) * y).clamp(max=2).mean(),
    "triplets": lambda net, x, y: F.triplet_margin_loss(net(x), net(x + 1), net(x - 1)),
    "cosine": lambda net, x, y: F.cosine_similarity(net(x), y).mean(),
    "standardised": lambda net, x, y: F.layer_norm(net(x), [3]).square().mul(y).mean(),
    "centred rows": lambda net, x, y: net(x - x.mean(1, keepdim=True)).square().mean(),
    "zeros like": lambda net, x, y: net(x - x.new_zeros(4) - torch.zeros_like(x[0])).mean(),
    "weights of one": lambda net, x, y: (
        net(x) * torch.ones_like(y) / torch.ones_like(y).sum()
    ).sum(),
    "range of one": lambda net, x, y: net(x / torch.ones_like(x).max()).square().mean(),
    "up to the longest": lambda net, x, y: (net(x) * _mask(y)).square().mean(),
    "for people": lambda net, x, y: _shown(x, net(x).square().mean()),
    "penalty of all": lambda net, x, y: (
        F.mse_loss(net(x), y) + 0.1 * sum(p.square().sum() for p in net.parameters())
    ),
    "penalty by data": lambda net, x, y: (
        net(x).mean() + y.mean() * net.weight.exp().sum() + x.mean() * net.bias.sum()
    ),
    "cross entropy of all": lambda net, x, y: (
        F.cross_entropy(net(x), y.argmax(1), CLASSES) * CLASSES[y.argmax(1)].sum() / len(x)
    ),
    "straight through": lambda net, x, y: F.mse_loss(net(x) + (y - net(x)).detach(), y * net(x)),
    "own weights": lambda net, x, y: ((net(x) - y).square() * (net(x) - y).abs().detach()).mean(),
    "gradient of each": lambda net, x, y: _slopes(net, x).norm(dim=1).mean() + net(x).mean(),
    "zeros like a mean": lambda net, x, y: (net(x) - torch.zeros_like(net(x).mean(0))).mean(),
    "shown": lambda net, x, y: F.mse_loss(net(x), y) + 0 * F.mse_loss(net(x), y).detach().exp(),
    "column": lambda net, x, y: F.mse_loss(net(x)[:, 0].view(-1), y[:, 0]).view(1).squeeze(),
}


def _dice(chosen: Tensor, right: Tensor) -> Tensor:
    return 1 - 2 * (chosen * right).sum() / (chosen.sum() + right.sum())


def _slopes(net: nn.Linear, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    [slopes] = torch.autograd.grad(net(x).exp().sum(), x, create_graph=True)
    return slopes


def _length(net: nn.Linear, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, net.weight, retain_graph=True)[0].norm()


def _spread(z: Tensor) -> Tensor:
    return torch.eye(3) + z.T @ z / len(z)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    return one.detach() / other.detach()


def _divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """Of a normal distribution of weights from the standard one."""
    variance = torch.log1p(spread.exp()).square()
    return 0.5 * (variance + mean**2 - 1 - variance.log()).sum()


def _mean(net: nn.Linear, x: Tensor) -> Tensor:
    return net(x).softmax(1).mean(0)


def _shown(x: Tensor, loss: Tensor) -> Tensor:
    assert ((x - x.amin()) / (x.amax() - x.amin())).mean() < 1  # an image, for a logger
    return loss


def _mask(y: Tensor) -> Tensor:
    lengths = y.abs().long().sum(1)
    places = torch.arange(lengths.max() + 1)[None].view(1, lengths.max() + 1)
    return F.pad((places < lengths[:, None]).float(), (0, lengths.max()))[:, :3]


def _centred_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x -= x.mean(0).expand_as(x)
    return x


def _less_running_mean(x: Tensor) -> Tensor:
    return x - torch.zeros(4).lerp_(x.mean(0), 0.1)


@torch.no_grad()
def _advantages(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-6)


OTHERS: dict[str, tuple[Loss, str]] = {
    "sum": (lambda net, x, y: (net(x) - y).square().sum(), "a sum of 15, 9 elements"),
    "mse sum": (lambda net, x, y: F.mse_loss(net(x), y, reduction="sum"), "a sum of 15, 9 "),
    "classes": (lambda net, x, y: F.nll_loss(net(x), y.argmax(1), reduction="sum"), "a sum of 15"),
    "by the batch": (lambda net, x, y: net(x).square().sum() / 8, "a sum of 15, 9 elements in "),
    "means by the batch": (lambda net, x, y: net(x).mean(1).sum() / 8, "a sum of 15, 9 elements"),
    "mean by length": (lambda net, x, y: net(x).square().mean() * len(x), "a sum of 15, 9 "),
    "mean by the inverse": (
        lambda net, x, y: F.mse_loss(net(x), y) * (8 / len(x)),
        "a mean times 1.6, 2.66667 in shards of 5, 3 samples. That follows from how many ",
    ),
    "cross entropy by length": (
        lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)) * len(x),
        "a sum of 15, 9 elements",
    ),
    "twice by length": (
        lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)) / len(x),
        "a sum divided by 25, 9 in shards of 5, 3",
    ),
    "penalty by length": (
        lambda net, x, y: F.mse_loss(net(x), y) + net.weight.square().sum() / len(x),
        "a term of parameters alone times 0.2, 0.333333 in shards of 5, 3 samples. That follows ",
    ),
    "norm by length": (
        lambda net, x, y: net(x).mean() + 0.1 * len(x) * net.weight.norm(),
        "a term of parameters alone times 0.5, 0.3 in ",
    ),
    "divergence by length": (
        lambda net, x, y: F.mse_loss(net(x), y) + _divergence(net.weight, net.weight / 2) / len(x),
        "a term of parameters alone times ",
    ),
    "one of two": (lambda net, x, y: net(x).mean() - 0.1 * net(x).exp().sum(), "a sum of 15, 9 "),
    "masked": (lambda net, x, y: (net(x) * (y > 0)).sum() / (y > 0).sum(), "a sum divided by "),
    "picked": (lambda net, x, y: (net(x) - y)[y > 0].square().mean(), "a sum divided by "),
    "pairs": (lambda net, x, y: (net(x) @ net(x).T).mean(), "a sum divided by 25, 9 in shards of"),
    "by itself": (lambda net, x, y: net(x).mean() / net(x).mean().detach(), "a sum divided by "),
    "root": (lambda net, x, y: F.mse_loss(net(x), y).sqrt(), "sqrt of a sum or mean of them."),
    "power": (lambda net, x, y: 3 * net(x).square().mean() ** 0.5, "a power of a sum or mean of"),
    "logarithm": (lambda net, x, y: net(x).exp().mean().log(), "log of a sum or mean of them. "),
    "norm": (lambda net, x, y: torch.norm(net(x) - y), "a norm over all of them. "),
    "dice": (lambda net, x, y: _dice(net(x).sigmoid(), y.sigmoid()), "a ratio with a sum or mean"),
    "correlation": (
        lambda net, x, y: -torch.corrcoef(torch.cat([net(x), y], 1).T)[0, 3],
        "of them",
    ),
    "contrast": (
        lambda net, x, y: F.cross_entropy(net(x) @ net(x + 1).T, torch.arange(len(x))),
        "values of pairs of them, as [5, 5] and [3, 3]. ",
    ),
    "distances": (lambda net, x, y: torch.cdist(net(x), y).amin(1).mean(), "values of pairs of "),
    "covariance": (lambda net, x, y: (net(x).T @ net(x) / len(x)).square().sum(), "a power of a"),
    "variance": (lambda net, x, y: net(x).var(0).sum(), "the variance over all of them. "),
    "means alike": (lambda net, x, y: F.mse_loss(net(x).mean(0), y.mean(0)), "a loss of a sum or"),
    "entropy of all": (lambda net, x, y: torch.special.entr(_mean(net, x)).sum(), "of them"),
    "centred": (lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(), "a power of a sum or"),
    "normalised": (
        lambda net, x, y: (F.normalize(net(x), dim=0) * y).mean(),
        "a norm over all of ",
    ),
    "share of all": (lambda net, x, y: (net(x).softmax(0) * y).sum(), "softmax of them. "),
    "largest": (lambda net, x, y: (net(x) - y).square().max(), "the maximum over all of them. "),
    "hardest": (lambda net, x, y: net(x).square().topk(2, 0)[0].mean(), "the largest ones over "),
    "middle": (lambda net, x, y: (net(x) - y).square().median(), "a quantile over all of them. "),
    "of all": (lambda net, x, y: net(x).square().logsumexp(0).mean(), "logsumexp over all of them"),
    "running": (lambda net, x, y: net(x).cumsum(0).square().mean(), "a running sum of them. "),
    "in order": (
        lambda net, x, y: (net(x).sort(0)[0] - y).square().mean(),
        "another order of them",
    ),
    "next one": (lambda net, x, y: (net(x) * net(x).roll(1, 0)).mean(), "another order of them. "),
    "flooding": (lambda net, x, y: (F.mse_loss(net(x), y) - 1.5).abs(), "abs of a sum or mean of "),
    "a limit": (lambda net, x, y: net(x).mean().clamp(min=-0.2), "a limit of a sum or mean of"),
    "experts": (
        lambda net, x, y: (_mean(net, x) * y.mean(0)).sum(),
        "a product of what shards have",
    ),
    "centred data": (
        lambda net, x, y: net(x - x.mean(0)).square().mean(),
        "sub of samples and of ",
    ),
    "in place": (lambda net, x, y: net(_centred_in_place(x)).square().mean(), "sub_ of samples "),
    "running mean": (lambda net, x, y: net(_less_running_mean(x)).square().mean(), "of mean over "),
    "advantages": (lambda net, x, y: (net(x) * _advantages(y)).mean(), "of mean over all of them"),
    "range of data": (lambda net, x, y: net(x / x.abs().max()).square().mean(), "of max over all"),
    "norm of data": (lambda net, x, y: net(F.relu(x) / x.norm()).square().mean(), "of norm over "),
    "shares of data": (
        lambda net, x, y: (net(x).square() * (y.exp() / y.exp().sum(0))).mean(),
        "div of samples and of sum over all of them, which has no gradient. ",
    ),
    "shares of counts": (
        lambda net, x, y: (net(x).square() * ((y > 0) / (y > 0).sum(0))).mean(),
        "div of samples and of sum over all of them",
    ),
    "whitened": (lambda net, x, y: net(x @ (x.T @ x)).square().mean(), "of matmul over all of "),
    "threshold": (
        lambda net, x, y: (net(x) * (y > y.median())).square().mean(),
        "gt of samples and of median over all of them",
    ),
    "imputed": (
        lambda net, x, y: net(torch.where(x > 0, x, x.mean(0))).square().mean(),
        "where of samples and of mean over all of them",
    ),
    "less the mean": (
        lambda net, x, y: (net(x) - net(x).detach().mean(0)).square().mean(),
        "sub of samples and of mean over all of them",
    ),
    "less the detached mean": (
        lambda net, x, y: (net(x) - net(x).mean(0).detach()).square().mean(),
        "sub of samples and of mean over all of them",
    ),
    "balance": (
        lambda net, x, y: net(x).mean() * _ratio(net(x).exp().mean(), net(x).square().mean()),
        "a ratio of mean and mean over samples. ",
    ),
    "share of a class": (
        lambda net, x, y: (y > 0).float().mean() * net(x).square().mean(),
        "a product of mean and mean over samples. ",
    ),
    "adaptive weight": (
        lambda net, x, y: net(x).exp().mean() * _length(net, F.mse_loss(net(x), y)).detach(),
        "a norm of mse_loss over samples. ",
    ),
    "rate": (lambda net, x, y: -_spread(net(x)).logdet(), "a determinant of a sum or mean of"),
    "rank": (lambda net, x, y: torch.linalg.eigvalsh(_spread(net(x)))[-1], "eigenvalues of a sum "),
    "entropy by xlogy": (
        lambda net, x, y: torch.xlogy(_mean(net, x), _mean(net, x)).sum(),
        "of a sum or mean of them",
    ),
    "elu": (lambda net, x, y: F.elu(net(x).mean(0)).sum(), "elu of a sum or mean of them"),
    "two means": (
        lambda net, x, y: net(x).mean() * net(x).square().mean(),
        "a product with a sum ",
    ),
}


def one_step(loss: Loss, devices: int, **options: Any) -> tuple[Tensor, list[str]]:
    """The gradient of eight samples, in shards of five and three, and what is told of the loss."""

    class Own(nn.Linear):
        def training_step(self, batch: Any) -> Tensor:
            return loss(self, *batch)

    torch.manual_seed(0)
    cpu = torch.device("cpu")
    net, batch = Own(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    split = {1: lambda n: (n,), 2: lambda n: (n - n // 2, n // 2)}[devices]
    engine = StepParallel(net, [cpu] * devices, output_device=cpu, split=split, **options)
    with closing(engine), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(2):
            net.zero_grad()
            engine.train("training_step", batch).backward()
    assert net.weight.grad is not None
    return net.weight.grad, [m for m in map(str, (r.message for r in records)) if NO_MEAN in m]


@pytest.mark.parametrize("name", MEANS)
def test_losses_of_which_nothing_is_told_are_as_on_one_device(name: str) -> None:
    gradient, told = one_step(MEANS[name], 2)
    assert not told
    torch.testing.assert_close(gradient, one_step(MEANS[name], 1)[0])


@pytest.mark.parametrize("name", OTHERS)
def test_losses_of_which_something_is_told_are_not(name: str) -> None:
    loss, text = OTHERS[name]
    gradient, [told] = one_step(loss, 2)
    assert text in told
    assert not torch.allclose(gradient, one_step(loss, 1)[0], rtol=1e-3)


DRAWN: dict[str, Loss] = {
    "mean": lambda net, x, y: F.mse_loss(net(x), y),
    "cross entropy": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)),
    "penalty": lambda net, x, y: net.weight.square().sum(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_mean_times_what_each_replica_draws_is_not_told(name: str) -> None:
    """As random numbers are not: they are never one device's."""
    drawn = iter(range(1, 9))
    _, told = one_step(lambda net, x, y: next(drawn) * DRAWN[name](net, x, y) + net(x).mean(), 2)
    assert not told


@pytest.mark.parametrize("name", ["sum", "mse sum", "classes", "by the batch"])
def test_told_to_be_sums_they_are_as_on_one_device(name: str) -> None:
    gradient, told = one_step(OTHERS[name][0], 2, loss_reduction="sum")
    assert not told
    torch.testing.assert_close(gradient, one_step(OTHERS[name][0], 1)[0])


class TwoByHand(ByHand, Classifier):
    """The second loss of each step is a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        for reduction in ("mean", "sum"):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y, reduction=reduction))
            optimizer.step()


def test_each_loss_of_a_step_by_hand_is_looked_at() -> None:
    with pytest.warns(UserWarning, match=NO_MEAN + "a sum of") as records:
        run(TwoByHand, 3)
    assert sum(NO_MEAN in str(record.message) for record in records) == 1


class MixedLater(Classifier):
    """In the second epoch alone: samples meet."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        loss = F.cross_entropy(z, batch[1])
        return loss + 0.1 * (z @ z.T).tanh().mean() if self.current_epoch else loss


def test_mixing_that_begins_later_is_told_though_shards_are_equal() -> None:
    with pytest.warns(UserWarning, match=NO_MEAN) as records:
        run(MixedLater, 3, data=lambda: loader(120, 12))
    assert sum(NO_MEAN in str(record.message) for record in records) == 1


class Skips(Classifier):
    """Leaves out batches with a sample that is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        loss = loss * torch.nan if batch_idx and 0 in batch[2] else loss
        return loss if torch.isfinite(loss) else None


def test_a_loss_of_some_replicas_alone_is_told_once() -> None:
    def numbered() -> DataLoader[Any]:
        x, y = torch.randn(24, 10), torch.randint(0, 3, (24,))
        return DataLoader(TensorDataset(x, y, torch.arange(24) % 12), batch_size=12)

    class Own(Skips):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Nothing."""

    with pytest.warns(UserWarning, match="got None from 1 of 3. Their samples are left") as records:
        trainer(3).fit(Own(), numbered(), loader())
    assert sum("got None from" in str(record.message) for record in records) == 1
