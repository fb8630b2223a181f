"""The law table of the first-step check: what a user may write, and the cause that it names.

Each row is a piece of a training step, a number to log, an output or a call as people write it who
know one device, under the cause that the check names for it; None where shards give the numbers of
one device. Tables differ in where the piece stands: `LOSSES` in a loss of outputs and targets,
`NUMBERS` in `self.log` and an output, `MEETING`, `MIXED`, `LAYERED` and `INNER` in a classifier's
loss, its data, a layer of it and a loss with gradients inside, `CALLS` in a module's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cause: TypeAlias = str | None
Table: TypeAlias = dict[Cause, dict[str, Any]]
DIFFERS = "logged value"


# --- losses


def _dice(chosen: Tensor, right: Tensor) -> Tensor:
    return 1 - 2 * (chosen * right).sum() / (chosen.sum() + right.sum())


def _mean(net: nn.Linear, x: Tensor) -> Tensor:
    return net(x).softmax(1).mean(0)


LOSSES: Table = {
    None: {
        "mean": lambda net, x, y: (net(x) - y).square().mean(),
        "sum by samples": lambda net, x, y: F.mse_loss(net(x), y, reduction="sum") / len(x),
        "sum of means": lambda net, x, y: (net(x) * y).mean(0).sum(),
        "batchmean": lambda net, x, y: F.kl_div(net(x), y.softmax(1), reduction="batchmean"),
        "penalty": lambda net, x, y: (
            F.mse_loss(net(x), y) + sum(p.norm() for p in net.parameters())
        ),
        "learnt scale": lambda net, x, y: F.mse_loss(net(x), y) * net.bias[0].exp() + net.bias[0],
        "stack": lambda net, x, y: torch.stack([F.mse_loss(net(x), y), net(x).mean()]).mean(),
        "weights": lambda net, x, y: (torch.full((len(x), 1), 1 / len(x)) * net(x)).sum(),
        "divided apart": lambda net, x, y: (net(x) / len(x) + net(x).square() / len(x)).sum(),
        "classes": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1), label_smoothing=0.1),
        "mean for each": lambda net, x, y: (net(x).square().sum(1) + F.mse_loss(net(x), y)).mean(),
        "over classes": lambda net, x, y: (net(x).amax(1) - net(x).logsumexp(1)).mean(),
        "variance of each": lambda net, x, y: (net(x).std(1) + net(x).norm(dim=1)).mean(),
        "order of classes": lambda net, x, y: (net(x).sort(1)[0].cumsum(1) * y.roll(1, 1)).mean(),
        "own pairs": lambda net, x, y: (net(x) @ net(x).T / 2).diagonal().square().mean(),
        "limit of each": lambda net, x, y: F.relu(1 - net(x) * y).clamp(max=2).mean(),
        "triplets": lambda net, x, y: F.triplet_margin_loss(net(x), net(x + 1), net(x - 1)),
        "cosine": lambda net, x, y: F.cosine_similarity(net(x), y).mean(),
        "standardised": lambda net, x, y: F.layer_norm(net(x), [3]).square().mul(y).mean(),
        "centred rows": lambda net, x, y: net(x - x.mean(1, keepdim=True)).square().mean(),
        "zeros like": lambda net, x, y: net(x - x.new_zeros(4) - torch.zeros_like(x[0])).mean(),
        "range of one": lambda net, x, y: net(x / torch.ones_like(x).max()).square().mean(),
        "shown": lambda net, x, y: F.mse_loss(net(x), y) + 0 * F.mse_loss(net(x), y).detach().exp(),
    },
    "sum": {
        "sum": lambda net, x, y: (net(x) - y).square().sum(),
        "classes (differs)": lambda net, x, y: F.nll_loss(net(x), y.argmax(1), reduction="sum"),
        "by the batch": lambda net, x, y: net(x).square().sum() / 8,
        "mean by length": lambda net, x, y: net(x).square().mean() * len(x),
    },
    "whole batch": {
        "mean by the inverse": lambda net, x, y: F.mse_loss(net(x), y) * (8 / len(x)),
        "twice by length": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)) / len(x),
        "norm by length": lambda net, x, y: net(x).mean() + 0.1 * len(x) * net.weight.norm(),
        "one of two": lambda net, x, y: net(x).mean() - 0.1 * net(x).exp().sum(),
        "pairs": lambda net, x, y: (net(x) @ net(x).T).mean(),
        "root": lambda net, x, y: F.mse_loss(net(x), y).sqrt(),
        "logarithm": lambda net, x, y: net(x).exp().mean().log(),
        "norm": lambda net, x, y: torch.norm(net(x) - y),
        "dice": lambda net, x, y: _dice(net(x).sigmoid(), y.sigmoid()),
        "correlation": lambda net, x, y: -torch.corrcoef(torch.cat([net(x), y], 1).T)[0, 3],
        "contrast": lambda net, x, y: F.cross_entropy(net(x) @ net(x + 1).T, torch.arange(len(x))),
        "distances": lambda net, x, y: torch.cdist(net(x), y).amin(1).mean(),
        "covariance": lambda net, x, y: (net(x).T @ net(x) / len(x)).square().sum(),
        "variance": lambda net, x, y: net(x).var(0).sum(),
        "means alike": lambda net, x, y: F.mse_loss(net(x).mean(0), y.mean(0)),
        "entropy of all": lambda net, x, y: torch.special.entr(_mean(net, x)).sum(),
        "centred": lambda net, x, y: (net(x) - net(x).mean(0)).square().mean(),
        "normalised": lambda net, x, y: (F.normalize(net(x), dim=0) * y).mean(),
        "share of all": lambda net, x, y: (net(x).softmax(0) * y).sum(),
        "hardest": lambda net, x, y: net(x).square().topk(2, 0)[0].mean(),
        "of all": lambda net, x, y: net(x).square().logsumexp(0).mean(),
        "running": lambda net, x, y: net(x).cumsum(0).square().mean(),
        "in order": lambda net, x, y: (net(x).sort(0)[0] - y).square().mean(),
        "next one": lambda net, x, y: (net(x) * net(x).roll(1, 0)).mean(),
        "flooding": lambda net, x, y: (F.mse_loss(net(x), y) - 1.5).abs(),
        "experts": lambda net, x, y: (_mean(net, x) * y.mean(0)).sum(),
        "advantages": lambda net, x, y: (net(x) * ((y - y.mean()) / (y.std() + 1e-6))).mean(),
        "range of data": lambda net, x, y: net(x / x.abs().max()).square().mean(),
        "norm of data": lambda net, x, y: net(F.relu(x) / x.norm()).square().mean(),
        "shares of data": lambda net, x, y: (net(x).square() * (y.exp() / y.exp().sum(0))).mean(),
        "whitened": lambda net, x, y: net(x @ (x.T @ x)).square().mean(),
        "threshold": lambda net, x, y: (net(x) * (y > y.median())).square().mean(),
        "imputed": lambda net, x, y: net(torch.where(x > 0, x, x.mean(0))).square().mean(),
        "less the mean": lambda net, x, y: (net(x) - net(x).detach().mean(0)).square().mean(),
        "share of a class": lambda net, x, y: (y > 0).float().mean() * net(x).square().mean(),
        "two means": lambda net, x, y: net(x).mean() * net(x).square().mean(),
    },
    "items": {
        "masked": lambda net, x, y: (net(x) * (y > 0)).sum() / (y > 0).sum(),
        "picked": lambda net, x, y: (net(x) - y)[y > 0].square().mean(),
        "by itself": lambda net, x, y: net(x).mean() / net(x).mean().detach(),
        "largest": lambda net, x, y: (net(x) - y).square().max(),
        "middle": lambda net, x, y: (net(x) - y).square().median(),
        "a limit": lambda net, x, y: net(x).mean().clamp(min=-0.2),
    },
}


# --- numbers that are logged and returned


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


def _error(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, _one_hot(y))


def _right(z: Tensor, y: Tensor) -> Tensor:
    return z.argmax(1) == y


def _overlap(own: Tensor, right: Tensor) -> Tensor:
    return (own & right).sum() / (own | right).sum().clamp(min=1)


NUMBERS: Table = {
    None: {
        "loss": F.cross_entropy,
        "accuracy": lambda z, y: _right(z, y).float().mean(),
        "share": lambda z, y: _right(z, y).sum() / len(y),
        "sum by length": lambda z, y: z.square().sum() / z.numel(),
        "of each": lambda z, y: z.norm(dim=1).mean() + z.std(1).exp().mean(),
        "largest of each": lambda z, y: z.softmax(1).amax(1).mean(),
        "scaled": lambda z, y: 0.5 * _error(z, y) - 2 * z.mean() / 3 + 1,
        "item": lambda z, y: _error(z, y).item(),
        "per class": lambda z, y: z.mean(0).sum(),
        "constant": lambda z, y: torch.tensor(3.0).sqrt(),
        "the same in all": lambda z, y: torch.ones_like(y).max().sqrt(),
        "classes that all count": lambda z, y: F.cross_entropy(z, y, z.new_full((3,), 0.5)),
        "probabilities": lambda z, y: F.cross_entropy(z, _one_hot(y)),
        # It differs with other data only: of the first nine samples none is found.
        "overlap": lambda z, y: _overlap(z.argmax(1) == 1, y == 1),
    },
    DIFFERS: {
        "root": lambda z, y: _error(z, y).sqrt(),
        "root as an item": lambda z, y: _error(z, y).sqrt().item(),
        "perplexity": lambda z, y: F.cross_entropy(z, y).exp(),
        "largest": lambda z, y: z.max(),
        "deviation": lambda z, y: z.std(),
        "norm": lambda z, y: z.norm(),
        "ratio": lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(),
        "picked": lambda z, y: z[y > 0].mean(),
        "product": lambda z, y: z.mean() * z.square().mean(),
        "weights of classes": lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "sum of losses": lambda z, y: F.mse_loss(z, _one_hot(y), reduction="sum"),
        "sum": lambda z, y: z.abs().sum(),
        "samples": lambda z, y: float(len(z)),
    },
}


# --- losses in which samples meet


def _each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def _counted(y: Tensor) -> Tensor:
    return torch.zeros(3).scatter_add_(0, y, torch.ones(len(y)))


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


MEETING: Table = {
    "whole batch": {
        "mined": hardest,
        "scaled": lambda z, x, y: (z / x.std().item()).square().mean(),
        "balanced": balanced,
        "first one": lambda z, x, y: (z - x[0].mean()).square().mean(),
        "mean": lambda z, x, y: F.cross_entropy(z, y) * (2 if x[:, 0].mean() > -0.3 else 1),
        "bincount": lambda z, x, y: (_each(z, y) / (1 + torch.bincount(y, minlength=3)[y])).mean(),
        "scatter_add_": lambda z, x, y: (_each(z, y) / (1 + _counted(y))[y]).mean(),
        "discounted": lambda z, x, y: (_each(z, y) * 0.9 ** torch.arange(len(x))).mean(),
        "first ones": lambda z, x, y: torch.where(
            torch.arange(len(x)) < 3, z.square().sum(1), z.abs().sum(1)
        ).mean(),
    },
}


# --- data in which samples meet


def _mixed(x: Tensor, others: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * others


def drawn_apart(n: int) -> Tensor:
    """A random order that is the same again, and leaves what others draw as it is."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


