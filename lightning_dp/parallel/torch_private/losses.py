"""What torch's graphs keep of losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dp.parallel.torch_private.nodes import OF_PARAMETERS, name_of

_NONE, _MEAN = 0, 1
"""torch's numbers of `reduction="none"` and `reduction="mean"`."""

_NODES = ("NllLossBackward0", "NllLoss2DBackward0")
"""What makes the means of `cross_entropy` and `nll_loss`."""

_SUMS = ("SumBackward0", "SumBackward1")
_MEANS = ("MeanBackward0", "MeanBackward1")

_WITH_FACTORS = ("MulBackward0", "DivBackward0", "DivBackward1")

_PASSED = (
    *("AliasBackward0", "CloneBackward0", "NegBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "ToCopyBackward0"),
    *("UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"),
)
"""What gives its elements on, but for their sign."""

_MOST = 1000
"""Nodes at the end of a graph that are looked at; those of more terms say nothing."""


def divisors_of_means(loss: Tensor) -> list[Tensor]:
    """What each mean of `cross_entropy` or `nll_loss` in a loss's graph was divided by.

    That is the sum of the weights of its targets; without class weights each counts 1, and ignored
    ones count nothing.

    Example:
        >>> import torch
        >>> scores = torch.zeros(3, 2, requires_grad=True)
        >>> weight, classes = torch.tensor([1.0, 5.0]), torch.tensor([0, 1, 1])
        >>> divisors_of_means(2 * torch.nn.functional.cross_entropy(scores, classes, weight))
        [tensor(11.)]
    """
    found: list[Tensor] = []
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        is_mean = node.name() in _NODES and node._saved_reduction == _MEAN
        if is_mean and not is_packed(node, "total_weight"):
            found.append(node._saved_total_weight)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


class Reduced(NamedTuple):
    """One term of a loss: so many elements are added up, and each counts the product of `weights`.

    Attributes:
        elements: how many; 0 on the way to them.
        weights: numbers, and tensors of one element.
        divisors: likewise; by these the product is divided.
        is_weighted: elements may count differently in a way that is not looked at.
        is_of_parameters: no sample has a part in it.
        is_cross_entropy: it is a mean over weights of targets; their sum is the last divisor.
    """

    elements: int
    weights: tuple[float | Tensor, ...] = ()
    divisors: tuple[float | Tensor, ...] = ()
    is_weighted: bool = False
    is_of_parameters: bool = False
    is_cross_entropy: bool = False


class _Place(NamedTuple):
    """A node of a graph whose result has `size` elements, and what is known of the way to it."""

    node: Any
    size: int
    term: Reduced


def terms_of(loss: Tensor) -> list[Reduced]:
    """The sums and means at the end of a loss's graph, and other functions of parameters alone.

    Other losses, and whatever is not linear, are left out.

    Example:
        >>> import torch
        >>> x = torch.ones(4, 3, requires_grad=True)
        >>> loss = x.square().sum() / 4 + x.mean()
        >>> [(term.elements, term.divisors) for term in terms_of(loss)]
        [(12, (12.0,)), (12, (tensor(4),))]
    """
    places, found, count = [_Place(loss.grad_fn, 1, Reduced(0))], [], 0
    while places and count < _MOST:
        count += 1
        place = places.pop()
        inner = list(_inner(place))
        is_of_parameters = not inner and _is_of_parameters(place.node)
        if is_of_parameters or (not inner and place.term.elements):
            found.append(place.term._replace(is_of_parameters=is_of_parameters))
        places += inner
    return [] if places else found


def _inner(place: _Place) -> Iterator[_Place]:
    """The nodes before one that is a sum of them; none where a term ends."""
    node, size, term = place
    name = "" if node is None else node.name()
    followed = [] if node is None else [following for following, _ in node.next_functions]
    if name in _PASSED:
        yield _Place(followed[0], size, term)
    elif name in ("AddBackward0", "SubBackward0"):
        for following, alpha in zip(followed, (1, abs(node._saved_alpha)), strict=True):
            if following is not None:  # nothing is known of what has no gradient
                yield _Place(following, size, _times(term, alpha))
    elif name in _WITH_FACTORS and is_packed(node, "self", "other"):
        if term.elements:
            yield _Place(None, size, term._replace(is_weighted=True))
    elif name == "MulBackward0":
        others = (node._saved_other, node._saved_self)
        yield from _scaled(place, followed, others)
    elif name in _WITH_FACTORS:
        yield from _divided(place, followed[0], node._saved_other)
    elif name in (*_SUMS, *_MEANS):
        elements = math.prod(node._saved_self_sym_sizes)
        divisor = elements / max(size, 1) if name in _MEANS else 1
        whole = term._replace(elements=max(1, elements))  # also of nothing, divided by 0
        yield _Place(followed[0], elements, _over(whole, divisor))
    elif name == "StackBackward0" and size == len(followed):
        for following in followed:
            yield _Place(following, 1, term._replace(elements=0))
    elif size == 1 and not term.elements and not is_packed(node, "self", "total_weight"):
        yield from _of_loss(place, name)


def _is_of_parameters(last: Any) -> bool:
    """Whether nothing but parameters has gone into the result of a node."""
    nodes, seen = [last], {last}
    while nodes and len(seen) < _MOST:
        node = nodes.pop()
        if node is None or not (_is_parameter(node) or _is_of_what_it_takes(node)):
            return False
        new = {following for following, _ in node.next_functions} - {None} - seen
        seen |= new
        nodes += new
    return not nodes


def _is_parameter(node: Any) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_of_what_it_takes(node: Any) -> bool:
    """Whether it is a part of penalties, and no product with several numbers from elsewhere."""
    name, followed = name_of(node), [following for following, _ in node.next_functions]
    if name not in ("Div", "Mul") or None not in followed:
        return name in OF_PARAMETERS
    if is_packed(node, "self", "other"):
        return False
    saved = [getattr(node, f"_saved_{own}", None) for own in ("self", "other")]
    return not any(isinstance(own, Tensor) and own.numel() > 1 for own in saved)


def is_packed(node: Any, *names: str) -> bool:
    """Whether hooks have packed such a tensor: to unpack it may mean to compute it again."""
    saved = [getattr(node, f"_raw_saved_{name}", None) for name in names]
    return any(getattr(own, "unpack_hook", None) is not None for own in saved)


def _scaled(place: _Place, followed: list[Any], others: tuple[Any, Any]) -> Iterator[_Place]:
    """Before a product: what counts as often as the other factor says."""
    _, size, term = place
    for following, other in zip(followed, others, strict=True):
        if following is not None and isinstance(other, Tensor):
            if other.numel() == 1:
                yield _Place(following, size, _times(term, other))
            elif size > 1:
                yield _Place(None, size, term._replace(is_weighted=True))
                return


def _divided(place: _Place, following: Any, other: Any) -> Iterator[_Place]:
    _, size, term = place
    if not isinstance(other, Tensor) or other.numel() == 1:
        yield _Place(following, size, _over(term, other))
    else:
        yield _Place(None, size, term._replace(is_weighted=True))


def _of_loss(place: _Place, name: str) -> Iterator[_Place]:
    """Before losses that end in one number."""
    node, _, term = place
    if getattr(node, "_saved_reduction", _NONE) != _NONE and hasattr(node, "_saved_self"):
        elements, is_mean = node._saved_self.numel(), node._saved_reduction == _MEAN
        by_weights = is_mean and name in _NODES
        whole = term._replace(elements=elements, is_cross_entropy=by_weights)
        mean_over: float | Tensor = node._saved_total_weight if by_weights else elements
        yield _Place(None, elements, _over(whole, mean_over if is_mean else 1))


def _times(term: Reduced, weight: float | Tensor) -> Reduced:
    return term if _is_one(weight) else term._replace(weights=(*term.weights, weight))


def _over(term: Reduced, divisor: float | Tensor) -> Reduced:
    return term if _is_one(divisor) else term._replace(divisors=(*term.divisors, divisor))


def _is_one(number: float | Tensor) -> bool:
    return not isinstance(number, Tensor) and number == 1
