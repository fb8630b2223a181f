"""The law table of the first-step check: what a user may write, and the cause that it names.

Each row is a piece of a training step, a number to log, an output or a call as people write it who
know one device, with the cause that the check names for it; None where shards give the numbers of
one device. Tables differ in where the piece stands: `LOSSES` in a loss of outputs and targets,
`NUMBERS` in `self.log` or an output, `MEETING`, `MIXED`, `LAYERED` and `INNER` in a classifier's
loss, its data, a layer of it and a loss with gradients inside, `CALLS` in a module's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics
from support.oracle import Classifier
from torch import Tensor, nn
from torch.nn import functional as F

Cause = str | None
Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]
Number = Callable[[Tensor, Tensor], Any]
Step = Callable[[Any, Tensor, Tensor], Tensor]


# --- losses

CLASSES = torch.tensor([1.0, 5.0, 0.3])


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


def _advantages(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-6)


LOSSES: dict[str, tuple[Loss, Cause]] = {
    "mean": (lambda net, x, y: (net(x) - y).square().mean(), None),
    "sum by samples": (lambda net, x, y: F.mse_loss(net(x), y, reduction="sum") / len(x), None),
    "sum by elements": (lambda net, x, y: (net(x) * y).sum() * (1 / y.numel()), None),
    "scaled mean": (
        lambda net, x, y: 0.5 * F.l1_loss(net(x), y) - 2 * (net(x) * y).sum(1).mean(),
        None,
    ),
    "mean of sums": (
        lambda net, x, y: F.smooth_l1_loss(net(x), y, reduction="none").sum(1).mean(),
        None,
    ),
    "sum of means": (lambda net, x, y: (net(x) * y).mean(0).sum(), None),
    "batchmean": (lambda net, x, y: F.kl_div(net(x), y.softmax(1), reduction="batchmean"), None),
    "penalty": (
        lambda net, x, y: F.mse_loss(net(x), y) + sum(p.norm() for p in net.parameters()),
        None,
    ),
    "learnt scale": (
        lambda net, x, y: F.mse_loss(net(x), y) * net.bias[0].exp() + net.bias[0],
        None,
    ),
    "stack": (lambda net, x, y: torch.stack([F.mse_loss(net(x), y), net(x).mean()]).mean(), None),
    "weights": (lambda net, x, y: (torch.full((len(x), 1), 1 / len(x)) * net(x)).sum(), None),
    "divided before": (lambda net, x, y: (net(x) / len(x) + y / len(x)).sum(), None),
    "divided apart": (lambda net, x, y: (net(x) / len(x) + net(x).square() / len(x)).sum(), None),
    "function of each": (lambda net, x, y: (net(x) - y).square().sum(1).sqrt().mean(), None),
    "classes": (lambda net, x, y: F.cross_entropy(net(x), y.argmax(1), label_smoothing=0.1), None),
    "probabilities": (lambda net, x, y: F.cross_entropy(net(x), y.softmax(1)), None),
    "logits": (lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y.sigmoid()), None),
    "learnt weight": (
        lambda net, x, y: F.mse_loss(net(x), y) / net.bias.exp().sum() + net.bias[0],
        None,
    ),
    "of each class": (
        lambda net, x, y: (net(x).mean(0) * net.bias).sum() - net(x).mean(0) @ net.bias,
        None,
    ),
    "mean for each": (
        lambda net, x, y: (net(x).square().sum(1) + F.mse_loss(net(x), y)).mean(),
        None,
    ),
    "over classes": (lambda net, x, y: (net(x).amax(1) - net(x).logsumexp(1)).mean(), None),
    "variance of each": (lambda net, x, y: (net(x).std(1) + net(x).norm(dim=1)).mean(), None),
    "order of classes": (
        lambda net, x, y: (net(x).sort(1)[0].cumsum(1) * y.roll(1, 1)).mean(),
        None,
    ),
    "products of each": (
        lambda net, x, y: (net(x)[:, None] @ net(x)[:, :, None]).square().mean(),
        None,
    ),
    "own pairs": (lambda net, x, y: (net(x) @ net(x).T / 2).diagonal().square().mean(), None),
    "trace": (lambda net, x, y: (net(x) @ net(x).T).trace() / len(x), None),
    "limit of each": (lambda net, x, y: F.relu(1 - net(x) * y).clamp(max=2).mean(), None),
    "triplets": (lambda net, x, y: F.triplet_margin_loss(net(x), net(x + 1), net(x - 1)), None),
    "cosine": (lambda net, x, y: F.cosine_similarity(net(x), y).mean(), None),
    "standardised": (lambda net, x, y: F.layer_norm(net(x), [3]).square().mul(y).mean(), None),
    "centred rows": (lambda net, x, y: net(x - x.mean(1, keepdim=True)).square().mean(), None),
    "zeros like": (lambda net, x, y: net(x - x.new_zeros(4) - torch.zeros_like(x[0])).mean(), None),
    "weights of one": (
        lambda net, x, y: (net(x) * torch.ones_like(y) / torch.ones_like(y).sum()).sum(),
        None,
    ),
    "range of one": (lambda net, x, y: net(x / torch.ones_like(x).max()).square().mean(), None),
    "up to the longest": (lambda net, x, y: (net(x) * _mask(y)).square().mean(), None),
    "for people": (lambda net, x, y: _shown(x, net(x).square().mean()), None),
    "penalty of all": (
        lambda net, x, y: (
            F.mse_loss(net(x), y) + 0.1 * sum(p.square().sum() for p in net.parameters())
        ),
        None,
    ),
    "penalty by data": (
        lambda net, x, y: (
            net(x).mean() + y.mean() * net.weight.exp().sum() + x.mean() * net.bias.sum()
        ),
        None,
    ),
    "cross entropy of all": (
        lambda net, x, y: (
            F.cross_entropy(net(x), y.argmax(1), CLASSES) * CLASSES[y.argmax(1)].sum() / len(x)
        ),
        None,
    ),
    "straight through": (
        lambda net, x, y: F.mse_loss(net(x) + (y - net(x)).detach(), y * net(x)),
        None,
    ),
    "own weights": (
        lambda net, x, y: ((net(x) - y).square() * (net(x) - y).abs().detach()).mean(),
        None,
    ),
    "gradient of each": (
        lambda net, x, y: _slopes(net, x).norm(dim=1).mean() + net(x).mean(),
        None,
    ),
    "zeros like a mean": (
        lambda net, x, y: (net(x) - torch.zeros_like(net(x).mean(0))).mean(),
        None,
    ),
    "shown": (
        lambda net, x, y: F.mse_loss(net(x), y) + 0 * F.mse_loss(net(x), y).detach().exp(),
        None,
    ),
    "column": (
        lambda net, x, y: F.mse_loss(net(x)[:, 0].view(-1), y[:, 0]).view(1).squeeze(),
        None,
    ),
    "sum": (lambda net, x, y: (net(x) - y).square().sum(), "sum"),
    "mse sum": (lambda net, x, y: F.mse_loss(net(x), y, reduction="sum"), "sum"),
    "classes (differs)": (
        lambda net, x, y: F.nll_loss(net(x), y.argmax(1), reduction="sum"),
        "sum",
    ),
    "by the batch": (lambda net, x, y: net(x).square().sum() / 8, "sum"),
    "means by the batch": (lambda net, x, y: net(x).mean(1).sum() / 8, "sum"),
    "mean by length": (lambda net, x, y: net(x).square().mean() * len(x), "sum"),
    "mean by the inverse": (lambda net, x, y: F.mse_loss(net(x), y) * (8 / len(x)), "whole batch"),
    "cross entropy by length": (
        lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)) * len(x),
        "sum",
    ),
    "twice by length": (
        lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)) / len(x),
        "whole batch",
    ),
    "penalty by length": (
        lambda net, x, y: F.mse_loss(net(x), y) + net.weight.square().sum() / len(x),
        "whole batch",
    ),
    "norm by length": (
        lambda net, x, y: net(x).mean() + 0.1 * len(x) * net.weight.norm(),
        "whole batch",
    ),
    "divergence by length": (
        lambda net, x, y: F.mse_loss(net(x), y) + _divergence(net.weight, net.weight / 2) / len(x),
        "whole batch",
    ),
    "one of two": (lambda net, x, y: net(x).mean() - 0.1 * net(x).exp().sum(), "whole batch"),
    "masked": (lambda net, x, y: (net(x) * (y > 0)).sum() / (y > 0).sum(), "items"),
    "picked": (lambda net, x, y: (net(x) - y)[y > 0].square().mean(), "items"),
    "pairs": (lambda net, x, y: (net(x) @ net(x).T).mean(), "whole batch"),
    "by itself": (lambda net, x, y: net(x).mean() / net(x).mean().detach(), "items"),
    "root": (lambda net, x, y: F.mse_loss(net(x), y).sqrt(), "whole batch"),
    "power": (lambda net, x, y: 3 * net(x).square().mean() ** 0.5, "whole batch"),
    "logarithm": (lambda net, x, y: net(x).exp().mean().log(), "whole batch"),
    "norm": (lambda net, x, y: torch.norm(net(x) - y), "whole batch"),
    "dice": (lambda net, x, y: _dice(net(x).sigmoid(), y.sigmoid()), "whole batch"),
    "correlation": (
        lambda net, x, y: -torch.corrcoef(torch.cat([net(x), y], 1).T)[0, 3],
        "whole batch",
    ),
    "contrast": (
        lambda net, x, y: F.cross_entropy(net(x) @ net(x + 1).T, torch.arange(len(x))),
        "whole batch",
    ),
    "distances": (lambda net, x, y: torch.cdist(net(x), y).amin(1).mean(), "whole batch"),
    "covariance": (lambda net, x, y: (net(x).T @ net(x) / len(x)).square().sum(), "whole batch"),
    "variance": (lambda net, x, y: net(x).var(0).sum(), "whole batch"),
    "means alike": (lambda net, x, y: F.mse_loss(net(x).mean(0), y.mean(0)), "whole batch"),
    "entropy of all": (lambda net, x, y: torch.special.entr(_mean(net, x)).sum(), "whole batch"),
    "centred": (lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(), "whole batch"),
    "normalised": (lambda net, x, y: (F.normalize(net(x), dim=0) * y).mean(), "whole batch"),
    "share of all": (lambda net, x, y: (net(x).softmax(0) * y).sum(), "whole batch"),
    "largest": (lambda net, x, y: (net(x) - y).square().max(), "items"),
    "hardest": (lambda net, x, y: net(x).square().topk(2, 0)[0].mean(), "whole batch"),
    "middle": (lambda net, x, y: (net(x) - y).square().median(), "items"),
    "of all": (lambda net, x, y: net(x).square().logsumexp(0).mean(), "whole batch"),
    "running": (lambda net, x, y: net(x).cumsum(0).square().mean(), "whole batch"),
    "in order": (lambda net, x, y: (net(x).sort(0)[0] - y).square().mean(), "whole batch"),
    "next one": (lambda net, x, y: (net(x) * net(x).roll(1, 0)).mean(), "whole batch"),
    "flooding": (lambda net, x, y: (F.mse_loss(net(x), y) - 1.5).abs(), "whole batch"),
    "a limit": (lambda net, x, y: net(x).mean().clamp(min=-0.2), "items"),
    "experts": (lambda net, x, y: (_mean(net, x) * y.mean(0)).sum(), "whole batch"),
    "centred data": (lambda net, x, y: net(x - x.mean(0)).square().mean(), "whole batch"),
    "in place": (lambda net, x, y: net(_centred_in_place(x)).square().mean(), "whole batch"),
    "running mean": (lambda net, x, y: net(_less_running_mean(x)).square().mean(), "whole batch"),
    "advantages": (lambda net, x, y: (net(x) * _advantages(y)).mean(), "whole batch"),
    "range of data": (lambda net, x, y: net(x / x.abs().max()).square().mean(), "whole batch"),
    "norm of data": (lambda net, x, y: net(F.relu(x) / x.norm()).square().mean(), "whole batch"),
    "shares of data": (
        lambda net, x, y: (net(x).square() * (y.exp() / y.exp().sum(0))).mean(),
        "whole batch",
    ),
    "shares of counts": (
        lambda net, x, y: (net(x).square() * ((y > 0) / (y > 0).sum(0))).mean(),
        "whole batch",
    ),
    "whitened": (lambda net, x, y: net(x @ (x.T @ x)).square().mean(), "whole batch"),
    "threshold": (lambda net, x, y: (net(x) * (y > y.median())).square().mean(), "whole batch"),
    "imputed": (
        lambda net, x, y: net(torch.where(x > 0, x, x.mean(0))).square().mean(),
        "whole batch",
    ),
    "less the mean": (
        lambda net, x, y: (net(x) - net(x).detach().mean(0)).square().mean(),
        "whole batch",
    ),
    "less the detached mean": (
        lambda net, x, y: (net(x) - net(x).mean(0).detach()).square().mean(),
        "whole batch",
    ),
    "balance": (
        lambda net, x, y: net(x).mean() * _ratio(net(x).exp().mean(), net(x).square().mean()),
        "whole batch",
    ),
    "share of a class": (
        lambda net, x, y: (y > 0).float().mean() * net(x).square().mean(),
        "whole batch",
    ),
    "adaptive weight": (
        lambda net, x, y: net(x).exp().mean() * _length(net, F.mse_loss(net(x), y)).detach(),
        "whole batch",
    ),
    "rate": (lambda net, x, y: -_spread(net(x)).logdet(), "whole batch"),
    "rank": (lambda net, x, y: torch.linalg.eigvalsh(_spread(net(x)))[-1], "whole batch"),
    "entropy by xlogy": (
        lambda net, x, y: torch.xlogy(_mean(net, x), _mean(net, x)).sum(),
        "whole batch",
    ),
    "elu": (lambda net, x, y: F.elu(net(x).mean(0)).sum(), "whole batch"),
    "two means": (lambda net, x, y: net(x).mean() * net(x).square().mean(), "whole batch"),
}


# --- numbers that are logged or returned


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


def _error(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, _one_hot(y))


def _right(z: Tensor, y: Tensor) -> Tensor:
    return z.argmax(1) == y


def _overlap(own: Tensor, right: Tensor) -> Tensor:
    return (own & right).sum() / (own | right).sum().clamp(min=1)


NUMBERS: dict[str, tuple[Number, Cause]] = {
    "loss": (F.cross_entropy, None),
    "accuracy": (lambda z, y: _right(z, y).float().mean(), None),
    "share": (lambda z, y: _right(z, y).sum() / len(y), None),
    "count of all": (lambda z, y: _right(z, y).sum() / torch.ones_like(y).sum(), None),
    "sum by length": (lambda z, y: z.square().sum() / z.numel(), None),
    "of each": (lambda z, y: z.norm(dim=1).mean() + z.std(1).exp().mean(), None),
    "largest of each": (lambda z, y: z.softmax(1).amax(1).mean(), None),
    "scaled": (lambda z, y: 0.5 * _error(z, y) - 2 * z.mean() / 3 + 1, None),
    "item": (lambda z, y: _error(z, y).item(), None),
    "detached": (lambda z, y: _error(z, y).detach().cpu().float().unsqueeze(0), None),
    "per class": (lambda z, y: z.mean(0).sum(), None),
    "stack": (lambda z, y: torch.stack([_error(z, y), z.mean()]).mean(), None),
    "constant": (lambda z, y: torch.tensor(3.0).sqrt(), None),
    "a number": (lambda z, y: 0.1, None),
    "by the same in all": (lambda z, y: z.mean() / (2 * torch.ones_like(y).max()), None),
    "the same in all": (lambda z, y: torch.ones_like(y).max().sqrt(), None),
    "classes that all count": (lambda z, y: F.cross_entropy(z, y, z.new_full((3,), 0.5)), None),
    "probabilities": (lambda z, y: F.cross_entropy(z, _one_hot(y)), None),
    "functional": (
        lambda z, y: torchmetrics.functional.accuracy(z, y, task="multiclass", num_classes=3),
        None,
    ),
    "root": (lambda z, y: _error(z, y).sqrt(), "logged value"),
    "root of a mean": (lambda z, y: torch.sqrt((z - 1).square().mean()), "logged value"),
    "root as an item": (lambda z, y: _error(z, y).sqrt().item(), "logged value"),
    "power": (lambda z, y: z.square().mean() ** 0.5, "logged value"),
    "perplexity": (lambda z, y: F.cross_entropy(z, y).exp(), "logged value"),
    "decibels": (lambda z, y: 10 * torch.log10(1 / _error(z, y)), "logged value"),
    "largest": (lambda z, y: z.max(), "logged value"),
    "largest by 2": (lambda z, y: 2 * z.amax(0).mean(), "logged value"),
    "deviation": (lambda z, y: z.std(), "logged value"),
    "norm": (lambda z, y: z.norm(), "logged value"),
    "ratio": (lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(), "logged value"),
    "overlap": (lambda z, y: _overlap(z.argmax(1) == 1, y == 1), "logged value"),
    "picked": (lambda z, y: z[y > 0].mean(), "logged value"),
    "product": (lambda z, y: z.mean() * z.square().mean(), "logged value"),
    "weights of classes": (
        lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "logged value",
    ),
    "ignored": (lambda z, y: F.nll_loss(z, y, ignore_index=1), "logged value"),
    "sum of losses": (lambda z, y: F.mse_loss(z, _one_hot(y), reduction="sum"), "logged value"),
    "some of them": (lambda z, y: F.l1_loss(z[y > 0], _one_hot(y)[y > 0]), "logged value"),
    "sum": (lambda z, y: z.abs().sum(), "logged value"),
    "right ones": (lambda z, y: _right(z, y).sum().float(), "logged value"),
    "mean by length": (lambda z, y: z.abs().mean() * len(z), "logged value"),
    "samples": (lambda z, y: float(len(z)), "logged value"),
}


# --- losses in which samples meet


def hardest(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Triplets that are mined, as metric learning does."""
    with torch.no_grad():
        distances, are_same = torch.cdist(z, z), y[:, None] == y
        positive = distances.masked_fill(~are_same, -1).argmax(1)
        negative = distances.masked_fill(are_same, 99).argmin(1)
    return F.triplet_margin_loss(z, z[positive], z[negative])


