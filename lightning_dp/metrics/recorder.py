"""What replicas log and measure in a step is recorded, and made once on the user's module after it.

A plain step passes through this file alone: `ReplicaRecord.log` stands for `self.log` on every
replica, `StepRecorder.around` surrounds the replicas' run, and `merged_log` makes one call of
theirs. Metrics are in `metric_calls`; what a step leaves on self is in `lightning_dp.state`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from itertools import compress
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dp.lightning_private import own_device, results_of
from lightning_dp.metrics.metric_calls import (
    MetricCall,
    RecordedMetric,
    is_metric,
    metrics_in,
    never,
    replay,
    state_of_metric,
)
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.devices import replica_names, replica_text
from lightning_dp.parallel.gather import are_per_shard
from lightning_dp.parallel.replicate import ReplicaRules, Replicas
from lightning_dp.parallel.scatter import Shards, tree, weighted_mean
from lightning_dp.state import ModuleState, warn_of_step

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

_LOG_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]
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

    The value is a number, a tensor or a `MetricAt`. If a metric's `forward` has returned it, it has
    a `source`: the value over the whole batch is known after the step.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    source: Source | None = None


Call: TypeAlias = LogCall | MetricCall


class Records(NamedTuple):
    """The calls of replicas, with the sizes and the names of these."""

    calls: Sequence[Sequence[Call]]
    sizes: Sequence[int]
    replicas: list[str]
    dim: int = 0


class ReplicaRecord:
    """The calls that one replica, on a device, makes during one step.

    What is logged from one of the `leaving` devices goes to the host at once, without a wait: the
    engine waits for these, once, before the step ends.
    """

    def __init__(self, device: torch.device, leaving: Collection[torch.device] = ()) -> None:
        self.device, self.calls, self._leaving = device, list[Call](), leaving
        self.numbers: dict[int, int] = {}  # of the metrics, by their ids
        self._sources: dict[int, tuple[Any, Source]] = {}  # of what metrics returned, by ids
        self._forwards: Counter[int] = Counter()

    def clear(self) -> None:
        """Lets go of what was recorded."""
        self.calls.clear()
        self._sources.clear()
        self._forwards.clear()

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands for `self.log`; copies tensors, to which the step may still write."""
        if args:
            options = {**dict(zip(_LOG_OPTIONS, args, strict=False)), **options}
        _, source = self._sources.get(id(value), (None, None))
        if isinstance(value, Tensor):
            value = value if options.get("enable_graph") else value.detach()
            leaves = value.device in self._leaving and not value.requires_grad
            value = value.to("cpu", non_blocking=True) if leaves else value.clone()
        elif id(value) in self.numbers:
            value = MetricAt(self.numbers[id(value)])
        self.calls.append(LogCall(name, value, options, source))

    def note_value(self, value: Any, metric: int) -> None:
        """Notes what a metric's `forward` returned: a step may log it."""
        for i, leaf in enumerate(tree.leaves(value)):
            if isinstance(leaf, Tensor):
                self._sources[id(leaf)] = leaf, Source(metric, self._forwards[metric], i)
        self._forwards[metric] += 1


