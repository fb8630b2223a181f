"""`self.log` of all replicas becomes one log call, with the value one device would have logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.batch import StepDims, weighted_mean

# `log(name, value, prog_bar, logger, ...)`: options are often given by position.
_OPTIONS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)


@dataclass(frozen=True)
class LogCall:
    """A call of `self.log` on one replica.

    Attributes:
        name: the key.
        value: a number, a tensor, or the module's own metric.
        options: the other arguments of `LightningModule.log`, by name.
    """

    name: str
    value: Any
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogCall:
        """From the arguments of `self.log`; copies tensors, to which the step may still write."""
        options = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
        if isinstance(value, Tensor):
            value = value.clone() if options.get("enable_graph") else value.detach().clone()
        return cls(name, value, options)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same call on different replicas."""
        return ("log", self.name)


def merged_log(
    calls: Sequence[LogCall], sizes: Sequence[int], device: torch.device, dims: StepDims
) -> LogCall:
    """One call of `self.log` that says what the replicas' calls say together.

    | `reduce_fx`      | value                                                                |
    |------------------|----------------------------------------------------------------------|
    | `"mean"`         | mean, weighted by shard size or by the user's own `batch_size`       |
    | `"sum"`          | sum                                                                  |
    | `"min"`, `"max"` | smallest, largest                                                    |
    | any, of a metric | the metric itself, which by then has seen the whole batch            |

    A `batch_size` that is the same on shards of unequal sizes is a constant; others are added up.

    Args:
        calls: the same call of every active replica, in shard order.
        sizes: samples of these replicas.
        device: the output device.
        dims: what is known of this kind of step.
    """
    first = calls[0]
    _check_options(calls)
    options, weights = dict(first.options), list(map(float, sizes))
    if options.get("batch_size") is not None and len(calls) > 1:
        own = [int(call.options["batch_size"]) for call in calls]
        if dims.counts(first.key, own, sizes) is not False:
            weights, options["batch_size"] = list(map(float, own)), sum(own)
    if not isinstance(first.value, Tensor | Number) or len(calls) == 1:
        return LogCall(first.name, first.value, options)
    values = [call.value for call in calls]
    return LogCall(first.name, _merged(values, weights, options, device), options)


def _check_options(calls: Sequence[LogCall]) -> None:
    first = calls[0]
    for call in calls[1:]:
        names = {*first.options, *call.options} - {"batch_size"}
        for name in sorted(names):
            a, b = first.options.get(name), call.options.get(name)
            if a != b:
                raise ValueError(
                    f"self.log({first.name!r}): expected the same arguments on every replica, got "
                    f"{name}={a!r} on one and {name}={b!r} on another. "
                    "Do not let them depend on the shard."
                )


def _merged(
    values: list[Any], weights: list[float], options: Mapping[str, Any], device: torch.device
) -> Any:
    tensors = [_as_number(value, device) for value in values]
    if any(weights):  # a mean over nothing is NaN, and counts for nothing
        tensors = [t for t, weight in zip(tensors, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
    else:
        weights = [1.0] * len(weights)
    reduce_fx = options.get("reduce_fx", "mean")
    how = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
    if how == "sum":
        return torch.stack(tensors).sum(0)
    if how in ("min", "max"):
        stacked = torch.stack(tensors)
        return stacked.amin(0) if how == "min" else stacked.amax(0)
    return weighted_mean(tensors, weights)


def _as_number(value: Any, device: torch.device) -> Tensor:
    """A floating tensor of at least single precision, in which Lightning keeps logged values."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, device=device, dtype=torch.get_default_dtype())
    tensor = value.to(device)
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    default = torch.get_default_dtype()
    return tensor.to(default if default == torch.float64 else torch.float32)
