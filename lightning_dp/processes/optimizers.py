"""Optimizers: whether those of all processes have the same options, such as learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


def fingerprint(optimizers: Sequence[Any]) -> int:
    """A number of 64 bits that is another one where options of optimizers are others.

    It is the same in every process: that of a text or of None would not be.
    """
    return hash(tuple([value for _, value in _options(optimizers)])) % 2**64


def refuse_others(optimizers: Sequence[Any], world: World) -> None:
    """Says which options differ between processes, which have found that some do.

    Raises:
        ValueError: in every process.
    """
    first, *others = world.gather(dict(_options(optimizers)))
    what, got = "optimizers' options", "others in an earlier batch"
    for rank, other in enumerate(others, 1):
        for place in {**first, **other}:
            if first.get(place) != other.get(place):
                what = "optimizer {}, group {}, {}".format(*place)
                got = f"{first.get(place)} in process 0 and {other.get(place)} in process {rank}"
    raise ValueError(
        f"{what}: expected the same in all processes, got {got}: they would train different "
        "modules. Change it in every process, and not where trainer.is_global_zero alone."
    )


def _options(optimizers: Sequence[Any]) -> list[tuple[tuple[int, int, str], Any]]:
    """Those that are numbers, with their places. On a device the host would have to wait."""
    found = []
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim():
                    value = value.item()
                if isinstance(value, int | float):
                    is_number = value == value  # of NaN every object has a hash of its own
                else:
                    is_number = isinstance(value, tuple) and set(map(type, value)) <= {int, float}
                if is_number:
                    found.append(((i, j, name), value))
    return found
