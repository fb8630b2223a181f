"""What a function makes of samples along their dimension is told, and of others is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, run
from test_relations import (
    check_that_a_call_is_not_told,
    check_that_a_call_is_told,
    check_that_a_fit_is_told,
    found,
    traced,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.additive.along import dims_along
from lightning_dp.parallel.additive.findings import Related
from lightning_dp.parallel.additive.relations import related

pytestmark = pytest.mark.usefixtures("one_thread")

ORDER, TOLD = (
    "got another order of samples, which has",
    "got {} along samples, which has no gradient",
)


def mixed_up(x: Tensor, others: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * others


def order_of(x: Tensor) -> Tensor:
    return torch.randperm(len(x), device=x.device)


def cut_mixed(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :3] = x.flip(0)[:, :3]
    return x


MEETING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mixup": (lambda x: mixed_up(x, x.flip(0)), ORDER),
    "mixup in place": (lambda x: x.clone().mul_(0.7).add_(x.flip(0).mul_(0.3)), ORDER),
    "at random": (lambda x: mixed_up(x, x[torch.randperm(len(x)).to(x.device)]), ORDER),
    "selected": (
        lambda x: mixed_up(x, x.index_select(0, order_of(x))),
        ORDER,
    ),
    "with columns": (lambda x: mixed_up(x, x[torch.randperm(len(x)), :]), ORDER),
    "by name": (lambda x: mixed_up(x, x.index_select(dim=0, index=order_of(x))), ORDER),
    "cutmix": (cut_mixed, ORDER),
    "neighbours": (lambda x: mixed_up(x, x.roll(1, dims=0)), ORDER),
    "turned around": (lambda x: mixed_up(x, x.flipud()), ORDER),
    "normalised": (lambda x: F.normalize(x, dim=0), TOLD.format("normalize")),
    "attended to": (lambda x: x * x.softmax(0), TOLD.format("softmax")),
    "in logarithms": (lambda x: nn.LogSoftmax(0)(x), TOLD.format("log_softmax")),
    "added up": (lambda x: torch.cumsum(x, dim=0), TOLD.format("cumsum")),
    "largest so far": (lambda x: x.cummax(0).values, TOLD.format("cummax")),
}


class Mixing(Classifier):
    """As people write it who know one device."""

    mix: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((type(self).mix(x), y), batch_idx)


def mixing(name: str, *bases: type) -> Any:
    return type("Mixes", (*bases, Mixing), {"mix": staticmethod(MEETING[name][0])})


class MixingBefore(Classifier):
    """The whole batch is mixed."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [mixed_up(x, x.flip(0)), y] if self.trainer.training else batch


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", MEETING)
def test_a_fit_whose_samples_meet_is_told_once_and_is_not_one_devices(name: str) -> None:
    check_that_a_fit_is_told(mixing(name), MEETING[name][1])


def test_in_manual_optimisation_too() -> None:
    with pytest.warns(UserWarning, match=ORDER):
        run(mixing("mixup", ByHand), 3)


@pytest.mark.usefixtures("on")
def test_what_it_advises_is_as_on_one_device() -> None:
    expected = run(mixing("mixup"), 1)
    assert_same(run(MixingBefore, 3), expected, atol=1e-5)
    assert_same(run(mixing("mixup"), 3, strategy={"mode": "forward"}), expected, atol=1e-5)