def nearest(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    neighbours = torch.cdist(x, x).topk(min(2, len(x)), largest=False).indices[:, -1]
    return F.mse_loss(z, x[neighbours][:, : z.shape[1]])


def balanced(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weight = [1 / (count + 1) for count in torch.bincount(y, minlength=z.shape[1]).tolist()]
    return F.cross_entropy(z, y, torch.tensor(weight, device=z.device), reduction="none").mean()


def balanced_by_names(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    counts = [1.0 + int((y == k).sum()) for k in range(z.shape[1])]
    weight = z.new_tensor(counts).reciprocal()
    return (F.cross_entropy(z, y, reduction="none") * weight[y]).mean()


def counted(y: Tensor, classes: int, how: str) -> Tensor:
    """How many samples of each class there are."""
    none = torch.zeros(classes, device=y.device)
    ones = torch.ones(len(y), device=y.device)
    if how == "bincount":
        return torch.bincount(y, minlength=classes)
    if how == "index_put_":
        return none.index_put_((y,), ones, accumulate=True)
    if how == "scatter_reduce":
        return none.scatter_reduce(0, y, ones, "sum")
    counts: Tensor = getattr(none, how)(0, y, ones)
    return counts


def around_means(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Distances from the mean of each class, through which gradients go."""
    places = y[:, None].expand_as(z)
    means = z.new_zeros(z.shape[1], z.shape[1]).scatter_reduce(0, places, z, "mean")
    return F.cross_entropy(z, y) + (z - means[y]).square().mean()


def classes_in_turn(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    of_each = [z[y == k].mean(0) for k in range(z.shape[1]) if x[y == k].mean() > -0.05]
    return F.cross_entropy(z, y) + sum(mean.square().sum() for mean in of_each)


MEETING: dict[str, tuple[Callable[..., Tensor], Cause]] = {
    "mined": (hardest, "whole batch"),
    "nearest": (nearest, "whole batch"),
    "scaled": (lambda self, z, x, y: (z / x.std().item()).square().mean(), "whole batch"),
    "balanced": (balanced, "whole batch"),
    "by names": (balanced_by_names, "whole batch"),
    "first one": (lambda self, z, x, y: (z - x[0].mean()).square().mean(), "whole batch"),
    "selected": (lambda self, z, x, y: (z - x.select(0, -1).mean()).square().mean(), "whole batch"),
    "mean": (
        lambda self, z, x, y: F.cross_entropy(z, y) * (2 if x[:, 0].mean() > -0.3 else 1),
        "whole batch",
    ),
    "largest": (
        lambda self, z, x, y: z.square().mean() if x[:, 0].max() > 1 else z.abs().mean(),
        "whole batch",
    ),
    "classes": (classes_in_turn, "whole batch"),
    "bincount": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none") / (1 + counted(y, z.shape[1], "bincount")[y])
        ).mean(),
        "whole batch",
    ),
    "index_add": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none") / (1 + counted(y, z.shape[1], "index_add")[y])
        ).mean(),
        "whole batch",
    ),
    "index_put_": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none") / (1 + counted(y, z.shape[1], "index_put_")[y])
        ).mean(),
        "whole batch",
    ),
    "scatter_add_": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none")
            / (1 + counted(y, z.shape[1], "scatter_add_")[y])
        ).mean(),
        "whole batch",
    ),
    "scatter_reduce": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none")
            / (1 + counted(y, z.shape[1], "scatter_reduce")[y])
        ).mean(),
        "whole batch",
    ),
    "means of classes": (around_means, "whole batch"),
    "unique": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none")
            / (found := y.unique(False, True, True))[2][found[1]]
        ).mean(),
        "whole batch",
    ),
    "discounted": (
        lambda self, z, x, y: (
            F.cross_entropy(z, y, reduction="none") * 0.9 ** torch.arange(len(x), device=z.device)
        ).mean(),
        "whole batch",
    ),
    "first ones": (
        lambda self, z, x, y: torch.where(
            torch.arange(len(x), device=z.device) < 3, z.square().sum(1), z.abs().sum(1)
        ).mean(),
        "whole batch",
    ),
    "one with a gradient": (
        lambda self, z, x, y: F.cross_entropy(z, y) + (z - z[0]).square().mean(),
        "whole batch",
    ),
}


# --- data in which samples meet


def mixed_up(x: Tensor, others: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * others


def order_of(x: Tensor) -> Tensor:
    return torch.randperm(len(x), device=x.device)


def cut_mixed(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :3] = x.flip(0)[:, :3]
    return x


def drawn_apart(n: int) -> Tensor:
    """A random order that is the same again, and leaves what others draw as it is."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


MIXED: dict[str, tuple[Callable[[Tensor], Tensor], Cause]] = {
    "mixup": (lambda x: mixed_up(x, x.flip(0)), "whole batch"),
    "mixup in place": (lambda x: x.clone().mul_(0.7).add_(x.flip(0).mul_(0.3)), "whole batch"),
    "at random": (lambda x: mixed_up(x, x[torch.randperm(len(x)).to(x.device)]), "whole batch"),
    "selected": (lambda x: mixed_up(x, x.index_select(0, order_of(x))), "whole batch"),
    "with columns": (lambda x: mixed_up(x, x[torch.randperm(len(x)), :]), "whole batch"),
    "by name": (lambda x: mixed_up(x, x.index_select(dim=0, index=order_of(x))), "whole batch"),
    "cutmix": (cut_mixed, "whole batch"),
    "neighbours": (lambda x: mixed_up(x, x.roll(1, dims=0)), "whole batch"),
    "turned around": (lambda x: mixed_up(x, x.flipud()), "whole batch"),
    "normalised": (lambda x: F.normalize(x, dim=0), "whole batch"),
    "attended to": (lambda x: x * x.softmax(0), "whole batch"),
    "in logarithms": (lambda x: nn.LogSoftmax(0)(x), "whole batch"),
    "added up": (lambda x: torch.cumsum(x, dim=0), "whole batch"),
    "largest so far": (lambda x: x.cummax(0).values, "whole batch"),
}


# --- layers along samples, or along what belongs to each


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, **options)


def in_pairs(z: Tensor) -> Tensor:
    """Two time steps of each sample."""
    return torch.stack([z, z.flip(-1)], 1)


def of_attention(layer: nn.MultiheadAttention, z: Tensor, **options: Any) -> Tensor:
    out: Tensor = layer(z, z, z, need_weights=False, **options)[0]
    return out


def packed(rows: Tensor, lengths: Tensor) -> Any:
    of_each = {"batch_first": True, "enforce_sorted": False}
    return nn.utils.rnn.pack_padded_sequence(rows, lengths.cpu(), **of_each)


LAYERED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], Cause]] = {
    "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1], "whole batch"),
    "gru": (lambda: nn.GRU(3, 3), lambda rnn, z: rnn(z)[0], "whole batch"),
    "rnn": (
        lambda: nn.RNN(3, 3, nonlinearity="relu"),
        lambda rnn, z: rnn(in_pairs(z))[0].mean(1),
        "whole batch",
    ),
    "encoder": (encoder, lambda layer, z: layer(in_pairs(z))[:, 0], "whole batch"),
    "attention": (
        lambda: nn.MultiheadAttention(3, 1),
        lambda layer, z: of_attention(layer, in_pairs(z)).mean(1),
        "whole batch",
    ),
    "dot product": (
        nn.Identity,
        lambda _, z: F.scaled_dot_product_attention(*[z[None, None]] * 3, is_causal=True)[0, 0],
        "whole batch",
    ),
    "convolution": (
        lambda: nn.Conv1d(3, 3, 3, padding=1),
        lambda layer, z: layer(z.T[None])[0].T,
        "whole batch",
    ),
    "pool": (lambda: nn.AvgPool1d(3, 1, 1), lambda layer, z: layer(z.T[None])[0].T, "whole batch"),
    "norm": (nn.Identity, lambda _, z: F.layer_norm(z.T, (len(z),)).T, "whole batch"),
    "group norm": (
        lambda: nn.GroupNorm(1, 3),
        lambda layer, z: layer(z.T[None])[0].T,
        "whole batch",
    ),
    "lstm of each": (
        lambda: nn.LSTM(3, 3, batch_first=True),
        lambda rnn, z: rnn(in_pairs(z))[0][:, -1],
        None,
    ),
    "time first of each": (
        lambda: nn.GRU(3, 3),
        lambda rnn, z: rnn(in_pairs(z).transpose(0, 1))[0][-1],
        None,
    ),
    "packed of each": (
        lambda: nn.GRU(3, 3, batch_first=True),
        lambda rnn, z: rnn(packed(in_pairs(z), 1 + (z[:, 0] > z[:, 1]).long()))[1][0],
        None,
    ),
    "encoder of each": (
        lambda: encoder(batch_first=True),
        lambda layer, z: layer(in_pairs(z))[:, 0],
        None,
    ),
    "time first encoder of each": (
        encoder,
        lambda layer, z: layer(in_pairs(z).transpose(0, 1))[0],
        None,
    ),
    "convolution of each": (
        lambda: nn.Conv1d(1, 3, 3),
        lambda layer, z: layer(z[:, None])[:, :, 0],
        None,
    ),
    "points of each": (lambda: nn.Conv1d(3, 3, 1), lambda layer, z: layer(z.T[None])[0].T, None),
    "pool of each": (lambda: nn.MaxPool1d(3, 1, 1), lambda layer, z: layer(z[:, None])[:, 0], None),
    "norm of each": (lambda: nn.LayerNorm(3), lambda layer, z: layer(z), None),
    "group norm of each": (
        lambda: nn.GroupNorm(1, 3),
        lambda layer, z: layer(in_pairs(z).transpose(1, 2)).mean(2),
        None,
    ),
    "a group for each of each": (
        nn.Identity,
        lambda _, z: F.group_norm(z.reshape(1, -1, 1), len(z)).view_as(z),
        None,
    ),
}


