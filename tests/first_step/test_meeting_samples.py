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
    Called,
    check_that_a_call_is_not_told,
    check_that_a_call_is_told,
    check_that_a_fit_is_told,
    found,
    traced,
)
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.parallel.additive.findings import A_NUMBER, PAIRS, Related
from lightning_dp.parallel.additive.relations import decided, related
from lightning_dp.parallel.torch_private import mixed_samples

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


OF_PLACES = {"index_add", "index_put_", "scatter_add_", "scatter_reduce"}
MEETING["means of classes"] = (
    around_means,
    "got __getitem__ of samples and of scatter_reduce over all of them. What",
)
COUNTS = ("bincount", "index_add", "index_put_", "scatter_add_", "scatter_reduce")
for how in COUNTS:
    MEETING[how] = (
        lambda self, z, x, y, how=how: (
            F.cross_entropy(z, y, reduction="none") / (1 + counted(y, z.shape[1], how)[y])
        ).mean(),
        f"of samples and of {how} over all of them{'' if how in OF_PLACES else ', which has'}",
    )
MEETING["unique"] = (
    lambda self, z, x, y: (
        F.cross_entropy(z, y, reduction="none")
        / (found := y.unique(False, True, True))[2][found[1]]
    ).mean(),
    "got div of samples and of unique over all of them, which has",
)
MEETING["discounted"] = (
    lambda self, z, x, y: (
        F.cross_entropy(z, y, reduction="none") * 0.9 ** torch.arange(len(x), device=z.device)
    ).mean(),
    "got mul of samples and of their places in a shard, which has",
)
MEETING["first ones"] = (
    lambda self, z, x, y: torch.where(
        torch.arange(len(x), device=z.device) < 3, z.square().sum(1), z.abs().sum(1)
    ).mean(),
    "got where of samples and of their places in a shard, which has",
)
MEETING["one with a gradient"] = (
    lambda self, z, x, y: F.cross_entropy(z, y) + (z - z[0]).square().mean(),
    "got one of them, by its place. What",
)


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
    "each at its place": lambda net, x: net.layer(x)[torch.arange(len(x)), x.argmax(1)] * 2,
    "offsets": lambda net, x: (
        net.layer(x).flatten()[torch.arange(len(x)) * x.shape[1] + x.argmax(1)] * 2
    ),
    "places of features": lambda net, x: net.layer(x) * torch.arange(x.shape[1]),
    "parts of each": lambda net, x: net.layer(x).index_add(
        0, torch.arange(len(x)).repeat_interleave(2), x.repeat_interleave(2, 0)
    ),
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


def test_nodes_that_are_as_many_in_all_shards_by_chance_are_no_classes() -> None:
    """Graphs of three, two and two nodes are a shard, and one of seven is another."""

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        nodes, edges = batch
        degrees = torch.zeros(len(nodes)).index_add(0, edges[:, 0], torch.ones(len(edges)))
        return (nodes[edges[:, 1]] / degrees[edges[:, 0], None]).square().sum()

    shards = [(torch.randn(7, 2), torch.randint(0, 7, (n, 2))) for n in (11, 9)]
    traces, losses = zip(*[traced(step, shard) for shard in shards], strict=True)
    assert related(traces, [[loss] for loss in losses], (3, 1)) is None


def test_parts_that_are_counted_for_each_sample_are_no_classes() -> None:
    """As nodes of each graph, of which samples have several."""

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        parts, of = batch
        counts = of.unique_consecutive(return_counts=True)[1]
        return (parts.square().mean(1) / counts[of]).sum()

    shards = [
        (torch.randn(sum(n), 2), torch.arange(len(n)).repeat_interleave(torch.tensor(n)))
        for n in ((3, 1, 2), (2, 3))
    ]
    traces, losses = zip(*[traced(step, shard) for shard in shards], strict=True)
    assert related(traces, [[loss] for loss in losses], (3, 2)) is None


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


def test_one_of_what_is_not_as_many_for_each_sample_is_not_told() -> None:
    """Tokens that lie one after another, say."""
    net = torch.nn.Linear(4, 1)
    loss = lambda rows: net(torch.randn(rows, 4))[0].square().sum()
    assert mixed_samples([loss(7), loss(5)], (3, 2)) is None
    assert mixed_samples([loss(6), loss(4)], (3, 2)) is not None


# --- decisions of the host ------------------------------------------------------------------------


def classes_in_turn(self: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    of_each = [z[y == k].mean(0) for k in range(z.shape[1]) if x[y == k].mean() > -0.05]
    return F.cross_entropy(z, y) + sum(mean.square().sum() for mean in of_each)


DECIDING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mean": (
        lambda self, z, x, y: F.cross_entropy(z, y) * (2 if x[:, 0].mean() > -0.3 else 1),
        "a decision of the host by mean over all of them, which is not the same for all.",
    ),
    "largest": (
        lambda self, z, x, y: z.square().mean() if x[:, 0].max() > 1 else z.abs().mean(),
        "a decision of the host by max over all of them, which is not the same for all.",
    ),
    "classes": (classes_in_turn, "a decision of the host by mean over all of them"),
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_that_is_not_the_same_for_all_shards_is_told(name: str) -> None:
    does, text = DECIDING[name]
    check_that_a_fit_is_told(type("Decides", (Meeting,), {"meets": does}), text)


DECIDED: dict[str, Callable[[Any, Tensor], Any]] = {
    "each by itself": lambda net, x: torch.stack(
        [net.layer(row) if row[0] > 0 else -net.layer(row) for row in x]
    ),
    "each by its place": lambda net, x: torch.stack(
        [net.layer(x[i]) if x[i].sum() > 0 else x[i] for i in range(len(x))]
    ),
    "if there is any": lambda net, x: (
        torch.where(x[:, :1] > 0.9, net.layer(x), x) if (x[:, 0] > 0.9).any() else x
    ),
    "if there are some": lambda net, x: (
        torch.where(x[:, :1] > 0.9, net.layer(x), x) if (x[:, 0] > 0.9).sum() > 0 else x
    ),
    "the same for all": lambda net, x: net.layer(x) if x.abs().max() < 99 else x,
    "what is no number": lambda net, x: x if x.isnan().any() else net.layer(x),
}


@pytest.mark.parametrize("name", DECIDED)
def test_decisions_of_samples_and_those_that_are_the_same_are_as_on_one_device(name: str) -> None:
    check_that_a_call_is_not_told(DECIDED[name])


@pytest.mark.parametrize("name", DECIDED)
def test_they_are_not_told_of_losses(name: str) -> None:
    """Also where the first samples of shards decide otherwise."""
    net = Called(DECIDED[name])
    shards = torch.tensor([1.0, -1, 1, -1, 1])[:, None].expand(5, 4).split([3, 2])
    traces = [traced(lambda x: net(x).mean(), shard)[0] for shard in shards]
    if name.startswith("each"):
        assert [trace.decisions[0][1] for trace in traces] == [True, False]
    assert decided(traces, (3, 2)) is None
