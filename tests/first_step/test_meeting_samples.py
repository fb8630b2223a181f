"""Pairs of samples, one sample for all, and numbers that went through the host are told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ByHand, Classifier, run
from test_relations import (
    check_that_a_call_is_not_told,
    check_that_a_call_is_told,
    check_that_a_fit_is_told,
    found,
    traced,
)
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.parallel.additive.relations import A_NUMBER, PAIRS, Related, related

pytestmark = pytest.mark.usefixtures("one_thread")


class Meeting(Classifier):
    """As people write it who know one device."""

    def meets(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.meets(self.net(x), x, y)


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


MEETING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mined": (hardest, "got cdist of pairs of samples, which has"),
    "nearest": (nearest, "got cdist of pairs of samples, which has"),
    "scaled": (
        lambda self, z, x, y: (z / x.std().item()).square().mean(),
        "got div of a number that is another one in each shard, which has",
    ),
    "balanced": (balanced, "got cross_entropy of samples and of numbers of the shard's own, which"),
    "by names": (balanced_by_names, "got __getitem__ of samples and of numbers of the shard's own"),
    "first one": (
        lambda self, z, x, y: (z - x[0].mean()).square().mean(),
        "got sub of samples and of one of them, which has",
    ),
    "selected": (
        lambda self, z, x, y: (z - x.select(0, -1).mean()).square().mean(),
        "got sub of samples and of one of them, which has",
    ),
}


def meeting(name: str, *bases: type) -> Any:
    return type("Meets", (*bases, Meeting), {"meets": MEETING[name][0]})


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", MEETING)
def test_a_fit_whose_samples_meet_is_told_once_and_is_not_one_devices(name: str) -> None:
    check_that_a_fit_is_told(meeting(name), MEETING[name][1])


def test_in_manual_optimisation_too() -> None:
    with pytest.warns(UserWarning, match="cdist of pairs of samples"):
        run(meeting("mined", ByHand), 3)


# --- what only looks like it ----------------------------------------------------------------------

OF_SHARDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "attention": (lambda net, x: (net.layer(x) @ x.T).softmax(-1) @ x, "matmul of pairs of"),
    "scale": (lambda net, x: net.layer(x) * float(x.detach().max()), "mul of a number that"),
    "first": (lambda net, x: net.layer(x) - net.layer(x)[0], "sub of samples and of one of them"),
}
OF_EACH: dict[str, Callable[[Any, Tensor], Any]] = {
    "products of features": lambda net, x: net.layer(x)[:, :, None] * x[:, None],
    "first feature": lambda net, x: net.layer(x) - x[:, :1] - x[:, 0, None],
    "a number": lambda net, x: net.layer(x) * 0.5 + torch.tensor([1.0, 2, 3, 4]).to(x),
    "each by itself": lambda net, x: (
        net.layer(x) * torch.tensor([r[0] for r in x.tolist()])[:, None]
    ),
    "features first": lambda net, x: (net.layer(x).T - x.T[0]).T,
    "a mask of places": lambda net, x: net.layer(x).masked_fill(x > float("inf"), -1.5),
}


@pytest.mark.parametrize("name", OF_SHARDS)
def test_a_call_in_which_samples_meet_is_told_and_is_not_one_devices(name: str) -> None:
    check_that_a_call_is_told(*OF_SHARDS[name])


@pytest.mark.parametrize("name", OF_EACH)
def test_a_call_that_looks_like_it_is_as_on_one_device_and_is_not_told(name: str) -> None:
    check_that_a_call_is_not_told(OF_EACH[name])


def whole(step: Callable[[Tensor], Tensor], x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The loss that shards give together."""
    losses = [step(shard) * len(shard) / len(x) for shard in x.split(list(sizes))]
    return torch.stack(losses).sum()


