"""Between processes: how many samples of a batch each of them gets.

What the devices of a process would get in one process, is its part. That goes for equal shares,
for fixed ones, and for those of `chunk`. A split that learns, that goes by costs or that is a
function of the user's own divides what a process has, and nothing else: between processes shares
are then as the numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from lightning_dp.parallel.split.arithmetic import Sizes, chunk, even, weighted
from lightning_dp.parallel.split.policies import plain_weight

Rule: TypeAlias = Literal["even", "chunk"]


def between_processes(
    n: int,
    device_counts: Sequence[int],
    weights: Sequence[float] | None = None,
    rule: Rule = "even",
) -> Sizes:
    """The sizes of the processes' parts: each gets what its devices would get in one process.

    Args:
        n: the batch size, in samples.
        device_counts: how many devices each process has.
        weights: shares of all devices, those of the first process first; None for what `rule` says.
        rule: how sizes are chosen without weights.

    Example:
        >>> between_processes(10, [2, 2]), between_processes(9, [1, 3], [3, 1, 1, 1])
        ((6, 4), (5, 4))
        >>> between_processes(10, [4, 4], rule="chunk")
        (8, 2)
    """
    k = sum(device_counts)
    if weights is not None:
        sizes = weighted(n, weights)
    else:
        sizes = chunk(n, k) if rule == "chunk" else even(n, k)
    ends = [0, *accumulate(device_counts)]
    return tuple(sum(sizes[start:end]) for start, end in pairwise(ends))


@dataclass(frozen=True)
class OwnShare:
    """What decides how many samples of a batch a process gets.

    Attributes:
        devices: how many it has.
        weights: their shares; None if none were given.
        rule: how sizes are chosen without them.
    """

    devices: int
    weights: tuple[float, ...] | None = None
    rule: Rule = "even"


@dataclass(frozen=True)
class Shares:
    """How many samples of a batch each process gets: called with the batch size.

    Attributes:
        device_counts: how many devices each process has.
        weights: shares of all devices, those of the first process first; None for what `rule` says.
        rule: how sizes are chosen without them.
    """

    device_counts: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    rule: Rule = "even"

    def __call__(self, n: int) -> Sizes:
        """The sizes of all processes' parts of a batch of n samples."""
        return between_processes(n, self.device_counts, self.weights, self.rule)


def agreed_shares(told: Sequence[OwnShare]) -> Shares:
    """How many samples each process gets, by what all have told of themselves.

    Raises:
        ValueError: what they have told does not go together.

    Example:
        >>> agreed_shares([OwnShare(3, (1, 1, 1)), OwnShare(3, (2, 2, 2))])(9)
        (3, 6)
    """
    has_weights = [own.weights is not None for own in told]
    if len(set(has_weights)) > 1:
        raise ValueError(
            f"weights: expected them in all processes or in none, got {_by_rank(told)}. Give every "
            "machine's processes the weights of its devices."
        )
    rules = {own.rule for own in told}
    if len(rules) > 1:
        raise ValueError(
            f"split: expected the same in all processes, got {_listed(own.rule for own in told)}. "
            "Start all of them with the same options."
        )
    counts = tuple(own.devices for own in told)
    if not all(has_weights):
        return Shares(counts, None, told[0].rule)
    weights = tuple(plain_weight(weight) for own in told for weight in own.weights or ())
    if not any(weights):
        raise ValueError(
            f"weights: expected one above 0 in some process, got {_by_rank(told)}. Give the "
            "devices that are to work more."
        )
    return Shares(counts, weights, told[0].rule)


def _by_rank(told: Sequence[OwnShare]) -> str:
    return _listed(None if own.weights is None else list(own.weights) for own in told)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(f"{value!r} in process {rank}" for rank, value in enumerate(values))
