"""Where a loss's graph mixes samples.

Replicas whose shards differ in samples make the same graph of other sizes. So a dimension that
differs between them counts samples, or something that comes with them. What lost it is a sum over
samples; and a function of such a sum is not the sum of anything that each sample has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_dp.parallel.torch_private.losses import is_packed
from lightning_dp.parallel.torch_private.nodes import (
    ALONG,
    FUNCTIONS,
    GIVE_ON,
    MEETINGS,
    OF_ALL,
    PRODUCTS,
    SUMS,
    name_of,
)

_Edge: TypeAlias = tuple[Any, int]  # a node of a graph, and which of its results


class _Of(IntEnum):
    """What the values at a place of the graph are of."""

    NO_SAMPLE = 0
    SAMPLES = 1  # a dimension differs between shards
    SUMS = 2  # over samples
    UNKNOWN = 3


_OF_THE_BATCH = (_Of.SAMPLES, _Of.SUMS)


class _Way(IntEnum):
    """What is between a place and the loss."""

    LINEAR = 0
    UNKNOWN = 1
    FUNCTION = 2


class _Place:
    """The same result of the same node, in the graphs of all replicas.

    Attributes:
        is_same: the nodes have the same name.
        takes_as_many: and take equally many. Else each of these is of a sample, as in a stack.
        shapes: of the result, on each replica.
        followed: what the nodes take; `inputs` are their places, None for what has no gradient.
        of: what the result is of.
        differing: its dimensions that are not equally long in all shards.
        rows: those of them that are as long as shards have samples, or so many times that.
        way: what is between here and the loss, and in `function` the nearest that is not linear.
        is_picked: of pairs of samples, those of a sample with itself are all that is used.
    """

    def __init__(self, edges: Sequence[_Edge]) -> None:
        self.nodes = nodes = [node for node, _ in edges]
        self.name = name_of(nodes[0])
        self.of, self.is_picked = _Of.UNKNOWN, False
        self.differing, self.rows = list[int](), list[int]()
        self.way, self.function = _Way.LINEAR, ""
        self.shapes: list[tuple[int, ...]] = []
        self.followed: list[tuple[_Edge, ...]] = []
        self.inputs: list[_Place | None] = []
        self.is_same = len({node.name() for node in nodes}) == 1
        followed = [node.next_functions for node in nodes]
        self.takes_as_many = len(set(map(len, followed))) == 1
        if not self.is_same:
            return
        metadata = [node._input_metadata[number] for node, number in edges]
        if not any(own.is_nested_tensor for own in metadata):
            self.shapes = [tuple(own.shape) for own in metadata]
        if self.takes_as_many:
            self.followed = list(zip(*followed, strict=True))

    def settle(self, sizes: Sequence[int]) -> None:
        """Says what its values are of, after those that it takes."""
        if len(set(map(len, self.shapes))) != 1:
            return
        of = {place.of for place in self.inputs if place is not None}
        columns = list(zip(*self.shapes, strict=True))
        self.differing = [d for d, column in enumerate(columns) if len(set(column)) > 1]
        self.rows = [d for d in self.differing if _follows(columns[d], sizes)]
        if self.differing:
            self.of = _Of.SAMPLES
        elif _Of.UNKNOWN in of or not self.takes_as_many:
            self.of = _Of.UNKNOWN
        elif _Of.SAMPLES in of:
            is_known = self.name in SUMS or self.name in OF_ALL or self.picks()
            self.of = _Of.SUMS if is_known else _Of.UNKNOWN
        else:
            self.of = _Of.SUMS if _Of.SUMS in of else _Of.NO_SAMPLE

    def picks(self) -> bool:
        """Whether it takes one sample, and leaves the others."""
        first = self.inputs[0] if self.name == "Select" else None
        return first is not None and not self.differing and _is_clear(first)

    def ways(self) -> Iterator[tuple[_Place, _Way, str]]:
        """What it takes, and what it does to that."""
        depends = [place is not None and place.of in _OF_THE_BATCH for place in self.inputs]
        for i, place in enumerate(self.inputs):
            is_product = sum(depends) - depends[i] > 0
            if place is None:
                continue
            if self.name in GIVE_ON:
                yield place, _Way.LINEAR, ""
            elif self.name in FUNCTIONS:
                yield place, _Way.FUNCTION, f"{FUNCTIONS[self.name]} of"
            elif self.name == "Div" and (i == 1 or is_product):
                yield place, _Way.FUNCTION, "a ratio with"
            elif self.name in PRODUCTS and is_product:
                yield place, _Way.FUNCTION, "a product with"
            elif place.of is _Of.SUMS and self.name == "Mul" and _differ(self.nodes, 1 - i):
                yield place, _Way.FUNCTION, "a product of what shards have with"
            else:
                is_linear = self.name in PRODUCTS or self.name in SUMS
                yield place, _Way.LINEAR if is_linear else _Way.UNKNOWN, ""

    def pass_on(self) -> None:
        """Tells those that it takes what is between them and the loss."""
        for place, way, function in self.ways():
            if max(way, self.way) > place.way:
                place.way = max(way, self.way)
                place.function = function or self.function
            place.is_picked |= self.is_picked or self.name in ("Diagonal", "Trace")


class Mixed(NamedTuple):
    """What mixes samples, for people, and whether it is a function of a sum over them."""

    what: str
    is_function: bool = False


def mixed_samples(losses: Sequence[Tensor], sizes: Sequence[int]) -> Mixed | None:
    """What mixes samples in the graphs of replicas' losses; None if nothing tells.

    Each loss is of as many samples as `sizes` has for it. Where all have equally many, nothing
    tells. Nor does what has no gradient, or is computed in a way that is not known here.

    Example:
        >>> import torch
        >>> x = torch.ones(5, 2, requires_grad=True)
        >>> mixed_samples([part.mean().sqrt() for part in (x[:3], x[3:])], (3, 2)).what
        'sqrt of a sum or mean of them'
        >>> mixed_samples([part.sqrt().mean() for part in (x[:3], x[3:])], (3, 2)) is None
        True
    """
    nodes = [loss.grad_fn for loss in losses]
    if len(set(sizes)) == 1 or None in nodes:
        return None
    places = _places([(node, 0) for node in nodes])
    if not all(place.is_same for place in places):
        return None  # what is done sample by sample is done more often in one shard
    for place in places:
        place.settle(sizes)
    for place in reversed(places):  # none comes before what takes it
        if found := _found_at(place):
            return found
        place.pass_on()
    return None


def _found_at(place: _Place) -> Mixed | None:
    """What mixes samples at a place, of which all that uses it has been looked at."""
    if _has_pairs(place):
        shapes = " and ".join(map(str, {shape: list(shape) for shape in place.shapes}.values()))
        return Mixed(f"values of pairs of them, as {shapes}")
    # Where more dimensions differ, as time does where each shard has been padded, who knows.
    if _is_clear(place) and place.name in ALONG and _along(place).intersection(place.rows):
        return Mixed(f"{ALONG[place.name]} of them")
    takes_samples = any(taken is not None and taken.of is _Of.SAMPLES for taken in place.inputs)
    if place.of is _Of.SUMS and takes_samples:
        if place.name in OF_ALL:
            return Mixed(f"{OF_ALL[place.name]} over all of them")
        if place.picks():
            return Mixed("one of them, by its place")
        if place.way is _Way.FUNCTION:
            return Mixed(f"{place.function} a sum or mean of them", is_function=True)
    return None


def _is_clear(place: _Place) -> bool:
    """Whether one dimension differs between shards, and counts samples."""
    return len(place.differing) == len(place.rows) == 1


def _has_pairs(place: _Place) -> bool:
    """Whether pairs of samples arise here. Two dimensions may be as long by chance elsewhere."""
    if place.is_picked or place.name not in MEETINGS:
        return False
    columns = [tuple(shape[d] for shape in place.shapes) for d in place.rows]
    taken = [len(other.rows) for other in place.inputs if other is not None]
    return len(set(columns)) < len(columns) and max(taken, default=0) < 2


def _follows(column: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a dimension is as long as shards have samples, or so many times that."""
    return all(n * sizes[0] == column[0] * size for n, size in zip(column, sizes, strict=True))


