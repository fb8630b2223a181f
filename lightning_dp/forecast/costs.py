"""Costs: what messages take, by Hockney's model of a link.

A message of `n` bytes takes `seconds + n / bytes_per_second` (R. W. Hockney, The communication
challenge for MPP, Parallel Computing 20, 1994; also called alpha and beta). Links are full duplex,
everybody sends to one and receives from one at a time, and sums take no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

AllReduce: TypeAlias = Literal["best", "ring", "tree"]
Gather: TypeAlias = Literal["ring", "tree"]
ALL_REDUCES: tuple[AllReduce, ...] = ("best", "ring", "tree")
GATHERS: tuple[Gather, ...] = ("ring", "tree")


@dataclass(frozen=True)
class Link:
    """One direction of the way between two devices, or between two machines.

    Args:
        bytes_per_second: more than 0.
        seconds: until the first byte arrives, at least 0.
    """

    bytes_per_second: float
    seconds: float

    def __post_init__(self) -> None:
        """Refuses what no link is like."""
        if not (self.bytes_per_second > 0 and 0 <= self.seconds < math.inf):
            raise ValueError(
                "Expected a link with bytes_per_second of more than 0 and seconds of at least 0, "
                f"got {self.bytes_per_second} and {self.seconds}."
            )

    def crossing(self, size: float) -> float:
        """Seconds of a message of so many bytes.

        Example:
            >>> Link(bytes_per_second=2.0, seconds=1.0).crossing(6)
            4.0
        """
        return self.seconds + size / self.bytes_per_second


def rounds_of_tree(count: int) -> int:
    """How often those who know something have to double until all of `count` do.

    Example:
        >>> [rounds_of_tree(count) for count in (1, 2, 3, 1024)]
        [0, 1, 2, 10]
    """
    return (count - 1).bit_length()


def ring_pass(size: float, count: int, link: Link) -> float:
    """Once round a ring: a reduce-scatter, or an all-gather, of `size` bytes in all.

    Each of `count - 1` exchanges carries a `count`-th of it.
    """
    return (count - 1) * link.crossing(size / count)


def ring_all_reduce(size: float, count: int, link: Link) -> float:
    """The sum of `size` bytes of each of `count`, in all of them, round a ring.

    A reduce-scatter and then an all-gather: `2 (count - 1)` exchanges. Nothing that is sent can be
    less in bytes (P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, Journal of Parallel and Distributed Computing 69, 2009), but latencies add up.

    Example:
        >>> ring_all_reduce(8.0, 4, Link(bytes_per_second=1.0, seconds=0.0))
        12.0
    """
    return 2 * ring_pass(size, count, link)


def tree_all_reduce(size: float, count: int, link: Link) -> float:
    """The same by trees: up to a root, and down again.

    The better of two. A binomial tree passes on all of it in each of its `h` rounds, which is best
    for small messages. Two binary trees at once, in which nobody has work in both, pass on blocks:
    with `k` blocks in each tree, one way takes `2 h + 2 k` rounds of a block (P. Sanders, J. Speck,
    J. L. Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
    Computing 35, 2009). Here `k` is the best number, a whole one.
    """
    height = rounds_of_tree(count)
    if not height:
        return 0.0
    crossing = size / link.bytes_per_second
    two_trees = min(
        2 * (height + blocks) * (link.seconds + crossing / (2 * blocks))
        for blocks in _blocks(crossing, height, link.seconds)
    )
    return 2 * min(height * (link.seconds + crossing), two_trees)


def _blocks(crossing: float, height: int, seconds: float) -> tuple[int, int]:
    """The whole numbers beside the best number of blocks; where messages cost nothing, many."""
    best = math.sqrt(height * crossing / (2 * seconds)) if seconds else math.inf
    whole = int(min(max(best, 1.0), 1e6))
    return whole, whole + 1


def all_reduce(size: float, count: int, link: Link, way: AllReduce = "best") -> float:
    """The sum of all in all: `"ring"` as gloo does it, or the `"best"` of both, as NCCL chooses."""
    if way == "ring":
        return ring_all_reduce(size, count, link)
    tree = tree_all_reduce(size, count, link)
    return tree if way == "tree" else min(tree, ring_all_reduce(size, count, link))


def gather(size: float, count: int, link: Link, way: Gather = "ring") -> float:
    """All get what each has, which is of `size` bytes.

    Round a ring, as gloo does it, or with twice as much in each round (J. Bruck and others:
    Efficient algorithms for all-to-all communications in multiport message-passing systems, IEEE
    Transactions on Parallel and Distributed Systems 8, 1997).

    Example:
        >>> link = Link(bytes_per_second=1e9, seconds=1.0)
        >>> round(gather(8, 1024, link, "ring")), round(gather(8, 1024, link, "tree"))
        (1023, 10)
    """
    messages = count - 1 if way == "ring" else rounds_of_tree(count)
    return messages * link.seconds + (count - 1) * size / link.bytes_per_second


def ring_link(machines: int, devices: int, local: Link, network: Link) -> Link:
    """What all links of a ring of all devices are like, if its slowest is its speed.

    The ring enters and leaves each machine once. A message's latency is the mean of its hops'.

    Example:
        >>> ring_link(2, 4, Link(8.0, 1.0), Link(2.0, 5.0))
        Link(bytes_per_second=2.0, seconds=2.0)
    """
    if machines == 1:
        return local
    if devices == 1:
        return network
    seconds = (network.seconds + (devices - 1) * local.seconds) / devices
    return Link(min(local.bytes_per_second, network.bytes_per_second), seconds)