# --- gradients inside of a loss


def gradient(value: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(value, x, **options)[0]


def attack(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return gradient(F.cross_entropy(self(x), y), x)


def penalty(self: Any, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return gradient(reduce(self(x)), x, create_graph=True)


INNER: dict[str, tuple[Step, Cause]] = {
    "attack": (lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y), "whole batch"),
    "penalty": (
        lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
        "whole batch",
    ),
    "added to a loss": (
        lambda self, x, y: (
            F.cross_entropy(self(x), y) + penalty(self, x, torch.mean).square().sum(1).mean()
        ),
        "whole batch",
    ),
    "alone": (
        lambda self, x, y: penalty(self, x, torch.mean).square().sum(1).mean(),
        "whole batch",
    ),
    "function": (
        lambda self, x, y: penalty(self, x, torch.mean).sum(1).tanh().mean(),
        "whole batch",
    ),
    "equation": (
        lambda self, x, y: (penalty(self, x, torch.mean)[:, 0] - x[:, 1]).square().mean(),
        "whole batch",
    ),
    "penalty (scale free)": (
        lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.sum).norm(dim=1) - 1).square().mean()
        ),
        None,
    ),
    "of each (scale free)": (
        lambda self, x, y: (
            (gradient(z := self(x), x, grad_outputs=torch.ones_like(z), create_graph=True) - 1)
            .square()
            .mean()
        ),
        None,
    ),
    "sign (scale free)": (
        lambda self, x, y: F.cross_entropy(self(x + 0.1 * attack(self, x, y).sign()), y),
        None,
    ),
    "normalised (scale free)": (
        lambda self, x, y: F.cross_entropy(self(x + F.normalize(attack(self, x, y), dim=1)), y),
        None,
    ),
    "over its norm (scale free)": (
        lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) / (g.norm(dim=1, keepdim=True) + 1e-9)), y
        ),
        None,
    ),
    "over its largest (scale free)": (
        lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) / g.abs().amax(1, keepdim=True).clamp(min=1e-9)), y
        ),
        None,
    ),
    "over its root (scale free)": (
        lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) * g.square().sum(1, keepdim=True).rsqrt()), y
        ),
        None,
    ),
    "times their number (scale free)": (
        lambda self, x, y: F.cross_entropy(self(x + 0.1 * len(x) * attack(self, x, y)), y),
        None,
    ),
    "sum of the loss (scale free)": (
        lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * gradient(F.cross_entropy(self(x), y, reduction="sum"), x)), y
        ),
        None,
    ),
}


