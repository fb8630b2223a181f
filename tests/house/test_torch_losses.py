"""Private names of torch, of losses: each does what we take it for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.torch_private import divisors_of_means, terms_of

CLASSES = torch.tensor([0, 1, 1, 2])
WEIGHT = torch.tensor([1.0, 5.0, 0.5])


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def test_saved_total_weight_is_the_sum_of_the_weights_of_the_targets(scores: Tensor) -> None:
    plain, weighted, ignoring = (
        divisors_of_means(F.cross_entropy(scores, CLASSES)),
        divisors_of_means(F.nll_loss(scores.log_softmax(1), CLASSES, WEIGHT)),
        divisors_of_means(F.cross_entropy(scores, CLASSES, WEIGHT, ignore_index=1)),
    )
    assert [float(*found) for found in (plain, weighted, ignoring)] == [4.0, 11.5, 1.5]


def test_images_have_one_for_all_pixels() -> None:
    scores = torch.randn(2, 3, 2, 2, requires_grad=True)
    classes = torch.tensor([[[0, 1], [1, 1]], [[2, 2], [-100, 0]]])
    assert float(*divisors_of_means(F.cross_entropy(scores, classes))) == 7.0


def test_saved_reduction_tells_means_which_are_all_found_and_nothing_else(scores: Tensor) -> None:
    means = [F.cross_entropy(scores, CLASSES, WEIGHT), F.cross_entropy(scores * 2, CLASSES)]
    sums = [F.cross_entropy(scores, CLASSES, reduction="sum"), scores.square().mean()]
    own = F.cross_entropy(scores, CLASSES, reduction="none").mean()
    found = divisors_of_means(sum(means) + sum(sums) + own)
    assert sorted(map(float, found)) == [4.0, 11.5]


def test_a_loss_without_a_graph_has_none() -> None:
    assert divisors_of_means(torch.tensor(1.0)) == terms_of(torch.tensor(1.0)) == []


def test_a_graph_that_is_deep_is_no_recursion(scores: Tensor) -> None:
    deep = scores
    for _ in range(5000):
        deep = deep + 1
    assert float(*divisors_of_means(F.cross_entropy(deep, CLASSES))) == 4.0
    assert terms_of(deep.sum()) == []


def elements(loss: Tensor) -> list[int]:
    return [term.elements for term in terms_of(loss)]


def factors(loss: Tensor) -> list[tuple[float, ...]]:
    def number(factor: float | Tensor) -> float:
        return float(factor.detach() if isinstance(factor, Tensor) else factor)

    return [(*map(number, t.weights), *(1 / number(d) for d in t.divisors)) for t in terms_of(loss)]


def test_saved_self_sym_sizes_tell_how_many_elements_sums_and_means_have(scores: Tensor) -> None:
    assert (
        elements(scores.sum()) == elements(scores.mean()) == elements(scores.sum(0).mean()) == [12]
    )
    assert elements(scores[:2].mean(1, keepdim=True).sum() + scores[0].sum()) == [3, 6]
    assert factors(scores.mean()) == [(1 / 12,)] and factors(scores.sum(0).mean()) == [(1 / 3,)]


def test_saved_self_of_losses_and_norms_tells_it_too(scores: Tensor) -> None:
    goal = torch.rand(4, 3)
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
        assert elements(loss(scores, goal, reduction="sum")) == [12]
        assert factors(loss(scores, goal)) == [(1 / 12,)]


def test_saved_other_and_saved_self_of_products_are_the_other_factors(scores: Tensor) -> None:
    scale = torch.tensor(3.0, requires_grad=True)
    assert factors(2 * scores.sum() / 8) == factors(scores.sum() / 8 * 2) == [(2.0, 0.125)]
    assert factors(scores.sum() * scale) == factors(scale * scores.sum()) == [(3.0,)]
    assert [term.is_weighted for term in terms_of((scores * torch.rand(4, 1)).sum())] == [True]


def test_saved_alpha_is_the_factor_of_what_is_added(scores: Tensor) -> None:
    loss = torch.sub(scores.sum(), scores[0].sum(), alpha=0.5)
    assert dict(zip(elements(loss), factors(loss), strict=True)) == {12: (), 3: (0.5,)}


def test_variable_tells_parameters_of_which_some_terms_are_alone(scores: Tensor) -> None:
    one, other = torch.nn.Parameter(torch.rand(3, 4)), torch.nn.Parameter(torch.rand(()))
    alone = [one.square().sum(), one.norm(), (0.5 * one.exp() - 1).mean() / 3, one.sum()]
    alone += [
        (other * one.norm() - other).exp(),
        torch.stack([one.norm(), other.exp()]).sum().sqrt(),
    ]
    others = [(scores @ one).sum(), scores.sum(), (one * torch.rand(4)).exp().sum(), one.max()]
    others += [(scores.sum() * one).exp().sum(), one[torch.tensor([0, 2])].sum()]
    assert all(term.is_of_parameters for loss in alone for term in terms_of(loss))
    assert not any(term.is_of_parameters for loss in others for term in terms_of(loss))
    assert all(map(terms_of, alone))


def test_a_cross_entropy_has_the_sum_of_weights_as_its_last_divisor(scores: Tensor) -> None:
    [mean] = terms_of(F.cross_entropy(scores, CLASSES, WEIGHT) / 4)
    assert mean.is_cross_entropy and [*map(float, mean.divisors)] == [4.0, 11.5]
    [total] = terms_of(F.cross_entropy(scores, CLASSES, WEIGHT, reduction="sum"))
    assert not total.is_cross_entropy and not total.divisors


def test_what_raw_saved_tensors_have_packed_stays_packed(scores: Tensor) -> None:
    unpacked: list[Tensor] = []

    def unpack(packed: Tensor) -> Tensor:
        unpacked.append(packed)
        return packed

    goal = torch.rand(4, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        scaled = scores * torch.tensor(0.5)
        losses = [scaled.sum(), scaled.mean() / torch.tensor(2.0), F.mse_loss(scores, goal)]
        losses += [F.cross_entropy(scores, CLASSES), torch.linalg.vector_norm(scores)]
    [term] = terms_of(losses[0])
    assert (term.elements, term.is_weighted) == (12, True)
    assert [terms_of(loss) for loss in losses[1:]] == [[]] * 4
    assert divisors_of_means(sum(losses, losses[0])) == [] and not unpacked
    losses[1].backward()
    assert unpacked


class Layer(torch.nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * torch.tensor(2.0)


def test_what_is_checkpointed_is_not_computed_again_for_a_look() -> None:
    layer = Layer(4, 3)
    loss = checkpoint(layer, torch.randn(5, 4), use_reentrant=False).sum()
    assert [term.is_weighted for term in terms_of(loss)] == [True] and layer.calls == 1
    loss.backward()
    assert layer.calls == 2
