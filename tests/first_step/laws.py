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
Loss = Callable[[Tensor, nn.Linear, Tensor, Tensor], Tensor]
Number = Callable[[Tensor, Tensor], Any]
Step = Callable[[Any, Tensor, Tensor], Tensor]
Call = Callable[[Tensor, Any, Tensor], Any]


# --- losses


def _dice(chosen: Tensor, right: Tensor) -> Tensor:
    return 1 - 2 * (chosen * right).sum() / (chosen.sum() + right.sum())


def _length(net: nn.Linear, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, net.weight, retain_graph=True)[0].norm()


def _advantages(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-6)


LOSSES: dict[Cause, dict[str, Loss]] = {
    None: {
        "mean": lambda z, net, x, y: (z - y).square().mean(),
        "sum by samples": lambda z, net, x, y: F.mse_loss(z, y, reduction="sum") / len(x),
        "sum by elements": lambda z, net, x, y: (z * y).sum() * (1 / y.numel()),
        "batchmean": lambda z, net, x, y: F.kl_div(z, y.softmax(1), reduction="batchmean"),
        "penalty": lambda z, net, x, y: F.mse_loss(z, y) + sum(p.norm() for p in net.parameters()),
        "learnt scale": lambda z, net, x, y: F.mse_loss(z, y) * net.bias[0].exp() + net.bias[0],
        "weights": lambda z, net, x, y: (torch.full((len(x), 1), 1 / len(x)) * z).sum(),
        "divided before": lambda z, net, x, y: (z / len(x) + y / len(x)).sum(),
        "function of each": lambda z, net, x, y: (z - y).square().sum(1).sqrt().mean(),
        "classes": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1), label_smoothing=0.1),
        "learnt weight": lambda z, net, x, y: F.mse_loss(z, y) / net.bias.exp().sum() + net.bias[0],
        "mean for each": lambda z, net, x, y: (z.square().sum(1) + F.mse_loss(z, y)).mean(),
        "variance of each": lambda z, net, x, y: (z.std(1) + z.norm(dim=1)).mean(),
        "own pairs": lambda z, net, x, y: (z @ z.T / 2).diagonal().square().mean(),
        "triplets": lambda z, net, x, y: F.triplet_margin_loss(z, net(x + 1), net(x - 1)),
        "cosine": lambda z, net, x, y: F.cosine_similarity(z, y).mean(),
        "standardised": lambda z, net, x, y: F.layer_norm(z, [3]).square().mul(y).mean(),
        "straight through": lambda z, net, x, y: F.mse_loss(z + (y - z).detach(), y * z),
        "column": lambda z, net, x, y: F.mse_loss(z[:, 0].view(-1), y[:, 0]).view(1).squeeze(),
    },
    "sum": {
        "sum": lambda z, net, x, y: (z - y).square().sum(),
        "mse sum": lambda z, net, x, y: F.mse_loss(z, y, reduction="sum"),
        "classes (differs)": lambda z, net, x, y: F.nll_loss(z, y.argmax(1), reduction="sum"),
        "by the batch": lambda z, net, x, y: z.square().sum() / 8,
        "mean by length": lambda z, net, x, y: z.square().mean() * len(x),
        "cross entropy by length": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1)) * len(x),
    },
    "whole batch": {
        "mean by the inverse": lambda z, net, x, y: F.mse_loss(z, y) * (8 / len(x)),
        "one of two": lambda z, net, x, y: z.mean() - 0.1 * z.exp().sum(),
        "pairs": lambda z, net, x, y: (z @ z.T).mean(),
        "root": lambda z, net, x, y: F.mse_loss(z, y).sqrt(),
        "dice": lambda z, net, x, y: _dice(z.sigmoid(), y.sigmoid()),
        "correlation": lambda z, net, x, y: -torch.corrcoef(torch.cat([z, y], 1).T)[0, 3],
        "contrast": lambda z, net, x, y: F.cross_entropy(z @ net(x + 1).T, torch.arange(len(x))),
        "distances": lambda z, net, x, y: torch.cdist(z, y).amin(1).mean(),
        "covariance": lambda z, net, x, y: (z.T @ z / len(x)).square().sum(),
        "variance": lambda z, net, x, y: z.var(0).sum(),
        "means alike": lambda z, net, x, y: F.mse_loss(z.mean(0), y.mean(0)),
        "centred": lambda z, net, x, y: (z - z.mean(0)).square().mean(),
        "share of all": lambda z, net, x, y: (z.softmax(0) * y).sum(),
        "hardest": lambda z, net, x, y: z.square().topk(2, 0)[0].mean(),
        "running": lambda z, net, x, y: z.cumsum(0).square().mean(),
        "next one": lambda z, net, x, y: (z * z.roll(1, 0)).mean(),
        "flooding": lambda z, net, x, y: (F.mse_loss(z, y) - 1.5).abs(),
        "centred data": lambda z, net, x, y: net(x - x.mean(0)).square().mean(),
        "advantages": lambda z, net, x, y: (z * _advantages(y)).mean(),
        "range of data": lambda z, net, x, y: net(x / x.abs().max()).square().mean(),
        "less the mean": lambda z, net, x, y: (z - z.detach().mean(0)).square().mean(),
        "adaptive weight": lambda z, net, x, y: (
            z.exp().mean() * _length(net, F.mse_loss(z, y)).detach()
        ),
    },
    "items": {
        "masked": lambda z, net, x, y: (z * (y > 0)).sum() / (y > 0).sum(),
        "picked": lambda z, net, x, y: (z - y)[y > 0].square().mean(),
        "by itself": lambda z, net, x, y: z.mean() / z.mean().detach(),
        "largest": lambda z, net, x, y: (z - y).square().max(),
        "middle": lambda z, net, x, y: (z - y).square().median(),
        "a limit": lambda z, net, x, y: z.mean().clamp(min=-0.2),
    },
}