def drawn_apart(n: int) -> Tensor:
    """A random order that is the same again, and leaves what others draw as it is."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


OF_EACH: dict[str, Callable[[Any, Tensor], Any]] = {
    "classes": lambda net, x: net.layer(x).softmax(-1),
    "rows": lambda net, x: F.normalize(net.layer(x)),
    "features": lambda net, x: net.layer(x.flip(1) + x.roll(1, 1) + x.cumsum(1)),
    "shuffled features": lambda net, x: net.layer(x)[:, torch.tensor([2, 0, 1, 3])],
    "features at random": lambda net, x: net.layer(x[:, drawn_apart(4)]),
    "time first": lambda net, x: net.layer(
        torch.stack([x, x + 1]).flip(0).softmax(0).cumsum(0)
    ).transpose(0, 1),
    "diagonal": lambda net, x: net.layer(x)[torch.arange(len(x)), x.argmax(1)],
}
OF_SHARDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "data": (lambda net, x: net.layer(x + x.flip(0)), "another order of samples"),
    "features": (lambda net, x: net.layer(x).softmax(0), "softmax along samples"),
}


@pytest.mark.parametrize("name", OF_SHARDS)
def test_a_call_in_which_samples_meet_is_told_and_is_not_one_devices(name: str) -> None:
    check_that_a_call_is_told(*OF_SHARDS[name])


@pytest.mark.parametrize("name", OF_EACH)
def test_a_call_along_other_dimensions_is_as_on_one_device_and_is_not_told(name: str) -> None:
    check_that_a_call_is_not_told(OF_EACH[name])


def test_what_has_a_gradient_is_left_to_graphs() -> None:
    net = nn.Linear(4, 1)
    assert found(lambda x: net(x).softmax(0).square().sum()) is None
    assert found(lambda x: (net(x) * x.softmax(0)).sum()) == Related("", "softmax")


@pytest.mark.parametrize("on_the_host", [True, False])
def test_sequences_that_are_sorted_by_length_and_back_are_not_told(on_the_host: bool) -> None:
    rnn = nn.GRU(4, 2, batch_first=True)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        own: Any = lengths.tolist() if on_the_host else lengths
        packed = nn.utils.rnn.pack_padded_sequence(x, own, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True)[0].sum()

    shards = [(torch.randn(len(own), 5, 4), torch.tensor(own)) for own in ([2, 5, 3], [1, 5])]
    traces, losses = zip(*[traced(step, shard) for shard in shards], strict=True)
    assert related(traces, [[loss] for loss in losses], (3, 2)) is None


def test_places_in_a_packed_batch_are_added_up_and_not_told() -> None:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, lengths = batch
        ends = F.pad(lengths.cumsum(0), (1, 0))
        bags = F.embedding_bag(rows[:, 0].abs().long(), torch.eye(9), ends[:-1])
        return bags.square().sum()

    shards = [(torch.randn(sum(own), 2), torch.tensor(own)) for own in ([2, 5, 3], [1, 5])]
    traces, losses = zip(*[traced(step, shard) for shard in shards], strict=True)
    assert related(traces, [[loss] for loss in losses], (3, 2)) is None


def test_a_shard_that_is_shorter_by_its_padding_is_not_told() -> None:
    """Attention over time, of which each shard has as much as its longest sample."""
    shards = [torch.randn(3, 7, 4), torch.randn(2, 5, 4)]
    traces, losses = zip(
        *[traced(lambda x: x.softmax(1).flip(1).square().sum(), shard) for shard in shards],
        strict=True,
    )
    assert related(traces, [[loss] for loss in losses], (3, 2)) is None


def test_a_shard_of_one_sample_that_has_lost_its_dimension_tells_nothing() -> None:
    assert found(lambda x: x.squeeze().softmax(-1).square().sum(), (2, 1)) is None
    assert found(lambda x: x[:, 0].squeeze().softmax(0).square().sum(), (1, 2)) is None


def test_nested_tensors_have_no_dimension_to_go_along() -> None:
    def step(x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x, x.flip(1)[1:]], layout=torch.jagged)
        return rows.softmax(-1).values().square().sum()

    assert found(step) is None


X = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("softmax", (X, 1), {}, (1,)),
        ("softmax", (X,), {"dim": -2}, (0,)),
        ("softmax", (X,), {"dim": None}, ()),
        ("softmax", (X,), {}, ()),
        ("normalize", (X,), {}, (1,)),
        ("normalize", (X, 2.0, 0), {}, (0,)),
        ("flip", (X, [0, 1]), {}, (0, 1)),
        ("flip", (X,), {"dims": (0,)}, (0,)),
        ("flipud", (X,), {}, (0,)),
        ("roll", (X, 1), {}, (0,)),
        ("roll", (X, (1, 1), (0, 1)), {}, (0, 1)),
        ("cumsum", (X, 0), {}, (0,)),
        ("sort", (X, 0), {}, ()),
        ("__getitem__", (X, torch.arange(3)), {}, ()),
    ],
)
def test_dimensions_are_where_functions_take_them(
    name: str, args: Any, kwargs: Any, expected: tuple[int, ...]
) -> None:
    assert dims_along(name, args, kwargs, X) == expected


def test_whole_numbers_that_are_added_up_and_numbers_without_dimensions_have_none() -> None:
    assert dims_along("cumsum", (X.long(), 0), {}, X.long()) == ()
    assert dims_along("softmax", (X.sum(), 0), {}, X.sum()) == ()


ORDERED = torch.tensor([2, 0, 1])
ALL = slice(None)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("__getitem__", (X, ORDERED), {}, (0,)),
        ("__getitem__", (X, (ORDERED, ALL)), {}, (0,)),
        ("__getitem__", (X, (ALL, ORDERED)), {}, (1,)),
        ("__getitem__", (X, (..., ORDERED)), {}, ()),
        ("__getitem__", (X, (0, ORDERED)), {}, ()),
        ("__getitem__", (X, torch.arange(3)), {}, ()),
        ("index_select", (X, 1, ORDERED), {}, (1,)),
        ("index_select", (X,), {"dim": -2, "index": ORDERED}, (0,)),
        ("index_select", (X, 0, torch.arange(3)), {}, ()),
    ],
)
def test_dimensions_in_a_random_order_are_where_it_is_told(
    name: str, args: Any, kwargs: Any, expected: tuple[int, ...]
) -> None:
    assert dims_along(name, args, kwargs, X, lambda argument: argument is ORDERED) == expected