class StepRecorder(ReplicaRules):
    """Records a step's calls of `self.log` and of metrics, and what it leaves on self.

    After the step the calls of all replicas are merged, and made once on the main thread, on the
    user's module. With several processes those of all ranks are, on every rank; a rank without
    samples replays what the others recorded.

    Args:
        module: the user's module.
        devices: the replicas', root first.
        output_device: where logged values, and items of lists, end up.
        world: the processes that train together; None if this is the only one.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        world: World | None = None,
    ) -> None:
        self._module, self._devices = module, list(devices)
        self._output_device = output_device
        self.world = world
        names = replica_names(devices, None if self.world is None else self.world.rank)
        self._names = [replica_text(k, names) for k in range(len(names))]
        self._varying: set[str] = set()  # logged names whose batch_size differs between shards
        self._warned: set[int] = set()  # metrics that only some replicas have updated
        to_host = output_device.type == "cpu"
        leaving = {device for device in devices if to_host and device.type != "cpu"}
        self._records = [ReplicaRecord(device, leaving) for device in devices]
        # Of replica 0, which is the user's module: it records only while a step lasts.
        self._stand_ins: list[tuple[Any, dict[str, StandIn]]] = []
        self._submodules: list[list[nn.Module]] = []
        self._state = ModuleState(output_device, is_metric)

    # How metrics are replicated

    def has_own_buffer_rules(self, module: nn.Module) -> bool:
        """Metrics are replicated wherever they are kept."""
        return is_metric(module)

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """A replica's `self.device` and `self.log`; a metric's state, and the recorder of it."""
        own: dict[str, Any] = {**own_device(module, device), **state_of_metric(module, device)}
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._records[k].log)
        elif is_metric(module):
            own |= RecordedMetric(self._records[k], twin).methods
        return own

    # A step

    @contextmanager
    def around(
        self, replicas: Replicas, name: str, shards: Shards, is_rerun: bool = False
    ) -> Iterator[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has replayed before. It, and a step that ran out of memory and will run again, leave
        the module as it was.
        """
        self.follow(replicas.submodules)
        self._state.begin(replicas, shards.active)
        try:
            try:
                with ExitStack() as recording:
                    for owner, methods in self._stand_ins:
                        recording.enter_context(replaced(owner, **methods))
                    yield
                if is_rerun:
                    self._state.undo()
                    return
                is_idle = self.world is not None and self.world.is_idle
                self._state.settle(shards, keeps_items=not is_idle)
            except torch.OutOfMemoryError:
                self._state.undo()
                raise
            try:
                self.replay(shards)
            except torch.OutOfMemoryError as error:  # what was logged cannot be taken back
                where = " ".join(getattr(error, "__notes__", ()))
                raise RuntimeError(
                    "Expected room for what a step logs and measures of the whole batch, got: "
                    f"{error} {where} Make the batch smaller."
                ) from error
        finally:
            for record in self._records:
                record.clear()

    def follow(self, submodules: list[list[nn.Module]]) -> None:
        """Finds the metrics of all replicas, if these are others than before."""
        if submodules is not self._submodules:
            self._submodules = submodules
            for record, own in zip(self._records, submodules, strict=True):
                record.numbers = {id(m): n for n, m in enumerate(own) if is_metric(m)}
            first, module = self._records[0], self._module
            self._stand_ins = [(module, {"log": StandIn(module, "log", first.log)})]
            metrics = filter(is_metric, submodules[0])
            self._stand_ins += [(m, RecordedMetric(first, m).methods) for m in metrics]

    def replay(self, shards: Shards) -> None:
        """Makes the merged calls, in the order of the first replica."""
        calls = [self._records[k].calls for k in shards.active]
        if self.world is None and not any(calls):
            return
        names = [f"{self._names[k]} ({shards.sizes[k]} samples)" for k in shards.active]
        dim = shards.row_rules.dim
        found = Records(calls, shards.active_sizes, names, dim)
        logging: AbstractContextManager[None] = nullcontext()
        if self.world is not None:
            found = of_all_ranks(found, self.world)._replace(dim=dim)
            logging = logging_for_all(self._module, sum(found.sizes))
        with logging:
            self._make(found)

    def _make(self, found: Records) -> None:
        """Makes the calls: those of metrics, and then those of `self.log`, which may log these."""
        measured: dict[int, list[list[MetricCall]]] = {}
        logged: dict[tuple[str, int], dict[int, LogCall]] = {}  # the n-th calls of all replicas
        for k, calls in enumerate(found.calls):
            counts: dict[str, int] = {}
            for call in calls:
                if isinstance(call, LogCall):
                    n = counts[call.name] = counts.get(call.name, -1) + 1
                    logged.setdefault((call.name, n), {})[k] = call
                else:
                    measured.setdefault(call.metric, [[] for _ in found.calls])[k].append(call)
        returned = {n: self._measure(n, calls, found) for n, calls in measured.items()}
        for row in logged.values():
            self._log(row, found, returned)

    def _log(
        self, row: Mapping[int, LogCall], found: Records, returned: Mapping[int, list[Any]]
    ) -> None:
        """Makes one call of `self.log` for all replicas."""
        calls = list(row.values())
        if len(row) < len(found.replicas):
            _refuse_missing_key(calls[0].name, row, found.replicas)
        merged = merged_log(calls, found.sizes, self._output_device, self._varying)
        source, value = merged.source, merged.value
        # What a metric returned for the whole batch.
        if source is not None and all(call.source == source for call in calls):
            of_batch = returned[source.metric][source.call : source.call + 1]
            leaves = [leaf for node in of_batch for leaf in tree.leaves(node)][source.leaf :]
            if leaves:
                value = _as_number(leaves[0], self._output_device)
        if isinstance(value, MetricAt):
            value = self._submodules[0][value.number]
        self._module.log(merged.name, value, **merged.options)

    def _measure(
        self, number: int, calls: Sequence[Sequence[MetricCall]], found: Records
    ) -> list[Any]:
        """Makes the replicas' calls of a metric; returns what `forward` has for the whole batch."""
        metric: Any = self._submodules[0][number]
        path = next((name for name, m in self._module.named_modules() if m is metric), "")
        name = f"the metric {path} ({type(metric).__qualname__})"
        has_called = [any(call.method != "reset" for call in own) for own in calls]
        if len(set(has_called)) > 1 and number not in self._warned:
            self._warned.add(number)
            warn_of_step(
                self._module,
                f"{name}: a step has updated it on "
                f"{', '.join(compress(found.replicas, has_called))}, but not on "
                f"{', '.join(compress(found.replicas, (not has for has in has_called)))}, whose "
                "samples it does not see. If the step leaves it out for small batches "
                "(if len(x) > 1), have it updated always: it gets the whole batch.",
            )
        for member in metrics_in(metric) if self.world is not None else ():
            member.distributed_available_fn = never
        return replay(calls, found, metric, name)


