"""`self.log` of all replicas becomes one log call, with the value one device would have logged.

The calls of replicas, of metrics too, stand side by side first: see `aligned`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter, signature
from itertools import compress
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dp.lightning_private import batch_value, keep_batch_value, results_of
from lightning_dp.metrics.arguments import MetricCall, MetricValue
from lightning_dp.metrics.torchmetrics_on_replicas import Returned, standing_alone, value_of_batch
from lightning_dp.parallel.comm import to_device_coalesced
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.devices import replica_names, replica_text
from lightning_dp.parallel.gather import add_up
from lightning_dp.parallel.scatter import Shards, weighted_mean
from lightning_dp.parallel.split import Order

# `log(name, value, prog_bar, logger, ...)`: options are often given by position.
_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]


def option_names(log: Callable[..., Any]) -> Sequence[str]:
    """The names of the options that a module's own `log` takes by position."""
    options = list(signature(log).parameters.values())
    if any(option.kind is Parameter.VAR_POSITIONAL for option in options):
        return _OPTIONS  # it hands them on
    return [o.name for o in options[3:] if o.kind is Parameter.POSITIONAL_OR_KEYWORD]


class LogCall(NamedTuple):
    """A call of `self.log` on one replica: the value is a number, a tensor, or the own metric.

    It may be `from_metric`: then that of the batch is known after the step. Instead of a value that
    a shard is too small for, it is the error.
    """

    key: tuple[object, ...]  # equal for the same call on different replicas
    name: str
    value: Any
    options: Mapping[str, Any]
    from_metric: MetricValue | None = None


Call: TypeAlias = LogCall | MetricCall
Row: TypeAlias = dict[int, Any]
"""The same call of several replicas, by the number of the replica among those that work."""


class LateLog(NamedTuple):
    """A call of `self.log` that is still to be made, and a metric's value of the batch by then."""

    call: LogCall
    batch_value: Any


def log_late(module: LightningModule, logs: Sequence[LateLog], samples: int | None = None) -> None:
    """Makes the calls, when the metrics may have other values already.

    Args:
        module: the user's.
        logs: the calls.
        samples: how many samples all processes have, if the values are those of several.
    """
    with nullcontext() if samples is None else _for_all(module, samples):
        for call, value in logs:
            latest = batch_value(call.value) if isinstance(call.value, nn.Module) else None
            is_later = value is not latest
            if is_later:
                keep_batch_value(call.value, value)
            try:
                module.log(call.name, call.value, **call.options)
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"self.log({call.name!r}): expected room for the values that a step logs, got: "
                    f"{error} Make the batch smaller."
                ) from error
            if is_later:
                keep_batch_value(call.value, latest)


@contextmanager
def _for_all(module: LightningModule, samples: int) -> Iterator[None]:
    """While it lasts, logged values are of all processes already, over so many samples.

    Whatever the module's own `log` hands on: "to be synced, by rank 0 alone" has Lightning neither
    sync nor warn that nobody does, and the batch that it knows is this process's part.
    """
    results = results_of(module.trainer)
    if results is None:
        yield
        return
    own = results.log

    def log(*args: Any, batch_size: int | None = None, **options: Any) -> None:
        of_all = {**options, "sync_dist": True, "rank_zero_only": True}
        own(*args, batch_size=samples if batch_size is None else batch_size, **of_all)

    with replaced(results, log=log):
        yield


def log_call(
    name: str,
    value: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaving: Collection[torch.device] = (),
    names: Sequence[str] = _OPTIONS,
    from_metric: MetricValue | None = None,
) -> LogCall:
    """From the arguments of `self.log`; copies tensors, to which the step may still write.

    Options given by position have these names.

    Those on devices that they are `leaving` go to the host, and are there when it has waited.
    """
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(value, Tensor) and options.get("enable_graph"):
        value = value.clone()
    elif isinstance(value, Tensor):
        value = value.detach()
        leaves = value.device in leaving
        value = value.to("cpu", non_blocking=True, copy=True) if leaves else value.clone()
    return LogCall(("log", name), name, value, options, from_metric)


def merged_log(
    calls: Sequence[LogCall], sizes: Sequence[int], device: torch.device, varying: set[str]
) -> LogCall:
    """One call of `self.log` that says what the replicas' calls, in shard order, say together.

    | `reduce_fx`      | value                                                                |
    |------------------|----------------------------------------------------------------------|
    | `"mean"`         | mean, weighted by shard size or by the user's own `batch_size`       |
    | `"sum"`          | sum                                                                  |
    | `"min"`, `"max"` | smallest, largest                                                    |
    | any, of a metric | the metric itself, which by then has seen the whole batch            |

    The `batch_size` of replicas is added up. One that is the same on shards of unequal sizes is a
    constant, and shards weigh by their sizes, unless it has differed between shards before: then
    its name is in `varying`, to which names are added here.
    Tensors are on the device, see `brought_to`.
    """
    first = calls[0]
    if len(calls) == 1:
        return first
    told = [call.options for call in calls]
    if any([isinstance(options.get("batch_size"), Tensor) for options in told]):
        told = list(map(_with_number, told))
    if told.count(told[0]) < len(calls):
        _check_options(first.name, told)
    options, weights = dict(told[0]), sizes
    if options.get("batch_size") is not None:
        own = [int(other["batch_size"]) for other in told]
        options["batch_size"] = sum(own)
        if len(set(own)) > 1:
            varying.add(first.name)
        is_constant = add_up(own, sizes) is False and first.name not in varying
        weights = sizes if is_constant else own
    value = next((c.value for c in calls if isinstance(c.value, Exception)), first.value)
    if isinstance(value, Tensor | Number):
        numbers = _as_numbers(calls, device)
        value = _merged(numbers, weights, options.get("reduce_fx", "mean"))
    return first._replace(value=value, options=options)


