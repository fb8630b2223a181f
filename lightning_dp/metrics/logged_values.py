"""`self.log` of all replicas becomes one call, with the value that one device would have logged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from itertools import compress
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp.parallel.gather import add_up
from lightning_dp.parallel.scatter import weighted_mean

OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]
"""Of `log(name, value, prog_bar, logger, ...)`: options are often given by position."""

_KEPT_DTYPES = (torch.float32, torch.float64)


class MetricAt(NamedTuple):
    """Stands for a metric: its number among all modules, which is the same in every process."""

    number: int


class Source(NamedTuple):
    """Where a value comes from: the n-th `forward` of a metric in a step, and one of its leaves."""

    metric: int
    call: int
    leaf: int


class LogCall(NamedTuple):
    """A call of `self.log` on one replica.

    The value is a number, a tensor or a metric. If a metric's `forward` has returned it, it has a
    `source`: the value over the whole batch is known after the step.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    source: Source | None = None


def merged_log(
    calls: Sequence[LogCall], sizes: Sequence[int], device: torch.device, varying: set[str]
) -> LogCall:
    """One call of `self.log` that says what the replicas' calls, in shard order, say together.

    | `reduce_fx`      | value                                                                |
    |------------------|----------------------------------------------------------------------|
    | `"mean"`         | mean, weighted by shard size or by the user's own `batch_size`;      |
    |                  | shards whose `batch_size` is 0 are left out                          |
    | `"sum"`          | sum                                                                  |
    | `"min"`, `"max"` | smallest, largest                                                    |
    | any, of a metric | the metric itself, which by then has seen the whole batch            |

    Values are brought to the device; `varying` is the names for `_own_weights`.
    """
    first = calls[0]
    options, weights = first.options, sizes
    given = [call.options for call in calls]
    if "batch_size" in options or given.count(options) < len(given):
        options, weights = _own_weights(first.name, given, sizes, varying)
    if not isinstance(first.value, Tensor | Number):
        return first._replace(options=options)
    values = [call.value for call in calls]
    if len(values) == 1:
        value = values[0].to(device) if isinstance(values[0], Tensor) else values[0]
        return first._replace(value=value, options=options)
    values = [
        v
        if isinstance(v, Tensor) and v.dtype in _KEPT_DTYPES and v.device == device
        else as_number(v, device)
        for v in values
    ]
    reduce_fx = options.get("reduce_fx", "mean")
    return first._replace(value=_merged(values, weights, reduce_fx), options=options)


def _own_weights(
    name: str, given: Sequence[Mapping[str, Any]], sizes: Sequence[int], varying: set[str]
) -> tuple[Mapping[str, Any], Sequence[int]]:
    """The options of the joint call, and the weights of the replicas' values.

    The `batch_size` of replicas is added up. One that is the same on shards of unequal sizes is a
    constant, and shards weigh by their sizes, unless it has differed between shards before: then
    its name is in `varying`, to which names are added here.
    """
    first = given[0]
    for other in given:
        for option in sorted({*first, *other} - {"batch_size"}):
            a, b = first.get(option), other.get(option)
            if a != b:
                raise ValueError(
                    f"self.log({name!r}): expected the same arguments on every replica, got "
                    f"{option}={a!r} on one and {option}={b!r} on another. "
                    "Do not let them depend on the shard."
                )
    if first.get("batch_size") is None:
        return first, sizes
    own = [int(options["batch_size"]) for options in given]
    if len(set(own)) > 1:
        varying.add(name)
    is_constant = add_up(own, sizes) is False and name not in varying
    return {**first, "batch_size": sum(own)}, sizes if is_constant else own


def as_number(number: Any, device: torch.device) -> Tensor:
    """A floating tensor of at least single precision, in which Lightning keeps logged values."""
    default = torch.get_default_dtype()
    value = number if isinstance(number, Tensor) else torch.tensor(number, dtype=default)
    if value.dtype not in _KEPT_DTYPES:
        value = value.to(default if default == torch.float64 else torch.float32)
    return value.to(device, non_blocking=device.type != "cpu")


def _merged(tensors: list[Tensor], weights: Sequence[float], reduce_fx: Any) -> Tensor:
    how = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
    known: dict[str, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
    if how in known:
        merged: Tensor = known[how](torch.stack(tensors), 0)
        return merged
    if 0 in weights:  # a mean over nothing is NaN, and counts for nothing
        tensors = list(compress(tensors, weights)) or tensors
        weights = list(filter(None, weights)) or [1] * len(tensors)
    return weighted_mean(tensors, weights)


def check_keys(name: str, present: Collection[int], replicas: Sequence[str]) -> None:
    """Raises an error if some of the replicas with these names have not logged a key."""
    missing = [replica for i, replica in enumerate(replicas) if i not in present]
    if missing:
        raise ValueError(
            f"self.log({name!r}): expected the same keys from every replica, got it from "
            f"{', '.join(replicas[i] for i in present)}, but not from {', '.join(missing)}. Log it "
            "for every shard; a value that some shards lack can be logged through a torchmetrics "
            "metric."
        )
