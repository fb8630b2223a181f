"""How many samples each device gets. Pure arithmetic on ints: no tensor, no device.

Every function returns one size per device; the sizes sum to the batch size, and a size may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

Sizes: TypeAlias = tuple[int, ...]
SplitPolicy: TypeAlias = Callable[[int], Sizes]
"""Batch size in, sizes out."""


def even(n: int, k: int) -> Sizes:
    """Sizes that differ by at most one, the larger ones first.

    Args:
        n: the batch size, in samples.
        k: the number of devices.

    Example:
        >>> even(30, 8), even(2, 4)
        ((4, 4, 4, 4, 4, 4, 3, 3), (1, 1, 0, 0))
    """
    share, rest = divmod(n, k)
    return (share + 1,) * rest + (share,) * (k - rest)


def chunk(n: int, k: int) -> Sizes:
    """The sizes of `torch.chunk` (and `torch.nn.DataParallel`): ceil(n / k) while any is left.

    Args:
        n: the batch size, in samples.
        k: the number of devices.

    Example:
        >>> chunk(30, 8), chunk(9, 4)
        ((4, 4, 4, 4, 4, 4, 4, 2), (3, 3, 3, 0))
    """
    share = -(-n // k)
    return tuple(max(0, min(share, n - i * share)) for i in range(k))


def weighted(n: int, weights: Sequence[float]) -> Sizes:
    """Sizes in proportion to `weights`, rounded by the largest remainder (Hamilton's method).

    The arithmetic is exact, so the answer depends on nothing but the arguments; of equal
    remainders the earlier device wins, and a weight of zero gets nothing.

    Args:
        n: the batch size, in samples.
        weights: one finite number of at least 0 per device, not all 0; only ratios matter.

    Example:
        >>> weighted(96, [1, 2, 3]), weighted(5, [1, 0, 1])
        ((16, 32, 48), (3, 0, 2))
    """
    exact = [Fraction(w) for w in weights]
    quotas = [n * w / sum(exact) for w in exact]
    sizes = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (sizes[i] - quotas[i], i))
    for i in by_remainder[: n - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


_POLICIES: dict[str, Callable[[int, int], Sizes]] = {"even": even, "chunk": chunk}


def check_split(split: str, weights: Sequence[float] | None) -> None:
    """Checks what can be checked before the number of devices is known.

    Raises:
        ValueError: unknown `split`; `weights` together with another split than `"even"`, or
            negative, not finite or all zero.
    """
    if split not in _POLICIES:
        raise ValueError(
            f"split: expected one of {sorted(_POLICIES)}, got {split!r}. "
            "Use 'even', or weights=[...] for fixed shares."
        )
    if weights is None:
        return
    if split != "even":
        raise ValueError(
            f"weights: expected None with split={split!r}, got {list(weights)}. "
            "Leave out one of the two: weights are a split of their own."
        )
    wrong = [w for w in weights if not _is_weight(w)]
    if wrong or not any(weights):
        raise ValueError(
            f"weights: expected finite numbers of at least 0, not all 0, got {list(weights)}. "
            "Give each device its share, such as [1, 3, 3, 3]."
        )


def split_policy(split: str, weights: Sequence[float] | None, k: int) -> SplitPolicy:
    """The function that splits every batch over `k` devices.

    Args:
        split: `"even"` or `"chunk"`.
        weights: fixed shares, one per device, or None.
        k: the number of devices.

    Raises:
        ValueError: as `check_split`, or the number of weights is not `k`.

    Example:
        >>> split_policy("even", [1, 2, 3], 3)(12)
        (2, 4, 6)
    """
    check_split(split, weights)
    if weights is None:
        return lru_cache(maxsize=64)(lambda n: _POLICIES[split](n, k))
    shares = tuple(weights)
    if len(shares) != k:
        raise ValueError(
            f"weights: expected {k} numbers, one per device, got {len(shares)}: {list(shares)}. "
            "Give every device a weight (0 leaves it idle)."
        )
    return lru_cache(maxsize=64)(lambda n: weighted(n, shares))


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0
