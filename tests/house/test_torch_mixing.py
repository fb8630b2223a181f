"""Private names of torch, of what mixes samples: each does what we take it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.torch_private import mixed_samples

Values = Callable[[Tensor], Any]


def found(loss: Values, sizes: tuple[int, ...] = (3, 2)) -> str | None:
    shards = [torch.randn(size, 4, requires_grad=True) for size in sizes]
    mixed = mixed_samples([loss(shard) for shard in shards], sizes)
    return None if mixed is None else mixed.what


def test_input_metadata_has_the_shape_of_what_a_node_returned() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    values, indices = x.max(0)
    nodes: list[Any] = [(x * 2).grad_fn, values.grad_fn, x.sum().grad_fn]
    assert [tuple(node._input_metadata[0].shape) for node in nodes] == [(3, 4), (4,), ()]
    leaf: Any = nodes[0].next_functions[0][0]
    assert tuple(leaf._input_metadata[0].shape) == (3, 4) and indices.grad_fn is None


def test_is_nested_tensor_of_it_tells_what_is_passed_over() -> None:
    def mean(x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor([x.detach(), x[:1].detach()], layout=torch.jagged)
        values: Tensor = (nested.requires_grad_() * 2).values()
        return values.mean()

    assert found(mean) is None
    assert found(lambda x: mean(x).sqrt()) == "sqrt of a sum or mean of them"


@pytest.mark.parametrize("dim", [0, -2])
def test_saved_dim_and_saved_dims_tell_along_what(dim: int) -> None:
    for along in (torch.softmax, torch.log_softmax, torch.cumsum):
        assert found(lambda x, f=along: f(x, dim).square().mean())
        assert found(lambda x, f=along: f(x, dim + 1).square().mean()) is None
    assert found(lambda x: x.roll(1, dim).square().mean()) == "another order of them"
    assert found(lambda x: x.flip(dim).square().mean()) == "another order of them"
    assert found(lambda x: x.roll(1, dim + 1).flip(dim + 1).square().mean()) is None


def test_saved_other_and_saved_self_tell_products_with_what_only_the_shard_has() -> None:
    chosen = "a product of what shards have with a sum or mean of them"
    for product in (lambda x, y: x.mean(0) * y, lambda x, y: y * x.mean(0)):
        assert found(lambda x, f=product: f(x, x.detach().mean(0)).sum()) == chosen
        assert found(lambda x, f=product: f(x, torch.arange(4)).sum()) is None
        assert found(lambda x, f=product: f(x, torch.rand(())).sum()) is None, "as for mixup"


def test_what_raw_saved_tensors_have_packed_stays_packed() -> None:
    unpacked: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: unpacked.append(x) or x
        ):
            return (x.mean(0) * x.detach().mean(0)).sum().sqrt()

    assert found(loss) == "sqrt of a sum or mean of them" and not unpacked


@pytest.mark.parametrize("lengths", [(3, 2), (6, 4)])
def test_sequences_that_are_as_long_as_shards_by_chance_are_no_pairs(
    lengths: tuple[int, int],
) -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    lstm = torch.nn.LSTM(4, 4, batch_first=True)
    for sizes in ((3, 2), (2, 3)):
        batches = [torch.randn(n, t, 4) for n, t in zip(sizes, lengths, strict=True)]
        for shards in (batches, [layer(x) for x in batches], [lstm(x)[0] for x in batches]):
            own = [layer(x) for x in shards]
            scores = [(x @ x.transpose(1, 2)).softmax(1).softmax(2) for x in own]
            losses = [(y @ x).cumsum(1).square().mean() for x, y in zip(own, scores, strict=True)]
            assert mixed_samples(losses, sizes) is None


def test_equal_shards_and_losses_without_a_graph_tell_nothing() -> None:
    assert found(lambda x: x.mean().sqrt(), (3, 3)) is None
    assert found(lambda x: x.detach().mean().sqrt()) is None


@pytest.mark.parametrize("join", [lambda own: torch.stack(own).mean(), lambda own: sum(own) / 9])
def test_what_is_done_sample_by_sample_tells_nothing(join: Any) -> None:
    """Samples may have any size, and what is summed up may be elements of one."""

    def loss(x: Tensor) -> Tensor:
        return join([row[: 1 + i % 3].mean().square() for i, row in enumerate(x)])

    assert found(loss) is None


def test_each_of_several_results_of_a_node_has_its_own_shape() -> None:
    def loss(x: Tensor) -> Tensor:
        first, rest = x.split([1, len(x) - 1])
        return rest.square().mean() + 0 * first.sum()

    assert found(loss) is None
    assert found(lambda x: loss(x).sqrt()) == "sqrt of a sum or mean of them"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_is_one_node_or_all_and_not_computed_again(reentrant: bool) -> None:
    calls: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        calls.append(x)
        return x.tanh()

    def loss(x: Tensor) -> Tensor:
        values: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return values.mean().square()

    assert found(loss) == "a power of a sum or mean of them" and len(calls) == 2


def test_a_graph_that_is_deep_is_no_recursion() -> None:
    def loss(x: Tensor) -> Tensor:
        for _ in range(3000):
            x = x + 1
        return x.mean().sqrt()

    assert found(loss) == "sqrt of a sum or mean of them"


class Sqrt(torch.autograd.Function):
    """Nobody knows what it does: it is no root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Twice as much."""
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Likewise."""
        return 2 * gradient


def test_functions_of_ones_own_are_of_samples_if_they_keep_them() -> None:
    twice: Any = Sqrt.apply
    assert found(lambda x: F.mse_loss(twice(x), x.detach())) is None
    assert found(lambda x: twice(x).mean().sqrt()) == "sqrt of a sum or mean of them"
    assert found(lambda x: twice(x.mean())) is None
    assert found(lambda x: twice(x.mean()).sqrt()) == "sqrt of a sum or mean of them"
    assert found(lambda x: twice(x.mean().sqrt())) == "sqrt of a sum or mean of them"