MIXED: Table = {
    "whole batch": {
        "mixup": lambda x: _mixed(x, x.flip(0)),
        "at random": lambda x: _mixed(x, x[torch.randperm(len(x))]),
        "selected": lambda x: _mixed(x, x.index_select(0, torch.randperm(len(x)))),
        "neighbours": lambda x: _mixed(x, x.roll(1, dims=0)),
        "turned around": lambda x: _mixed(x, x.flipud()),
        "normalised": lambda x: F.normalize(x, dim=0),
        "attended to": lambda x: x * x.softmax(0),
        "in logarithms": lambda x: nn.LogSoftmax(0)(x),
        "added up": lambda x: torch.cumsum(x, dim=0),
        "largest so far": lambda x: x.cummax(0).values,
    },
}


# --- layers along samples, or along what belongs to each


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, **options)


def in_pairs(z: Tensor) -> Tensor:
    """Two time steps of each sample."""
    return torch.stack([z, z.flip(-1)], 1)


def packed(rows: Tensor, lengths: Tensor) -> Any:
    of_each = {"batch_first": True, "enforce_sorted": False}
    return nn.utils.rnn.pack_padded_sequence(rows, lengths.cpu(), **of_each)


LAYERED: Table = {
    "whole batch": {
        "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1]),
        "encoder": (encoder, lambda layer, z: layer(in_pairs(z))[:, 0]),
        "dot product": (
            nn.Identity,
            lambda _, z: F.scaled_dot_product_attention(*[z[None, None]] * 3, is_causal=True)[0, 0],
        ),
        "convolution": (
            lambda: nn.Conv1d(3, 3, 3, padding=1),
            lambda layer, z: layer(z.T[None])[0].T,
        ),
        "group norm": (lambda: nn.GroupNorm(1, 3), lambda layer, z: layer(z.T[None])[0].T),
    },
    None: {
        "lstm of each": (
            lambda: nn.LSTM(3, 3, batch_first=True),
            lambda rnn, z: rnn(in_pairs(z))[0][:, -1],
        ),
        "packed of each": (
            lambda: nn.GRU(3, 3, batch_first=True),
            lambda rnn, z: rnn(packed(in_pairs(z), 1 + (z[:, 0] > z[:, 1]).long()))[1][0],
        ),
        "encoder of each": (
            lambda: encoder(batch_first=True),
            lambda layer, z: layer(in_pairs(z))[:, 0],
        ),
        "convolution of each": (
            lambda: nn.Conv1d(1, 3, 3),
            lambda layer, z: layer(z[:, None])[:, :, 0],
        ),
        "group norm of each": (
            lambda: nn.GroupNorm(1, 3),
            lambda layer, z: layer(in_pairs(z).transpose(1, 2)).mean(2),
        ),
    },
}


