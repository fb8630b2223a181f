"""Along: the dimensions along which a call of torch's makes of each element what others are.

Orders of places are no matter here, as they may be undone: `sort`, `argsort`, and what takes by
these. A random order is none that is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class _Dims(NamedTuple):
    """Where a function is told its dimensions: from which argument on, or what it takes else."""

    place: int
    default: tuple[int, ...] = ()


_ORDERS = {
    "flip": _Dims(1),
    "flipud": _Dims(1, (0,)),
    "roll": _Dims(2, (0,)),  # of all dimensions in a row, the first one among them
}
_RUNNING = {name: _Dims(1) for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")}
_SHARES = {
    "log_softmax": _Dims(1),
    "normalize": _Dims(2, (1,)),
    "softmax": _Dims(1),
    "softmin": _Dims(1),
}
_KNOWN = _ORDERS | _RUNNING | _SHARES
_BY_PLACES = {"__getitem__", "index_select"}

MOVES = {"clone", "contiguous", "cpu", "cuda", "long", "to"}
"""What an order that was moved is still."""


def dims_along(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    is_order: Callable[[Any], bool] = lambda argument: False,
) -> tuple[int, ...]:
    """The dimensions along which the elements of the result depend on each other.

    Args:
        name: of the function.
        args: its arguments.
        kwargs: those by name.
        result: what it has returned.
        is_order: whether an argument is a random order.

    Example:
        >>> import torch
        >>> x = torch.ones(3, 2)
        >>> dims_along("softmax", (x, -1), {}, x.softmax(-1))
        (1,)
        >>> dims_along("flip", (x, 0, 1), {}, x.flip(0, 1))
        (0, 1)
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(first, Tensor) or (name in _RUNNING and not first.is_floating_point()):
        return ()  # whole numbers that are added up are places, as those of packed sequences
    by_name = [kwargs[key] for key in ("dim", "dims") if key in kwargs]
    dims: tuple[int, ...] = ()
    if name == "__getitem__":
        dims = _ordered(args[1], is_order)
    elif name == "index_select" and any(map(is_order, (*args, *kwargs.values()))):
        dims = _told(by_name or args[1:2])
    elif name in _KNOWN:
        place, default = _KNOWN[name]
        end = None if name == "flip" else place + 1
        dims = _told(by_name or args[place:end]) or default
    return tuple([dim % first.ndim for dim in dims if first.ndim])


def changes_order(name: str) -> bool:
    """Whether a call changes the order of elements, and nothing else."""
    return name in _ORDERS or name in _BY_PLACES


def _ordered(index: Any, is_order: Callable[[Any], bool]) -> tuple[int, ...]:
    """The dimension that an index puts in another order, where only slices come before that."""
    for dim, own in enumerate(index if isinstance(index, tuple) else (index,)):
        if is_order(own):
            return (dim,)
        if not isinstance(own, slice):
            break
    return ()


def _told(values: Sequence[Any]) -> tuple[int, ...]:
    """The dimensions in arguments, which may be in a sequence."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = values[0]
    return tuple([value for value in values if isinstance(value, int)])