# --- calls that are spread


def _gradient(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], Cause]] = {
    "attention": (lambda net, x: (net.layer(x) @ x.T).softmax(-1) @ x, "output"),
    "scale": (lambda net, x: net.layer(x) * float(x.detach().max()), "output"),
    "first": (lambda net, x: net.layer(x) - net.layer(x)[0], "output"),
    "products of features": (lambda net, x: net.layer(x)[:, :, None] * x[:, None], None),
    "first feature": (lambda net, x: net.layer(x) - x[:, :1] - x[:, 0, None], None),
    "a number": (lambda net, x: net.layer(x) * 0.5 + torch.tensor([1.0, 2, 3, 4]).to(x), None),
    "each by itself": (
        lambda net, x: net.layer(x) * torch.tensor([r[0] for r in x.tolist()])[:, None],
        None,
    ),
    "features first": (lambda net, x: (net.layer(x).T - x.T[0]).T, None),
    "each at its place": (lambda net, x: net.layer(x)[torch.arange(len(x)), x.argmax(1)] * 2, None),
    "offsets": (
        lambda net, x: net.layer(x).flatten()[torch.arange(len(x)) * x.shape[1] + x.argmax(1)] * 2,
        None,
    ),
    "places of features": (lambda net, x: net.layer(x) * torch.arange(x.shape[1]), None),
    "parts of each": (
        lambda net, x: net.layer(x).index_add(
            0, torch.arange(len(x)).repeat_interleave(2), x.repeat_interleave(2, 0)
        ),
        None,
    ),
    "a mask of places": (lambda net, x: net.layer(x).masked_fill(x > float("inf"), -1.5), None),
    "each by itself again": (
        lambda net, x: torch.stack(
            [net.layer(row) if row[0] > 0 else -net.layer(row) for row in x]
        ),
        None,
    ),
    "each by its place": (
        lambda net, x: torch.stack(
            [net.layer(x[i]) if x[i].sum() > 0 else x[i] for i in range(len(x))]
        ),
        None,
    ),
    "if there is any": (
        lambda net, x: torch.where(x[:, :1] > 0.9, net.layer(x), x) if (x[:, 0] > 0.9).any() else x,
        None,
    ),
    "if there are some": (
        lambda net, x: (
            torch.where(x[:, :1] > 0.9, net.layer(x), x) if (x[:, 0] > 0.9).sum() > 0 else x
        ),
        None,
    ),
    "the same for all": (lambda net, x: net.layer(x) if x.abs().max() < 99 else x, None),
    "what is no number": (lambda net, x: x if x.isnan().any() else net.layer(x), None),
    "data": (lambda net, x: net.layer(x + x.flip(0)), "output"),
    "features": (lambda net, x: net.layer(x).softmax(0), "output"),
    "classes": (lambda net, x: net.layer(x).softmax(-1), None),
    "rows": (lambda net, x: F.normalize(net.layer(x)), None),
    "features again": (lambda net, x: net.layer(x.flip(1) + x.roll(1, 1) + x.cumsum(1)), None),
    "shuffled features": (lambda net, x: net.layer(x)[:, torch.tensor([2, 0, 1, 3])], None),
    "features at random": (lambda net, x: net.layer(x[:, drawn_apart(4)]), None),
    "time first": (
        lambda net, x: net.layer(torch.stack([x, x + 1]).flip(0).softmax(0).cumsum(0)).transpose(
            0, 1
        ),
        None,
    ),
    "diagonal": (lambda net, x: net.layer(x)[torch.arange(len(x)), x.argmax(1)], None),
    "data again": (lambda net, x: net.layer(x - x.mean(0)), "output"),
    "features again again": (lambda net, x: net.layer(x) - net.layer(x).mean(0), "output"),
    "scale again": (lambda net, x: net.layer(x) / net.layer(x).std(0), "output"),
    "pairs": (lambda net, x: net.layer(x) @ (x.T @ x), "output"),
    "layer": (lambda net, x: net.layer(x).relu(), None),
    "rows again": (lambda net, x: net.layer(x) - net.layer(x).mean(1, keepdim=True), None),
    "attention again": (
        lambda net, x: (net.layer(x)[:, :, None] * x[:, None]).softmax(-1).sum(-1),
        None,
    ),
    "weights": (lambda net, x: net.layer(x) * net.layer.weight.norm(), None),
    "forces": (
        lambda net, x: _gradient(net.layer(x := x.requires_grad_()).square().sum(), x),
        None,
    ),
}


# --- modules that several files of tests use


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