def reading(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A step that gives the host a value first, as logs do."""

    def read(x: Tensor) -> Tensor:
        x.max().item()
        return step(x)

    return read


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.square().sum() / float(len(x)),
        lambda x: x.square().sum() * (1 / len(x)),
        lambda x: (x.square() * 0.5).mean(),
        lambda x: x.masked_fill(x > 0, float("nan")).nanmean(1).nan_to_num(0.0).mean(),
    ],
    ids=["over the size", "times its inverse", "the same", "nan"],
)
def test_numbers_of_a_mean_over_samples_are_not_told(step: Any) -> None:
    assert found(reading(step)) is None
    x = torch.randn(5, 4)
    torch.testing.assert_close(whole(step, x, (3, 2)), step(x))


def drawn(kind: str) -> float:
    if kind == "torch":
        return torch.rand(()).item()
    return random.random() if kind == "random" else float(np.random.random())


@pytest.mark.parametrize("kind", ["random", "numpy", "torch"])
def test_numbers_that_each_replica_draws_are_not_told(kind: str) -> None:
    """Random numbers are each shard's own, as a guide says."""
    assert found(reading(lambda x: (x * drawn(kind)).mean())) is None
    assert found(reading(lambda x: (x * torch.tensor([drawn(kind)])).mean())) is None
    assert found(lambda x: (x * drawn(kind)).mean()) is None


def test_weights_by_how_often_a_value_occurs_are_told() -> None:
    def weighted(x: Tensor) -> Tensor:
        _, which, counts = (x[:, 0] > 0).long().unique(return_inverse=True, return_counts=True)
        return (x.square().mean(1) * (1 / counts)[which]).sum()

    assert found(weighted, (9, 7)) == Related("unique", "__getitem__")


def test_pairs_are_told_where_they_are_made() -> None:
    assert found(lambda x: torch.cdist(x, x).sum()) == Related(PAIRS, "cdist")
    assert found(lambda x: (x[:, None, 0] - x[None, :, 0]).abs().mean()) == Related(PAIRS, "sub")
    assert found(lambda x: torch.cat([x, x]).mm(torch.cat([x, x]).T).sum()) == Related(PAIRS, "mm")


def test_dimensions_of_one_length_that_were_there_before_are_no_pairs() -> None:
    """As of a batch that is padded to as many places as it has samples."""

    def step(x: Tensor) -> Tensor:
        return (x * 2).square().mean(1).mean()

    sizes = (3, 2)
    traces, losses = zip(*[traced(step, torch.randn(n, n)) for n in sizes], strict=True)
    assert related(traces, [[loss] for loss in losses], sizes) is None


def test_equally_many_picked_samples_of_each_shard_are_none_that_all_others_meet() -> None:
    """As those that go to an expert."""

    def step(x: Tensor) -> Tensor:
        mine = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, mine, 2 * x[mine])

    shards = [torch.randn(n, 4).abs() * torch.tensor([[1]] + [[-1]] * (n - 1)) for n in (3, 2)]
    traces, results = zip(*[traced(step, shard) for shard in shards], strict=True)
    assert related(traces, [[result] for result in results], (3, 2), with_gradient=True) is None


def test_clusters_and_graphs_are_no_pairs() -> None:
    """Samples of a few parts each, which are put together by their numbers."""

    def pooled(x: Tensor) -> Tensor:
        parts, which = x.repeat_interleave(2, 0), torch.arange(len(x)).repeat_interleave(2)
        is_in = (which + 0 * parts[:, 0].long())[:, None] == torch.arange(len(x))
        return (is_in.float().T @ parts).square().mean(1).mean()

    assert found(pooled) is None


def test_a_number_is_told_where_it_is_used() -> None:
    assert found(lambda x: (x * x.max().item()).mean()) == Related(A_NUMBER, "mul")
    assert found(lambda x: x.clamp(max=float(x.mean())).mean()) == Related(A_NUMBER, "clamp")

    def logged(x: Tensor) -> Tensor:
        torch.ones(()) * x.max().item()
        (x * x.max().item()).sum()
        return x.mean()

    assert found(logged) is None, "the result does not come of it"