# --- numbers that are logged or returned


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


def _error(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, _one_hot(y))


def _right(z: Tensor, y: Tensor) -> Tensor:
    return z.argmax(1) == y


NUMBERS: dict[Cause, dict[str, Number]] = {
    None: {
        "loss": F.cross_entropy,
        "accuracy": lambda z, y: _right(z, y).float().mean(),
        "share": lambda z, y: _right(z, y).sum() / len(y),
        "sum by length": lambda z, y: z.square().sum() / z.numel(),
        "of each": lambda z, y: z.norm(dim=1).mean() + z.std(1).exp().mean(),
        "largest of each": lambda z, y: z.softmax(1).amax(1).mean(),
        "item": lambda z, y: _error(z, y).item(),
        "detached": lambda z, y: _error(z, y).detach().cpu().float().unsqueeze(0),
        "constant": lambda z, y: torch.tensor(3.0).sqrt(),
        "a number": lambda z, y: 0.1,
        "functional": lambda z, y: torchmetrics.functional.accuracy(
            z, y, task="multiclass", num_classes=3
        ),
    },
    "logged value": {
        "root": lambda z, y: _error(z, y).sqrt(),
        "perplexity": lambda z, y: F.cross_entropy(z, y).exp(),
        "largest": lambda z, y: z.max(),
        "deviation": lambda z, y: z.std(),
        "norm": lambda z, y: z.norm(),
        "ratio": lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(),
        "picked": lambda z, y: z[y > 0].mean(),
        "weights of classes": lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "ignored": lambda z, y: F.nll_loss(z, y, ignore_index=1),
        "sum of losses": lambda z, y: F.mse_loss(z, _one_hot(y), reduction="sum"),
        "sum": lambda z, y: z.abs().sum(),
        "mean by length": lambda z, y: z.abs().mean() * len(z),
        "samples": lambda z, y: float(len(z)),
    },
}


