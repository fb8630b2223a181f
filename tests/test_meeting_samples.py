"""Pairs of samples, one sample for all, and numbers that went through the host are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, run
from test_relations import Called, alone, found, told_of
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.parallel.gradients.relations import A_NUMBER, PAIRS, Related

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
    make, text = meeting(name), MEETING[name][1]
    with pytest.warns(UserWarning) as records:
        several = run(make, 3)
    told = [str(each.message) for each in records if "training_step: expected" in str(each.message)]
    assert [text in message for message in told] == [True]
    one = run(make, 1)
    assert not torch.allclose(several.module.net[0].weight.cpu(), one.module.net[0].weight)


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
    does, text = OF_SHARDS[name]
    result, told = told_of(Called(does))
    assert [text in message for message in told] == [True]
    assert not torch.equal(result, alone(Called(does)))


@pytest.mark.parametrize("name", OF_EACH)
def test_a_call_that_looks_like_it_is_as_on_one_device_and_is_not_told(name: str) -> None:
    result, told = told_of(Called(OF_EACH[name]))
    assert not told
    torch.testing.assert_close(result, alone(Called(OF_EACH[name])))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.square().sum() / float(len(x)),
        lambda x: x.square().sum() * (1 / len(x)),
        lambda x: x.square().mean() * (0.1 * len(x)),
        lambda x: (x * float("nan")).sum(),
        lambda x: (x + torch.tensor(float(len(x)))).sum(),
    ],
    ids=["over the size", "times its inverse", "in proportion to it", "nan", "as a tensor"],
)
def test_numbers_that_follow_from_the_sizes_of_shards_are_not_told(step: Any) -> None:
    assert found(step) is None


def test_pairs_are_told_where_they_are_made() -> None:
    assert found(lambda x: torch.cdist(x, x).sum()) == Related(PAIRS, "cdist")
    assert found(lambda x: (x[:, None, 0] - x[None, :, 0]).abs().mean()) == Related(PAIRS, "sub")
    assert found(lambda x: torch.cat([x, x]).mm(torch.cat([x, x]).T).sum()) == Related(PAIRS, "mm")


def test_dimensions_of_one_length_that_were_there_before_are_no_pairs() -> None:
    """As a batch that is padded to as many places as it has samples."""

    def step(x: Tensor) -> Tensor:
        return x.new_zeros(len(x), len(x)).add(1).sum() + x.sum()

    assert found(step) is None


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
