"""`self.log` of all replicas becomes one call, with the value that one device would have logged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from itertools import compress
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp.lightning_private import results_of
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.gather import add_up
from lightning_dp.parallel.scatter import weighted_mean

# `log(name, value, prog_bar, logger, ...)`: options are often given by position.
_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]


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
    `source`: the value over the whole batch is known after the step. In place of a value that a
    shard is too small for it is the metric's error.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    source: Source | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same call on different replicas."""
        return "log", self.name


def option_names(log: Callable[..., Any]) -> Sequence[str]:
    """The names of the options that a module's own `log` takes by position."""
    options = list(signature(log).parameters.values())
    if any(option.kind is Parameter.VAR_POSITIONAL for option in options):
        return _OPTIONS  # it hands them on
    return [o.name for o in options[3:] if o.kind is Parameter.POSITIONAL_OR_KEYWORD]


def log_call(
    name: str,
    value: Any,
    options: Mapping[str, Any],
    leaving: Collection[torch.device] = (),
    source: Source | None = None,
) -> LogCall:
    """Records a call; copies tensors, to which the step may still write.

    Tensors on the devices `leaving` go to the host at once, where they are after its next wait.
    """
    if isinstance(value, Tensor) and options.get("enable_graph"):
        value = value.clone()
    elif isinstance(value, Tensor):
        value = value.detach()
        leaves = value.device in leaving
        value = value.to("cpu", non_blocking=True, copy=True) if leaves else value.clone()
    return LogCall(name, value, options, source)


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

    The `batch_size` of replicas is added up. One that is the same on shards of unequal sizes is a
    constant, and shards weigh by their sizes, unless it has differed between shards before: then
    its name is in `varying`, to which names are added here.
    """
    first = calls[0]
    if len(calls) == 1:
        return first
    given = [_with_number(call.options) for call in calls]
    if given.count(given[0]) < len(calls):
        _check_options(first.name, given)
    options, weights = dict(given[0]), sizes
    if options.get("batch_size") is not None:
        own = [int(other["batch_size"]) for other in given]
        options["batch_size"] = sum(own)
        if len(set(own)) > 1:
            varying.add(first.name)
        is_constant = add_up(own, sizes) is False and first.name not in varying
        weights = sizes if is_constant else own
    value = next((c.value for c in calls if isinstance(c.value, Exception)), first.value)
    if isinstance(value, Tensor | Number):
        numbers = [as_number(call.value, device) for call in calls]
        value = _merged(numbers, weights, options.get("reduce_fx", "mean"))
    return first._replace(value=value, options=options)


def as_number(number: Any, device: torch.device) -> Tensor:
    """A floating tensor of at least single precision, in which Lightning keeps logged values."""
    default = torch.get_default_dtype()
    value = number if isinstance(number, Tensor) else torch.tensor(number, dtype=default)
    if value.dtype not in (torch.float32, torch.float64):
        value = value.to(default if default == torch.float64 else torch.float32)
    return value.to(device, non_blocking=device.type != "cpu")


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


_OF_PROCESSES = ("sync_dist", "sync_dist_group", "rank_zero_only")
"""Options of `self.log` about processes: a value of all of them is everywhere the same."""


def without_sync(call: LogCall) -> LogCall:
    """The call without the options about processes."""
    if call.options.keys().isdisjoint(_OF_PROCESSES):
        return call
    return call._replace(options={n: v for n, v in call.options.items() if n not in _OF_PROCESSES})


@contextmanager
def logging_for_all(module: LightningModule, samples: int) -> Iterator[None]:
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


def _with_number(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Steps give `batch_size` as tensors too, each on its own device."""
    n = options.get("batch_size")
    return {**options, "batch_size": int(n)} if isinstance(n, Tensor) else options


def _check_options(name: str, given: Sequence[Mapping[str, Any]]) -> None:
    for other in given:
        for option in sorted({*given[0], *other} - {"batch_size"}):
            a, b = given[0].get(option), other.get(option)
            if a != b:
                raise ValueError(
                    f"self.log({name!r}): expected the same arguments on every replica, got "
                    f"{option}={a!r} on one and {option}={b!r} on another. "
                    "Do not let them depend on the shard."
                )


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