# --- gradients inside of a loss


def gradient(value: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(value, x, **options)[0]


def attack(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return gradient(F.cross_entropy(self(x), y), x)


def penalty(self: Any, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return gradient(reduce(self(x)), x, create_graph=True)


INNER: Table = {
    "whole batch": {
        "attack": lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y),
        "penalty": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
        "function": lambda self, x, y: penalty(self, x, torch.mean).sum(1).tanh().mean(),
    },
    None: {
        "penalty of each": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.sum).norm(dim=1) - 1).square().mean()
        ),
        "sign of each": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * attack(self, x, y).sign()), y
        ),
        "normalised of each": lambda self, x, y: F.cross_entropy(
            self(x + F.normalize(attack(self, x, y), dim=1)), y
        ),
        "times their number of each": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * len(x) * attack(self, x, y)), y
        ),
        "sum of the loss of each": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * gradient(F.cross_entropy(self(x), y, reduction="sum"), x)), y
        ),
    },
}


# --- calls that are spread

CALLS: Table = {
    "output": {
        "attention": lambda net, x: (net.layer(x) @ x.T).softmax(-1) @ x,
        "scale": lambda net, x: net.layer(x) * float(x.detach().max()),
        "first": lambda net, x: net.layer(x) - net.layer(x)[0],
        "data": lambda net, x: net.layer(x + x.flip(0)),
        "features": lambda net, x: net.layer(x).softmax(0),
        "pairs": lambda net, x: net.layer(x) @ (x.T @ x),
    },
    None: {
        "products of features": lambda net, x: net.layer(x)[:, :, None] * x[:, None],
        "a number": lambda net, x: net.layer(x) * 0.5 + torch.tensor([1.0, 2, 3, 4]).to(x),
        "each by itself": lambda net, x: (
            net.layer(x) * torch.tensor([r[0] for r in x.tolist()])[:, None]
        ),
        "features first": lambda net, x: (net.layer(x).T - x.T[0]).T,
        "each at its place": lambda net, x: net.layer(x)[torch.arange(len(x)), x.argmax(1)] * 2,
        "a mask of places": lambda net, x: net.layer(x).masked_fill(x > float("inf"), -1.5),
        "the same for all": lambda net, x: net.layer(x) if x.abs().max() < 99 else x,
        "what is no number": lambda net, x: x if x.isnan().any() else net.layer(x),
        "classes": lambda net, x: net.layer(x).softmax(-1),
        "rows": lambda net, x: F.normalize(net.layer(x)),
        "features again": lambda net, x: net.layer(x.flip(1) + x.roll(1, 1) + x.cumsum(1)),
        "shuffled features": lambda net, x: net.layer(x)[:, torch.tensor([2, 0, 1, 3])],
        "features at random": lambda net, x: net.layer(x[:, drawn_apart(4)]),
        "layer": lambda net, x: net.layer(x).relu(),
        "weights": lambda net, x: net.layer(x) * net.layer.weight.norm(),
        "forces": lambda net, x: gradient(
            net.layer(x := x.requires_grad_()).square().sum(), x, create_graph=True
        ),
    },
}
