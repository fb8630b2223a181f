"""Reductions: what calls of torch's losses make of their elements: a sum, or a mean over what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

_BY_TARGETS = {"cross_entropy", "nll_loss"}

LOSSES = {
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss"),
    *("gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss"),
    *("margin_ranking_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", *_BY_TARGETS),
}
"""Functions that have an option `reduction`."""

_IGNORED = -100
"""torch's default."""


class Reduction(NamedTuple):
    """How the elements of a loss are joined.

    Attributes:
        is_mean: it is a mean, and else a sum.
        weights: of targets, their sum, if the mean is over these.
    """

    is_mean: bool
    weights: Tensor | None = None


def reduction_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduction | None:
    """What a call makes of its elements; None if it is no such loss, or joins nothing.

    Example:
        >>> scores, classes = torch.zeros(3, 2), torch.tensor([0, 1, -100])
        >>> reduction_of("cross_entropy", (scores, classes), {})
        Reduction(is_mean=True, weights=tensor(2))
        >>> reduction_of("mse_loss", (scores, scores), {"reduction": "sum"})
        Reduction(is_mean=False, weights=None)
    """
    how = kwargs.get("reduction", "mean")
    is_old = kwargs.get("reduce") is not None or kwargs.get("size_average") is not None
    if name not in LOSSES or is_old or how not in ("mean", "sum"):
        return None
    is_weighted = how == "mean" and name in _BY_TARGETS
    return Reduction(how == "mean", _weights_of_targets(args, kwargs) if is_weighted else None)


def _weights_of_targets(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The sum of the weights of those targets that are not ignored; None of probabilities."""
    names = ("input", "target", "weight", "size_average", "ignore_index")
    by_place = dict(zip(names, args, strict=False))
    given = {"weight": None, "ignore_index": _IGNORED, **by_place, **kwargs}
    target, weight = cast(Tensor, given["target"]), cast("Tensor | None", given["weight"])
    if target.is_floating_point():
        return None
    with torch.no_grad():
        counts = target.ne(given["ignore_index"])
        own = counts if weight is None else weight[target.masked_fill(~counts, 0)] * counts
        return own.sum()
