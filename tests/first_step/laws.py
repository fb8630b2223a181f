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


LOSSES: dict[Cause, dict[str, Loss]] = {
    None: {
        "mean": lambda z, net, x, y: (z - y).square().mean(),
        "sum by samples": lambda z, net, x, y: F.mse_loss(z, y, reduction="sum") / len(x),
        "sum by elements": lambda z, net, x, y: (z * y).sum() * (1 / y.numel()),
        "scaled mean": lambda z, net, x, y: 0.5 * F.l1_loss(z, y) - 2 * (z * y).sum(1).mean(),
        "mean of sums": lambda z, net, x, y: F.smooth_l1_loss(z, y, reduction="none").sum(1).mean(),
        "sum of means": lambda z, net, x, y: (z * y).mean(0).sum(),
        "batchmean": lambda z, net, x, y: F.kl_div(z, y.softmax(1), reduction="batchmean"),
        "penalty": lambda z, net, x, y: F.mse_loss(z, y) + sum(p.norm() for p in net.parameters()),
        "learnt scale": lambda z, net, x, y: F.mse_loss(z, y) * net.bias[0].exp() + net.bias[0],
        "stack": lambda z, net, x, y: torch.stack([F.mse_loss(z, y), z.mean()]).mean(),
        "weights": lambda z, net, x, y: (torch.full((len(x), 1), 1 / len(x)) * z).sum(),
        "divided before": lambda z, net, x, y: (z / len(x) + y / len(x)).sum(),
        "divided apart": lambda z, net, x, y: (z / len(x) + z.square() / len(x)).sum(),
        "function of each": lambda z, net, x, y: (z - y).square().sum(1).sqrt().mean(),
        "classes": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1), label_smoothing=0.1),
        "probabilities": lambda z, net, x, y: F.cross_entropy(z, y.softmax(1)),
        "logits": lambda z, net, x, y: F.binary_cross_entropy_with_logits(z, y.sigmoid()),
        "learnt weight": lambda z, net, x, y: F.mse_loss(z, y) / net.bias.exp().sum() + net.bias[0],
        "of each class": lambda z, net, x, y: (z.mean(0) * net.bias).sum() - z.mean(0) @ net.bias,
        "mean for each": lambda z, net, x, y: (z.square().sum(1) + F.mse_loss(z, y)).mean(),
        "over classes": lambda z, net, x, y: (z.amax(1) - z.logsumexp(1)).mean(),
        "variance of each": lambda z, net, x, y: (z.std(1) + z.norm(dim=1)).mean(),
        "order of classes": lambda z, net, x, y: (z.sort(1)[0].cumsum(1) * y.roll(1, 1)).mean(),
        "products of each": lambda z, net, x, y: (z[:, None] @ z[:, :, None]).square().mean(),
        "own pairs": lambda z, net, x, y: (z @ z.T / 2).diagonal().square().mean(),
        "trace": lambda z, net, x, y: (z @ z.T).trace() / len(x),
        "limit of each": lambda z, net, x, y: F.relu(1 - z * y).clamp(max=2).mean(),
        "triplets": lambda z, net, x, y: F.triplet_margin_loss(z, net(x + 1), net(x - 1)),
        "cosine": lambda z, net, x, y: F.cosine_similarity(z, y).mean(),
        "standardised": lambda z, net, x, y: F.layer_norm(z, [3]).square().mul(y).mean(),
        "centred rows": lambda z, net, x, y: net(x - x.mean(1, keepdim=True)).square().mean(),
        "zeros like": lambda z, net, x, y: net(x - x.new_zeros(4) - torch.zeros_like(x[0])).mean(),
        "weights of one": lambda z, net, x, y: (
            z * torch.ones_like(y) / torch.ones_like(y).sum()
        ).sum(),
        "range of one": lambda z, net, x, y: net(x / torch.ones_like(x).max()).square().mean(),
        "up to the longest": lambda z, net, x, y: (z * _mask(y)).square().mean(),
        "for people": lambda z, net, x, y: _shown(x, z.square().mean()),
        "penalty of all": lambda z, net, x, y: (
            F.mse_loss(z, y) + 0.1 * sum(p.square().sum() for p in net.parameters())
        ),
        "penalty by data": lambda z, net, x, y: (
            z.mean() + y.mean() * net.weight.exp().sum() + x.mean() * net.bias.sum()
        ),
        "cross entropy of all": lambda z, net, x, y: (
            F.cross_entropy(z, y.argmax(1), CLASSES) * CLASSES[y.argmax(1)].sum() / len(x)
        ),
        "straight through": lambda z, net, x, y: F.mse_loss(z + (y - z).detach(), y * z),
        "own weights": lambda z, net, x, y: ((z - y).square() * (z - y).abs().detach()).mean(),
        "gradient of each": lambda z, net, x, y: _slopes(net, x).norm(dim=1).mean() + z.mean(),
        "zeros like a mean": lambda z, net, x, y: (z - torch.zeros_like(z.mean(0))).mean(),
        "shown": lambda z, net, x, y: F.mse_loss(z, y) + 0 * F.mse_loss(z, y).detach().exp(),
        "column": lambda z, net, x, y: F.mse_loss(z[:, 0].view(-1), y[:, 0]).view(1).squeeze(),
    },
    "sum": {
        "sum": lambda z, net, x, y: (z - y).square().sum(),
        "mse sum": lambda z, net, x, y: F.mse_loss(z, y, reduction="sum"),
        "classes (differs)": lambda z, net, x, y: F.nll_loss(z, y.argmax(1), reduction="sum"),
        "by the batch": lambda z, net, x, y: z.square().sum() / 8,
        "means by the batch": lambda z, net, x, y: z.mean(1).sum() / 8,
        "mean by length": lambda z, net, x, y: z.square().mean() * len(x),
        "cross entropy by length": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1)) * len(x),
    },
    "whole batch": {
        "mean by the inverse": lambda z, net, x, y: F.mse_loss(z, y) * (8 / len(x)),
        "twice by length": lambda z, net, x, y: F.cross_entropy(z, y.argmax(1)) / len(x),
        "penalty by length": lambda z, net, x, y: (
            F.mse_loss(z, y) + net.weight.square().sum() / len(x)
        ),
        "norm by length": lambda z, net, x, y: z.mean() + 0.1 * len(x) * net.weight.norm(),
        "divergence by length": lambda z, net, x, y: (
            F.mse_loss(z, y) + _divergence(net.weight, net.weight / 2) / len(x)
        ),
        "one of two": lambda z, net, x, y: z.mean() - 0.1 * z.exp().sum(),
        "pairs": lambda z, net, x, y: (z @ z.T).mean(),
        "root": lambda z, net, x, y: F.mse_loss(z, y).sqrt(),
        "power": lambda z, net, x, y: 3 * z.square().mean() ** 0.5,
        "logarithm": lambda z, net, x, y: z.exp().mean().log(),
        "norm": lambda z, net, x, y: torch.norm(z - y),
        "dice": lambda z, net, x, y: _dice(z.sigmoid(), y.sigmoid()),
        "correlation": lambda z, net, x, y: -torch.corrcoef(torch.cat([z, y], 1).T)[0, 3],
        "contrast": lambda z, net, x, y: F.cross_entropy(z @ net(x + 1).T, torch.arange(len(x))),
        "distances": lambda z, net, x, y: torch.cdist(z, y).amin(1).mean(),
        "covariance": lambda z, net, x, y: (z.T @ z / len(x)).square().sum(),
        "variance": lambda z, net, x, y: z.var(0).sum(),
        "means alike": lambda z, net, x, y: F.mse_loss(z.mean(0), y.mean(0)),
        "entropy of all": lambda z, net, x, y: torch.special.entr(_mean(net, x)).sum(),
        "centred": lambda z, net, x, y: (z - z.mean(0)).square().mean(),
        "normalised": lambda z, net, x, y: (F.normalize(z, dim=0) * y).mean(),
        "share of all": lambda z, net, x, y: (z.softmax(0) * y).sum(),
        "hardest": lambda z, net, x, y: z.square().topk(2, 0)[0].mean(),
        "of all": lambda z, net, x, y: z.square().logsumexp(0).mean(),
        "running": lambda z, net, x, y: z.cumsum(0).square().mean(),
        "in order": lambda z, net, x, y: (z.sort(0)[0] - y).square().mean(),
        "next one": lambda z, net, x, y: (z * z.roll(1, 0)).mean(),
        "flooding": lambda z, net, x, y: (F.mse_loss(z, y) - 1.5).abs(),
        "experts": lambda z, net, x, y: (_mean(net, x) * y.mean(0)).sum(),
        "centred data": lambda z, net, x, y: net(x - x.mean(0)).square().mean(),
        "in place": lambda z, net, x, y: net(_centred_in_place(x)).square().mean(),
        "running mean": lambda z, net, x, y: net(_less_running_mean(x)).square().mean(),
        "advantages": lambda z, net, x, y: (z * _advantages(y)).mean(),
        "range of data": lambda z, net, x, y: net(x / x.abs().max()).square().mean(),
        "norm of data": lambda z, net, x, y: net(F.relu(x) / x.norm()).square().mean(),
        "shares of data": lambda z, net, x, y: (z.square() * (y.exp() / y.exp().sum(0))).mean(),
        "shares of counts": lambda z, net, x, y: (z.square() * ((y > 0) / (y > 0).sum(0))).mean(),
        "whitened": lambda z, net, x, y: net(x @ (x.T @ x)).square().mean(),
        "threshold": lambda z, net, x, y: (z * (y > y.median())).square().mean(),
        "imputed": lambda z, net, x, y: net(torch.where(x > 0, x, x.mean(0))).square().mean(),
        "less the mean": lambda z, net, x, y: (z - z.detach().mean(0)).square().mean(),
        "less the detached mean": lambda z, net, x, y: (z - z.mean(0).detach()).square().mean(),
        "balance": lambda z, net, x, y: z.mean() * _ratio(z.exp().mean(), z.square().mean()),
        "share of a class": lambda z, net, x, y: (y > 0).float().mean() * z.square().mean(),
        "adaptive weight": lambda z, net, x, y: (
            z.exp().mean() * _length(net, F.mse_loss(z, y)).detach()
        ),
        "rate": lambda z, net, x, y: -_spread(z).logdet(),
        "rank": lambda z, net, x, y: torch.linalg.eigvalsh(_spread(z))[-1],
        "entropy by xlogy": lambda z, net, x, y: torch.xlogy(_mean(net, x), _mean(net, x)).sum(),
        "elu": lambda z, net, x, y: F.elu(z.mean(0)).sum(),
        "two means": lambda z, net, x, y: z.mean() * z.square().mean(),
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


def _overlap(own: Tensor, right: Tensor) -> Tensor:
    return (own & right).sum() / (own | right).sum().clamp(min=1)


NUMBERS: dict[Cause, dict[str, Number]] = {
    None: {
        "loss": F.cross_entropy,
        "accuracy": lambda z, y: _right(z, y).float().mean(),
        "share": lambda z, y: _right(z, y).sum() / len(y),
        "count of all": lambda z, y: _right(z, y).sum() / torch.ones_like(y).sum(),
        "sum by length": lambda z, y: z.square().sum() / z.numel(),
        "of each": lambda z, y: z.norm(dim=1).mean() + z.std(1).exp().mean(),
        "largest of each": lambda z, y: z.softmax(1).amax(1).mean(),
        "scaled": lambda z, y: 0.5 * _error(z, y) - 2 * z.mean() / 3 + 1,
        "item": lambda z, y: _error(z, y).item(),
        "detached": lambda z, y: _error(z, y).detach().cpu().float().unsqueeze(0),
        "per class": lambda z, y: z.mean(0).sum(),
        "stack": lambda z, y: torch.stack([_error(z, y), z.mean()]).mean(),
        "constant": lambda z, y: torch.tensor(3.0).sqrt(),
        "a number": lambda z, y: 0.1,
        "by the same in all": lambda z, y: z.mean() / (2 * torch.ones_like(y).max()),
        "the same in all": lambda z, y: torch.ones_like(y).max().sqrt(),
        "classes that all count": lambda z, y: F.cross_entropy(z, y, z.new_full((3,), 0.5)),
        "probabilities": lambda z, y: F.cross_entropy(z, _one_hot(y)),
        "functional": lambda z, y: torchmetrics.functional.accuracy(
            z, y, task="multiclass", num_classes=3
        ),
    },
    "logged value": {
        "root": lambda z, y: _error(z, y).sqrt(),
        "root of a mean": lambda z, y: torch.sqrt((z - 1).square().mean()),
        "root as an item": lambda z, y: _error(z, y).sqrt().item(),
        "power": lambda z, y: z.square().mean() ** 0.5,
        "perplexity": lambda z, y: F.cross_entropy(z, y).exp(),
        "decibels": lambda z, y: 10 * torch.log10(1 / _error(z, y)),
        "largest": lambda z, y: z.max(),
        "largest by 2": lambda z, y: 2 * z.amax(0).mean(),
        "deviation": lambda z, y: z.std(),
        "norm": lambda z, y: z.norm(),
        "ratio": lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(),
        "overlap": lambda z, y: _overlap(z.argmax(1) == 1, y == 1),
        "picked": lambda z, y: z[y > 0].mean(),
        "product": lambda z, y: z.mean() * z.square().mean(),
        "weights of classes": lambda z, y: F.cross_entropy(z, y, z.new_tensor([1.0, 5.0, 0.2])),
        "ignored": lambda z, y: F.nll_loss(z, y, ignore_index=1),
        "sum of losses": lambda z, y: F.mse_loss(z, _one_hot(y), reduction="sum"),
        "some of them": lambda z, y: F.l1_loss(z[y > 0], _one_hot(y)[y > 0]),
        "sum": lambda z, y: z.abs().sum(),
        "right ones": lambda z, y: _right(z, y).sum().float(),
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


def nearest(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    neighbours = torch.cdist(x, x).topk(min(2, len(x)), largest=False).indices[:, -1]
    return F.mse_loss(z, x[neighbours][:, : z.shape[1]])


def balanced(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weight = [1 / (count + 1) for count in torch.bincount(y, minlength=z.shape[1]).tolist()]
    return F.cross_entropy(z, y, torch.tensor(weight, device=z.device), reduction="none").mean()


def balanced_by_names(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    counts = [1.0 + int((y == k).sum()) for k in range(z.shape[1])]
    weight = z.new_tensor(counts).reciprocal()
    return (each(z, y) * weight[y]).mean()


def counts(z: Tensor, y: Tensor, how: str) -> Tensor:
    """How many samples each one's class has, and one more."""
    none, ones = torch.zeros(z.shape[1], device=y.device), torch.ones(len(y), device=y.device)
    ways: dict[str, Callable[[], Tensor]] = {
        "bincount": lambda: torch.bincount(y, minlength=z.shape[1]),
        "index_add": lambda: none.index_add(0, y, ones),
        "index_put_": lambda: none.index_put_((y,), ones, accumulate=True),
        "scatter_add_": lambda: none.scatter_add_(0, y, ones),
        "scatter_reduce": lambda: none.scatter_reduce(0, y, ones, "sum"),
    }
    return 1 + ways[how]()[y]


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
        "nearest": nearest,
        "scaled": lambda z, x, y: (z / x.std().item()).square().mean(),
        "balanced": balanced,
        "by names": balanced_by_names,
        "first one": lambda z, x, y: (z - x[0].mean()).square().mean(),
        "selected": lambda z, x, y: (z - x.select(0, -1).mean()).square().mean(),
        "mean": lambda z, x, y: F.cross_entropy(z, y) * (2 if x[:, 0].mean() > -0.3 else 1),
        "largest": lambda z, x, y: z.square().mean() if x[:, 0].max() > 1 else z.abs().mean(),
        "classes": classes_in_turn,
        "bincount": lambda z, x, y: (each(z, y) / counts(z, y, "bincount")).mean(),
        "index_add": lambda z, x, y: (each(z, y) / counts(z, y, "index_add")).mean(),
        "index_put_": lambda z, x, y: (each(z, y) / counts(z, y, "index_put_")).mean(),
        "scatter_add_": lambda z, x, y: (each(z, y) / counts(z, y, "scatter_add_")).mean(),
        "scatter_reduce": lambda z, x, y: (each(z, y) / counts(z, y, "scatter_reduce")).mean(),
        "means of classes": around_means,
        "unique": lambda z, x, y: (
            each(z, y) / (found := y.unique(False, True, True))[2][found[1]]
        ).mean(),
        "discounted": lambda z, x, y: (
            each(z, y) * 0.9 ** torch.arange(len(x), device=z.device)
        ).mean(),
        "first ones": lambda z, x, y: torch.where(
            torch.arange(len(x), device=z.device) < 3, z.square().sum(1), z.abs().sum(1)
        ).mean(),
        "one with a gradient": lambda z, x, y: F.cross_entropy(z, y) + (z - z[0]).square().mean(),
    },
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


MIXED: dict[Cause, dict[str, Callable[[Tensor], Tensor]]] = {
    "whole batch": {
        "mixup": lambda x: mixed_up(x, x.flip(0)),
        "mixup in place": lambda x: x.clone().mul_(0.7).add_(x.flip(0).mul_(0.3)),
        "at random": lambda x: mixed_up(x, x[torch.randperm(len(x)).to(x.device)]),
        "selected": lambda x: mixed_up(x, x.index_select(0, order_of(x))),
        "with columns": lambda x: mixed_up(x, x[torch.randperm(len(x)), :]),
        "by name": lambda x: mixed_up(x, x.index_select(dim=0, index=order_of(x))),
        "cutmix": cut_mixed,
        "neighbours": lambda x: mixed_up(x, x.roll(1, dims=0)),
        "turned around": lambda x: mixed_up(x, x.flipud()),
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


def of_attention(layer: nn.MultiheadAttention, z: Tensor, **options: Any) -> Tensor:
    out: Tensor = layer(z, z, z, need_weights=False, **options)[0]
    return out


def packed(rows: Tensor, lengths: Tensor) -> Any:
    of_each = {"batch_first": True, "enforce_sorted": False}
    return nn.utils.rnn.pack_padded_sequence(rows, lengths.cpu(), **of_each)


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
        "packed of each": (
            lambda: nn.GRU(3, 3, batch_first=True),
            lambda rnn, z: rnn(packed(in_pairs(z), 1 + (z[:, 0] > z[:, 1]).long()))[1][0],
        ),
        "encoder of each": (
            lambda: encoder(batch_first=True),
            lambda layer, z: layer(in_pairs(z))[:, 0],
        ),
        "time first encoder of each": (
            encoder,
            lambda layer, z: layer(in_pairs(z).transpose(0, 1))[0],
        ),
        "convolution of each": (
            lambda: nn.Conv1d(1, 3, 3),
            lambda layer, z: layer(z[:, None])[:, :, 0],
        ),
        "points of each": (lambda: nn.Conv1d(3, 3, 1), lambda layer, z: layer(z.T[None])[0].T),
        "pool of each": (lambda: nn.MaxPool1d(3, 1, 1), lambda layer, z: layer(z[:, None])[:, 0]),
        "norm of each": (lambda: nn.LayerNorm(3), lambda layer, z: layer(z)),
        "group norm of each": (
            lambda: nn.GroupNorm(1, 3),
            lambda layer, z: layer(in_pairs(z).transpose(1, 2)).mean(2),
        ),
        "a group for each of each": (
            nn.Identity,
            lambda _, z: F.group_norm(z.reshape(1, -1, 1), len(z)).view_as(z),
        ),
    },
    "whole batch": {
        "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1]),
        "gru": (lambda: nn.GRU(3, 3), lambda rnn, z: rnn(z)[0]),
        "rnn": (
            lambda: nn.RNN(3, 3, nonlinearity="relu"),
            lambda rnn, z: rnn(in_pairs(z))[0].mean(1),
        ),
        "encoder": (encoder, lambda layer, z: layer(in_pairs(z))[:, 0]),
        "attention": (
            lambda: nn.MultiheadAttention(3, 1),
            lambda layer, z: of_attention(layer, in_pairs(z)).mean(1),
        ),
        "dot product": (
            nn.Identity,
            lambda _, z: F.scaled_dot_product_attention(*[z[None, None]] * 3, is_causal=True)[0, 0],
        ),
        "convolution": (
            lambda: nn.Conv1d(3, 3, 3, padding=1),
            lambda layer, z: layer(z.T[None])[0].T,
        ),
        "pool": (lambda: nn.AvgPool1d(3, 1, 1), lambda layer, z: layer(z.T[None])[0].T),
        "norm": (nn.Identity, lambda _, z: F.layer_norm(z.T, (len(z),)).T),
        "group norm": (lambda: nn.GroupNorm(1, 3), lambda layer, z: layer(z.T[None])[0].T),
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
        "of each (scale free)": lambda self, x, y: (
            (gradient(z := self(x), x, grad_outputs=torch.ones_like(z), create_graph=True) - 1)
            .square()
            .mean()
        ),
        "sign (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * attack(self, x, y).sign()), y
        ),
        "normalised (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + F.normalize(attack(self, x, y), dim=1)), y
        ),
        "over its norm (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) / (g.norm(dim=1, keepdim=True) + 1e-9)), y
        ),
        "over its largest (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) / g.abs().amax(1, keepdim=True).clamp(min=1e-9)), y
        ),
        "over its root (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + (g := attack(self, x, y)) * g.square().sum(1, keepdim=True).rsqrt()), y
        ),
        "times their number (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * len(x) * attack(self, x, y)), y
        ),
        "sum of the loss (scale free)": lambda self, x, y: F.cross_entropy(
            self(x + 0.1 * gradient(F.cross_entropy(self(x), y, reduction="sum"), x)), y
        ),
    },
    "whole batch": {
        "attack": lambda self, x, y: F.cross_entropy(self(x + attack(self, x, y)), y),
        "penalty": lambda self, x, y: (
            F.cross_entropy(self(x), y)
            + (penalty(self, x, torch.mean).norm(dim=1) - 1).square().mean()
        ),
        "added to a loss": lambda self, x, y: (
            F.cross_entropy(self(x), y) + penalty(self, x, torch.mean).square().sum(1).mean()
        ),
        "alone": lambda self, x, y: penalty(self, x, torch.mean).square().sum(1).mean(),
        "function": lambda self, x, y: penalty(self, x, torch.mean).sum(1).tanh().mean(),
        "equation": lambda self, x, y: (
            (penalty(self, x, torch.mean)[:, 0] - x[:, 1]).square().mean()
        ),
    },
}