# --- losses in which samples meet


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def hardest(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Triplets that are mined, as metric learning does."""
    with torch.no_grad():
        distances, are_same = torch.cdist(z, z), y[:, None] == y
        positive = distances.masked_fill(~are_same, -1).argmax(1)
        negative = distances.masked_fill(are_same, 99).argmin(1)
    return F.triplet_margin_loss(z, z[positive], z[negative])


def balanced(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weight = [1 / (count + 1) for count in torch.bincount(y, minlength=z.shape[1]).tolist()]
    return F.cross_entropy(z, y, torch.tensor(weight, device=z.device), reduction="none").mean()


def around_means(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Distances from the mean of each class, through which gradients go."""
    places = y[:, None].expand_as(z)
    means = z.new_zeros(z.shape[1], z.shape[1]).scatter_reduce(0, places, z, "mean")
    return F.cross_entropy(z, y) + (z - means[y]).square().mean()


def classes_in_turn(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    of_each = [z[y == k].mean(0) for k in range(z.shape[1]) if x[y == k].mean() > -0.05]
    return F.cross_entropy(z, y) + sum(mean.square().sum() for mean in of_each)


MEETING: dict[Cause, dict[str, Callable[..., Tensor]]] = {
    "whole batch": {
        "mined": hardest,
        "scaled": lambda z, x, y: (z / x.std().item()).square().mean(),
        "balanced": balanced,
        "first one": lambda z, x, y: (z - x[0].mean()).square().mean(),
        "classes": classes_in_turn,
        "bincount": lambda z, x, y: (each(z, y) / torch.bincount(y)[y]).mean(),
        "means of classes": around_means,
    },
}


# --- data in which samples meet


def mixed_up(x: Tensor, others: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * others


def cut_mixed(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :3] = x.flip(0)[:, :3]
    return x


MIXED: dict[Cause, dict[str, Callable[[Tensor], Tensor]]] = {
    "whole batch": {
        "mixup": lambda x: mixed_up(x, x.flip(0)),
        "at random": lambda x: mixed_up(x, x[torch.randperm(len(x)).to(x.device)]),
        "cutmix": cut_mixed,
        "normalised": lambda x: F.normalize(x, dim=0),
    },
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


LAYERED: dict[Cause, dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]]] = {
    None: {
        "lstm of each": (
            lambda: nn.LSTM(3, 3, batch_first=True),
            lambda rnn, z: rnn(in_pairs(z))[0][:, -1],
        ),
        "time first of each": (
            lambda: nn.GRU(3, 3),
            lambda rnn, z: rnn(in_pairs(z).transpose(0, 1))[0][-1],
        ),
        "encoder of each": (
            lambda: encoder(batch_first=True),
            lambda layer, z: layer(in_pairs(z))[:, 0],
        ),
        "norm of each": (lambda: nn.LayerNorm(3), lambda layer, z: layer(z)),
    },
    "whole batch": {
        "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1]),
        "attention": (
            lambda: nn.MultiheadAttention(3, 1),
            lambda layer, z: of_attention(layer, in_pairs(z)).mean(1),
        ),
        "convolution": (
            lambda: nn.Conv1d(3, 3, 3, padding=1),
            lambda layer, z: layer(z.T[None])[0].T,
        ),
        "norm": (nn.Identity, lambda _, z: F.layer_norm(z.T, (len(z),)).T),
    },
}


# --- gradients inside of a loss


def gradient(value: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(value, x, **options)[0]


def attack(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return gradient(F.cross_entropy(self(x), y), x)


def penalty(self: Any, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return gradient(reduce(self(x)), x, create_graph=True)


INNER: dict[Cause, dict[str, Step]] = {
    None: {
        "penalty (scale free)": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.sum).norm(dim=1) - 1).square().mean()
        ),
        "normalised (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + F.normalize(attack(self, x, y), dim=1)), y
        ),
        "times their number (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * len(x) * attack(self, x, y)), y
        ),
    },
    "whole batch": {
        "attack": lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y),
        "penalty": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
        "alone": lambda self, x, y: penalty(self, x, torch.mean).square().sum(1).mean(),
    },
}


# --- calls that are spread


def _gradient(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


CALLS: dict[Cause, dict[str, Call]] = {
    None: {
        "each by itself": lambda z, net, x: z * torch.tensor([r[0] for r in x.tolist()])[:, None],
        "each at its place": lambda z, net, x: z[torch.arange(len(x)), x.argmax(1)] * 2,
        "a mask of places": lambda z, net, x: z.masked_fill(x > float("inf"), -1.5),
        "each by itself again": lambda z, net, x: torch.stack(
            [net.layer(row) if row[0] > 0 else -net.layer(row) for row in x]
        ),
        "if there is any": lambda z, net, x: (
            torch.where(x[:, :1] > 0.9, z, x) if (x[:, 0] > 0.9).any() else x
        ),
        "the same for all": lambda z, net, x: z if x.abs().max() < 99 else x,
        "classes": lambda z, net, x: z.softmax(-1),
        "rows": lambda z, net, x: F.normalize(z),
        "time first": lambda z, net, x: net.layer(
            torch.stack([x, x + 1]).flip(0).softmax(0).cumsum(0)
        ).transpose(0, 1),
        "weights": lambda z, net, x: z * net.layer.weight.norm(),
        "forces": lambda z, net, x: _gradient(net.layer(x := x.requires_grad_()).square().sum(), x),
    },
    "output": {
        "attention": lambda z, net, x: (z @ x.T).softmax(-1) @ x,
        "scale": lambda z, net, x: z * float(x.detach().max()),
        "first": lambda z, net, x: z - z[0],
        "data": lambda z, net, x: net.layer(x + x.flip(0)),
        "features": lambda z, net, x: z.softmax(0),
        "pairs": lambda z, net, x: z @ (x.T @ x),
    },
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