def late_log(
    merged: LogCall, calls: Sequence[LogCall], returned: Returned, device: torch.device
) -> LateLog:
    """The call that is to be made, with what a metric returns for the batch, if it logs that."""
    if merged.from_metric is not None:
        value = value_of_batch([call.from_metric for call in calls], returned)
        if isinstance(value, Tensor):
            value = _as_numbers([merged._replace(value=value)], device)[0]
        merged = merged if value is None else merged._replace(value=value)
    if isinstance(merged.value, Exception):
        raise merged.value
    is_metric = isinstance(merged.value, nn.Module)
    return LateLog(merged, batch_value(merged.value) if is_metric else None)


def names_of(
    shards: Shards, devices: Sequence[torch.device], process: int | None = None
) -> list[str]:
    """The replicas that work, for people."""
    names = replica_names(devices, process)
    return [f"{replica_text(k, names)} ({shards.sizes[k]} samples)" for k in shards.active]


def check_keys(key: str, present: Collection[int], names: Sequence[str]) -> None:
    """Raises an error if some of the replicas with these names have not logged a key."""
    missing = [name for i, name in enumerate(names) if i not in present]
    if missing:
        raise ValueError(
            f"self.log({key!r}): expected the same keys from every replica, got it from "
            f"{', '.join(names[i] for i in present)}, but not from {', '.join(missing)}. Log it "
            "for every shard; a value that some shards lack can be logged through a torchmetrics "
            "metric."
        )


def brought_to(device: torch.device, journals: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The replicas' calls with logged tensors on the device; from each other one in one copy.

    Nothing waits for these copies that does not wait for the loss: all replicas' are summed, and
    every backward begins with a gradient from where the sum is.
    """
    brought = list(map(list, journals))
    away = []
    for own in brought:  # one frame in every step
        for i, call in enumerate(own):
            value = call.value if isinstance(call, LogCall) else None
            if isinstance(value, Tensor) and value.device != device:
                away.append((own, i))
    if away:
        values = to_device_coalesced([own[i].value for own, i in away], device)
        for (own, i), value in zip(away, values, strict=True):
            own[i] = own[i]._replace(value=value)
    return brought


def _with_number(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Steps give `batch_size` as tensors too, each on its own device."""
    n = options.get("batch_size")
    return {**options, "batch_size": int(n)} if isinstance(n, Tensor) else options


def _check_options(name: str, told: Sequence[Mapping[str, Any]]) -> None:
    for other in told:
        for option in sorted({*told[0], *other} - {"batch_size"}):
            a, b = told[0].get(option), other.get(option)
            if a != b:
                raise ValueError(
                    f"self.log({name!r}): expected the same arguments on every replica, got "
                    f"{option}={a!r} on one and {option}={b!r} on another. "
                    "Do not let them depend on the shard."
                )


def _merged(tensors: list[Tensor], weights: Sequence[float], reduce_fx: Any) -> Tensor:
    if 0 in weights:  # a mean over nothing is NaN, and counts for nothing
        tensors = list(compress(tensors, weights)) or tensors
        weights = list(filter(None, weights)) or [1] * len(tensors)
    how = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
    known: dict[str, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
    reduce = known.get(how)
    return weighted_mean(tensors, weights) if reduce is None else reduce(torch.stack(tensors), 0)


def _as_numbers(calls: Sequence[LogCall], device: torch.device) -> list[Tensor]:
    """Floating tensors of at least single precision, in which Lightning keeps logged values."""
    default = torch.get_default_dtype()
    numbers = []
    for call in calls:
        number = call.value
        if not isinstance(number, Tensor):
            number = torch.tensor(number, dtype=default)
        elif number.dtype not in (torch.float32, torch.float64):
            number = number.to(default if default == torch.float64 else torch.float32)
        numbers.append(number.to(device, non_blocking=device.type != "cpu"))
    return numbers


def aligned(
    journals: Sequence[Sequence[Call]],
    sizes: Sequence[int],
    order: Order | None,
    dim: int,
) -> list[Row]:
    """The replicas' calls side by side: the n-th call with a key stands beside the other n-th ones.

    They come in the order of the first replica; calls that it did not make come last. Calls of a
    metric that were made sample by sample stand alone, in the order of the batch.
    """
    rows: dict[tuple[tuple[object, ...], int], Row] = {}
    of_metrics: dict[tuple[object, ...], list[Row]] = {}
    for k, calls in enumerate(journals):
        counts: Counter[tuple[object, ...]] = Counter()
        for call in calls:
            row = rows.setdefault((call.key, counts[call.key]), {})
            if not row and isinstance(call, MetricCall):
                of_metrics.setdefault(call.key, []).append(row)
            row[k] = call
            counts[call.key] += 1
    alone = standing_alone(of_metrics, sizes, order, dim) if of_metrics else {}
    aligned: list[Row] = []
    for (key, n), row in rows.items():
        if key not in alone:
            aligned.append(row)
        elif n == 0:
            aligned.extend(alone[key])
    return aligned