# --- calls that are spread


def _gradient(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


CALLS: dict[Cause, dict[str, Call]] = {
    None: {
        "products of features": lambda z, net, x: z[:, :, None] * x[:, None],
        "first feature": lambda z, net, x: z - x[:, :1] - x[:, 0, None],
        "a number": lambda z, net, x: z * 0.5 + torch.tensor([1.0, 2, 3, 4]).to(x),
        "each by itself": lambda z, net, x: z * torch.tensor([r[0] for r in x.tolist()])[:, None],
        "features first": lambda z, net, x: (z.T - x.T[0]).T,
        "each at its place": lambda z, net, x: z[torch.arange(len(x)), x.argmax(1)] * 2,
        "offsets": lambda z, net, x: (
            z.flatten()[torch.arange(len(x)) * x.shape[1] + x.argmax(1)] * 2
        ),
        "places of features": lambda z, net, x: z * torch.arange(x.shape[1]),
        "parts of each": lambda z, net, x: z.index_add(
            0, torch.arange(len(x)).repeat_interleave(2), x.repeat_interleave(2, 0)
        ),
        "a mask of places": lambda z, net, x: z.masked_fill(x > float("inf"), -1.5),
        "each by itself again": lambda z, net, x: torch.stack(
            [net.layer(row) if row[0] > 0 else -net.layer(row) for row in x]
        ),
        "each by its place": lambda z, net, x: torch.stack(
            [net.layer(x[i]) if x[i].sum() > 0 else x[i] for i in range(len(x))]
        ),
        "if there is any": lambda z, net, x: (
            torch.where(x[:, :1] > 0.9, z, x) if (x[:, 0] > 0.9).any() else x
        ),
        "if there are some": lambda z, net, x: (
            torch.where(x[:, :1] > 0.9, z, x) if (x[:, 0] > 0.9).sum() > 0 else x
        ),
        "the same for all": lambda z, net, x: z if x.abs().max() < 99 else x,
        "what is no number": lambda z, net, x: x if x.isnan().any() else z,
        "classes": lambda z, net, x: z.softmax(-1),
        "rows": lambda z, net, x: F.normalize(z),
        "features again": lambda z, net, x: net.layer(x.flip(1) + x.roll(1, 1) + x.cumsum(1)),
        "shuffled features": lambda z, net, x: z[:, torch.tensor([2, 0, 1, 3])],
        "features at random": lambda z, net, x: net.layer(x[:, drawn_apart(4)]),
        "time first": lambda z, net, x: net.layer(
            torch.stack([x, x + 1]).flip(0).softmax(0).cumsum(0)
        ).transpose(0, 1),
        "diagonal": lambda z, net, x: z[torch.arange(len(x)), x.argmax(1)],
        "layer": lambda z, net, x: z.relu(),
        "rows again": lambda z, net, x: z - z.mean(1, keepdim=True),
        "attention again": lambda z, net, x: (z[:, :, None] * x[:, None]).softmax(-1).sum(-1),
        "weights": lambda z, net, x: z * net.layer.weight.norm(),
        "forces": lambda z, net, x: _gradient(net.layer(x := x.requires_grad_()).square().sum(), x),
    },
    "output": {
        "attention": lambda z, net, x: (z @ x.T).softmax(-1) @ x,
        "scale": lambda z, net, x: z * float(x.detach().max()),
        "first": lambda z, net, x: z - z[0],
        "data": lambda z, net, x: net.layer(x + x.flip(0)),
        "features": lambda z, net, x: z.softmax(0),
        "data again": lambda z, net, x: net.layer(x - x.mean(0)),
        "features again again": lambda z, net, x: z - z.mean(0),
        "scale again": lambda z, net, x: z / z.std(0),
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