# One call of `self.log` for those of all replicas


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
    value, values = first.value, [call.value for call in calls]
    if len(values) == 1:
        value = value.to(device) if isinstance(value, Tensor) else value
    elif isinstance(value, Tensor | Number):  # what else a step logs, Lightning has a word on
        numbers = [_as_number(v, device) for v in values]
        value = _merged(numbers, weights, options.get("reduce_fx", "mean"))
    return LogCall(first.name, value, options, first.source)


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
    is_constant = are_per_shard(own, sizes) is False and name not in varying
    return {**first, "batch_size": sum(own)}, sizes if is_constant else own


def _as_number(number: Any, device: torch.device) -> Tensor:
    """A floating tensor of at least single precision, in which Lightning keeps logged values."""
    default = torch.get_default_dtype()
    value = number if isinstance(number, Tensor) else torch.tensor(number, dtype=default)
    if value.dtype not in _KEPT_DTYPES:
        value = value.to(default if default == torch.float64 else torch.float32)
    return value.to(device, non_blocking=device.type != "cpu")


def _refuse_missing_key(name: str, row: Mapping[int, Any], replicas: Sequence[str]) -> None:
    missing = [replica for k, replica in enumerate(replicas) if k not in row]
    raise ValueError(
        f"self.log({name!r}): expected the same keys from every replica, got it from "
        f"{', '.join(replicas[k] for k in row)}, but not from {', '.join(missing)}. Log it for "
        "every shard; a value that some shards lack can be logged through a torchmetrics metric."
    )


# Several processes: what the replicas of all ranks have recorded is replayed on every rank


def of_all_ranks(own: Records, world: World) -> Records:
    """What the replicas of all ranks recorded, in the order of the batch.

    Every rank takes part in every step: no other rank knows whether it has recorded anything.
    """
    sent = None if world.is_idle else own
    received = world.all_gather_objects(sent, "the end of its step")
    received[world.rank] = sent  # whose values may have a graph
    parts = [part for part in received if part is not None]
    return Records(
        [calls for part in parts for calls in part.calls],
        [size for part in parts for size in part.sizes],
        [name for part in parts for name in part.replicas],
    )


@contextmanager
def logging_for_all(module: LightningModule, samples: int) -> Iterator[None]:
    """In this context `self.log` gets values of all processes, with `samples` as batch size.

    `sync_dist=True, rank_zero_only=True` keeps Lightning from syncing them again, and from warning
    about a missing sync. The batch size is passed, since Lightning knows this process's part only.
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
