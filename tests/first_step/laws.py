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
        "batchmean": lambda z, net, x, y: F.kl_div(z, y.softmax(1), reduction="batchmean"),
        "penalty": lambda z, net, x, y: F.mse_loss(z, y) + sum(p.norm() for p in net.parameters()),
        "learnt scale": lambda z, net, x, y: F.mse_loss(z, y) * net.bias[0].exp() + net.bias[0],
        "weights": lambda z, net, x, y: (torch.full((len(x), 1), 1 / len(x)) * z).sum(),
        "function of each": lambda z, net, x, y: (z - y).square().sum(1).sqrt().mean(),
        "classes": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1), label_smoothing=0.1),
        "own pairs": lambda z, net, x, y: (z @ z.T / 2).diagonal().square().mean(),
        "triplets": lambda z, net, x, y: F.triplet_margin_loss(z, net(x + 1), net(x - 1)),
        "standardised": lambda z, net, x, y: F.layer_norm(z, [3]).square().mul(y).mean(),
        "straight through": lambda z, net, x, y: F.mse_loss(z + (y - z).detach(), y * z),
        "column": lambda z, net, x, y: F.mse_loss(z[:, 0].view(-1), y[:, 0]).view(1).squeeze(),
    },
    "sum": {
        "sum": lambda z, net, x, y: (z - y).square().sum(),
        "classes (differs)": lambda z, net, x, y: F.nll_loss(z, y.argmax(1), reduction="sum"),
        "mean by length": lambda z, net, x, y: z.square().mean() * len(x),
    },
    "whole batch": {
        "mean by the inverse": lambda z, net, x, y: F.mse_loss(z, y) * (8 / len(x)),
        "one of two": lambda z, net, x, y: z.mean() - 0.1 * z.exp().sum(),
        "pairs": lambda z, net, x, y: (z @ z.T).mean(),
        "root": lambda z, net, x, y: F.mse_loss(z, y).sqrt(),
        "dice": lambda z, net, x, y: _dice(z.sigmoid(), y.sigmoid()),
        "contrast": lambda z, net, x, y: F.cross_entropy(z @ net(x + 1).T, torch.arange(len(x))),
        "running": lambda z, net, x, y: z.cumsum(0).square().mean(),
        "flooding": lambda z, net, x, y: (F.mse_loss(z, y) - 1.5).abs(),
        "centred data": lambda z, net, x, y: net(x - x.mean(0)).square().mean(),
        "advantages": lambda z, net, x, y: (z * _advantages(y)).mean(),
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
        "largest": lambda z, y: z.max(),
        "deviation": lambda z, y: z.std(),
        "ratio": lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(),
        "weights of classes": lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "ignored": lambda z, y: F.nll_loss(z, y, ignore_index=1),
        "sum": lambda z, y: z.abs().sum(),
        "samples": lambda z, y: float(len(z)),
    },
}


# --- losses in which samples meet


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


MEETING: dict[Cause, dict[str, Callable[..., Tensor]]] = {
    "whole batch": {
        "mined": hardest,
        "balanced": balanced,
    },
}


# --- data in which samples meet


MIXED: dict[Cause, dict[str, Callable[[Tensor], Tensor]]] = {
    "whole batch": {
        "mixup": lambda x: 0.7 * x + 0.3 * x.flip(0),
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
        "time first of each": (
            lambda: nn.GRU(3, 3),
            lambda rnn, z: rnn(in_pairs(z).transpose(0, 1))[0][-1],
        ),
        "encoder of each": (
            lambda: encoder(batch_first=True),
            lambda layer, z: layer(in_pairs(z))[:, 0],
        ),
    },
    "whole batch": {
        "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1]),
        "attention": (
            lambda: nn.MultiheadAttention(3, 1),
            lambda layer, z: of_attention(layer, in_pairs(z)).mean(1),
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
    },
    "whole batch": {
        "attack": lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y),
        "penalty": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
    },
}


# --- calls that are spread


def _gradient(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


CALLS: dict[Cause, dict[str, Call]] = {
    None: {
        "each by itself": lambda z, net, x: z * torch.tensor([r[0] for r in x.tolist()])[:, None],
        "if there is any": lambda z, net, x: (
            torch.where(x[:, :1] > 0.9, z, x) if (x[:, 0] > 0.9).any() else x
        ),
        "the same for all": lambda z, net, x: z if x.abs().max() < 99 else x,
        "classes": lambda z, net, x: z.softmax(-1),
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