def _differ(nodes: Sequence[Any], i: int) -> bool:
    """Whether a factor of several elements, that has no gradient, is not the same in all shards.

    A single number may be drawn, as for mixup. To unpack what hooks have packed is not for a look.
    """
    name = ("self", "other")[i]
    if any(is_packed(node, name) for node in nodes):
        return False
    first, *others = [getattr(node, f"_saved_{name}") for node in nodes]
    if not isinstance(first, Tensor) or first.numel() == 1:
        return False
    return not all(
        first.shape == own.shape and bool((first == own.to(first)).all()) for own in others
    )


def _along(place: _Place) -> set[int]:
    """Along which dimensions a node goes; torch gives negative ones without their sign."""
    node, rank = place.nodes[0], len(place.shapes[0])
    saved = node._saved_dims if hasattr(node, "_saved_dims") else (node._saved_dim,)
    return {(dim - 2**64 if dim >= 2**63 else dim) % rank for dim in saved}


def _places(roots: Sequence[_Edge]) -> list[_Place]:
    """All places that the losses are computed from; each comes after those that it takes."""
    places: dict[_Edge, _Place] = {roots[0]: _Place(roots)}
    ordered: list[_Place] = []
    path = [places[roots[0]]]
    while path:
        place = path[-1]
        if len(place.inputs) == len(place.followed):
            ordered.append(path.pop())
            continue
        edges = place.followed[len(place.inputs)]
        if any(node is None for node, _ in edges):
            place.inputs.append(None)
            continue
        if edges[0] not in places:
            places[edges[0]] = _Place(edges)
            path.append(places[edges[0]])
        place.inputs.append(places[edges[0]])
    return ordered
