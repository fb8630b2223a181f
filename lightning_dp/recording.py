"""What replicas log and measure in a step is recorded, and made once on the user's module after it.

On a replica `self.log` (`ReplicaRecord.log`) and a metric's methods (`RecordedMetric`) record their
arguments. `StepRecorder.around` surrounds the replicas' run. After it the calls of all replicas are
joined in shard order: a metric gets the very call that one device would have made, with the whole
batch, and `merged_log` makes one call of `self.log`. With several processes the records of all
ranks are joined, in each of them. What a step leaves on self is in `lightning_dp.module_state`.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import compress
from numbers import Number
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    SumMetric,
)

from lightning_dp.lightning_private import (
    keep_batch_value,
    own_device,
    results_of,
    state_defaults,
    unused_state,
)
from lightning_dp.module_state import ModuleState, warn_of_step
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.devices import replica_names, replica_text
from lightning_dp.parallel.errors import noted
from lightning_dp.parallel.gather import Join, RowRules, as_rows, fit_shapes
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards, to_device, tree, weighted_mean

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

AnyMetric: TypeAlias = Metric | MetricCollection

_LOG_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]
"""Of `log(name, value, prog_bar, logger, ...)`: options are often given by position."""
_METHODS = ("forward", "update", "compute", "reset")
_OF_EVERY_METRIC = frozenset({*vars(SumMetric()), *_METHODS})
_KEPT_DTYPES = (torch.float32, torch.float64)


# What is recorded


class MetricAt(NamedTuple):
    """Stands for a metric, or for a leaf of what its k-th `forward` of a step returned.

    The metric is its number among all modules: the same on all replicas and in every process.
    """

    number: int
    call: int = 0
    leaf: int = 0


class LogCall(NamedTuple):
    """A call of `self.log` on one replica.

    The value is a number, a tensor or a `MetricAt`. If a metric's `forward` has returned it, it has
    a `source`: the value over the whole batch is known after the step.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    source: MetricAt | None = None


class MetricCall(NamedTuple):
    """A call of a metric on one replica; tensors are detached copies."""

    metric: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Records(NamedTuple):
    """The calls of the replicas that had samples, and their sizes and names."""

    calls: Sequence[Sequence[LogCall | MetricCall]]
    sizes: Sequence[int]
    replicas: Sequence[str]
    num_replicas: int  # also of those without samples
    dim: int = 0


# On a replica


class ReplicaRecord:
    """The calls that one replica, on a device, makes during one step.

    Tensors logged on the `leaving` devices are copied to the CPU with `non_blocking=True`; the
    engine synchronizes with these devices once, before the step ends.
    """

    def __init__(self, device: torch.device, leaving: Collection[torch.device] = ()) -> None:
        self.device, self.calls, self._leaving = device, list[LogCall | MetricCall](), leaving
        self.numbers: dict[int, int] = {}  # of the metrics, by their ids
        self._sources: dict[int, tuple[Any, MetricAt]] = {}  # of what metrics returned, by ids
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

    def note_value(self, value: Any, number: int) -> None:
        """Notes what a metric's `forward` returned: a step may log it."""
        for i, leaf in enumerate(tree.leaves(value)):
            if isinstance(leaf, Tensor):
                self._sources[id(leaf)] = leaf, MetricAt(number, self._forwards[number], i)
        self._forwards[number] += 1


class RecordedMetric:
    """Records the calls that one replica makes on one metric.

    A `forward` also runs where it is called, on a reset copy of the metric: its value, which may be
    a loss, is the shard's.

    Attributes:
        methods: what stands for the metric's methods.
    """

    def __init__(self, record: ReplicaRecord, metric: Any) -> None:
        self._record, self._metric = record, weakref.ref(metric)  # which keeps this object
        self.methods = {name: StandIn(metric, name, getattr(self, name)) for name in _METHODS}
        self._copy: AnyMetric | None = None
        self._copied: list[Any] = []  # the attributes that it was copied with

    @property
    def metric(self) -> AnyMetric:
        """The replica's metric, which lives while its methods are called."""
        return cast(AnyMetric, self._metric())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples; that of all samples comes after the step.

        NaN for a shard that is too small for the metric: one device calls it with the whole batch,
        and so does the replay, which raises the error if there is one.
        """
        call = self._append("forward", args, kwargs)
        try:
            value = self._reset_copy()(*args, **kwargs)
        except Exception as error:
            if type(error) not in (ValueError, RuntimeError):
                raise
            value = torch.tensor(float("nan"), device=self._record.device)
        self._record.note_value(value, call.metric)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Records the call."""
        self._append("update", args, kwargs)

    def reset(self) -> None:
        """Records the call."""
        self._append("reset", (), {})

    def compute(self) -> NoReturn:
        """Refuses: a replica knows only its own samples."""
        raise RuntimeError(
            f"Expected compute() of {type(self.metric).__qualname__} to be called after the step: "
            "during it a replica knows only its own samples. Log the metric object with "
            "self.log(name, metric), or call compute() in an epoch-end hook."
        )

    def _append(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetricCall:
        """Records a call; what the step does to its tensors afterwards must not matter."""
        args, kwargs = tree.map_leaves(
            lambda leaf: (
                tree.like(leaf, leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf
            ),
            (args, kwargs),
        )
        call = MetricCall(self._record.numbers[id(self.metric)], method, args, kwargs)
        self._record.calls.append(call)
        return call

    def _reset_copy(self) -> AnyMetric:
        """A copy takes longer than a forward: it is kept until an attribute is bound anew."""
        metric, device = self.metric, self._record.device
        now = []
        for module in metric.modules():
            states = state_defaults(module) if isinstance(module, Metric) else {}
            apart = _OF_EVERY_METRIC.union(states)
            now += [value for name, value in vars(module).items() if name not in apart]
        is_same = len(now) == len(self._copied) and all(map(is_, now, self._copied))
        trains = any(p.requires_grad for p in metric.parameters())
        if self._copy is not None and is_same and not trains:
            self._copy.reset()
            return self._copy
        self._copy, self._copied = reset_copy(metric), now
        if not trains and any(m.device != device for m in metrics_in(self._copy)):
            self._copy.to(device)  # in forward mode metrics are on the output device
        return self._copy


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def metrics_in(module: nn.Module) -> list[Metric]:
    """The metrics among a module and its submodules."""
    return [member for member in module.modules() if isinstance(member, Metric)]


def reset_copy(metric: AnyMetric) -> AnyMetric:
    """A copy of a metric that has seen nothing; parameters are the metric's own."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in metric.parameters()}
    for member in metrics_in(metric):
        # States may be long, and values may have graphs, which cannot be copied.
        for name in (*state_defaults(member), "_computed", "_forward_cache"):
            value = getattr(member, name, None)
            memo[id(value)] = [] if isinstance(value, list) else value
    clone = copy.deepcopy(metric, memo)
    clone.reset()
    for member in metrics_in(clone):
        member.distributed_available_fn = _never
    return clone


def _never() -> bool:
    """Whether a metric may sync with other processes: its states are those of all already."""
    return False


# Around a step


class StepRecorder:
    """Records a step's calls of `self.log` and of metrics, and what it leaves on self.

    After the step the calls of all replicas are merged, and made once on the main thread, on the
    user's module. With several processes those of all ranks are, on every rank; a rank without
    samples replays what the others recorded. Logged values and items of lists end up on the output
    device.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
        world: World | None = None,
    ) -> None:
        self._module, self._output_device, self._world = module, output_device, world
        names = replica_names(devices, None if world is None else world.rank)
        self._names = [replica_text(k, names) for k in range(len(names))]
        # By logged name the batch_size that all shards have named so far; None if they differ.
        self._batch_sizes: dict[str, int | None] = {}
        self._warned: set[int] = set()  # metrics that only some replicas have updated
        to_host = output_device.type == "cpu"
        leaving = {device for device in devices if to_host and device.type != "cpu"}
        self._records = [ReplicaRecord(device, leaving) for device in devices]
        # Of replica 0, which is the user's module: it records only while a step lasts.
        self._stand_ins: list[tuple[Any, dict[str, StandIn]]] = []
        self._submodules: list[list[nn.Module]] = []
        self._state = ModuleState(output_device, is_metric)

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """A replica's `self.device` and `self.log`; a metric's state, and the recorder of it."""
        own: dict[str, Any] = dict(own_device(module, device))
        if isinstance(module, Metric):
            own |= unused_state(module, device)
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._records[k].log)
        elif is_metric(module):
            own |= RecordedMetric(self._records[k], twin).methods
        return own

    @contextmanager
    def around(
        self, replicas: Replicas, name: str, shards: Shards, is_rerun: bool = False
    ) -> Iterator[None]:
        """Records while the replicas run, then replays.

        A rerun (after its backward ran out of memory) is not replayed: the first run was. Its
        changes of the module's state are undone, as are those of a step that runs out of memory.
        """
        self._follow(replicas.submodules)
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
                is_idle = self._world is not None and self._world.is_idle
                self._state.settle(shards, keeps_items=not is_idle)
            except torch.OutOfMemoryError:
                self._state.undo()
                raise
            try:
                self._replay(shards)
            except torch.OutOfMemoryError as error:  # what was logged cannot be taken back
                where = " ".join(getattr(error, "__notes__", ()))
                raise RuntimeError(
                    "Expected room for what a step logs and measures of the whole batch, got: "
                    f"{error} {where} Make the batch smaller."
                ) from error
        finally:
            for record in self._records:
                record.clear()

    def _follow(self, submodules: list[list[nn.Module]]) -> None:
        """Finds the metrics of all replicas, if these are others than before."""
        if submodules is not self._submodules:
            self._submodules = submodules
            for record, own in zip(self._records, submodules, strict=True):
                record.numbers = {id(m): n for n, m in enumerate(own) if is_metric(m)}
            first, module = self._records[0], self._module
            self._stand_ins = [(module, {"log": StandIn(module, "log", first.log)})]
            metrics = filter(is_metric, submodules[0])
            self._stand_ins += [(m, RecordedMetric(first, m).methods) for m in metrics]

    def _replay(self, shards: Shards) -> None:
        """Makes the calls of all replicas: those of metrics, then of `self.log`, which logs these.

        In the order of the first replica.
        """
        recorded = [self._records[k].calls for k in shards.active]
        if self._world is None and not any(recorded):
            return
        names = [f"{self._names[k]} ({shards.sizes[k]} samples)" for k in shards.active]
        found = Records(
            recorded, shards.active_sizes, names, len(self._names), shards.row_rules.dim
        )
        logging: AbstractContextManager[None] = nullcontext()
        if self._world is not None:
            found = _of_all_ranks(found, self._world)
            logging = _logging_for_all(self._module, sum(found.sizes))
        measured: dict[int, list[list[MetricCall]]] = {}
        logged: dict[tuple[str, int], dict[int, LogCall]] = {}  # the n-th calls of all replicas
        for k, calls in enumerate(found.calls):
            counts: Counter[str] = Counter()
            for call in calls:
                if isinstance(call, MetricCall):
                    measured.setdefault(call.metric, [[] for _ in found.calls])[k].append(call)
                else:
                    logged.setdefault((call.name, counts[call.name]), {})[k] = call
                    counts[call.name] += 1
        with logging:
            returned = {n: self._measure(n, calls, found) for n, calls in measured.items()}
            for row in logged.values():
                self._log(row, found, returned)

    def _log(
        self, row: Mapping[int, LogCall], found: Records, returned: Mapping[int, list[Any]]
    ) -> None:
        """Makes one call of `self.log` for all replicas."""
        calls = list(row.values())
        if len(row) < len(found.replicas):
            have = [name for k, name in enumerate(found.replicas) if k in row]
            missing = [name for k, name in enumerate(found.replicas) if k not in row]
            raise ValueError(
                f"self.log({calls[0].name!r}): expected the same keys from every replica, got it "
                f"from {', '.join(have)}, but not from {', '.join(missing)}. Log it for every "
                "shard; a value that some shards lack can be logged through a torchmetrics metric."
            )
        name, value, options, source = merged_log(
            calls, found.sizes, self._output_device, self._batch_sizes, found.num_replicas
        )
        if source is not None and all(call.source == source for call in calls):
            # What the metric returned for the whole batch.
            of_batch = tree.leaves(returned[source.number][source.call : source.call + 1])
            if source.leaf < len(of_batch):
                value = _as_number(of_batch[source.leaf], self._output_device)
        if isinstance(value, MetricAt):
            value = self._submodules[0][value.number]
        self._module.log(name, value, **options)

    def _measure(
        self, number: int, calls: Sequence[Sequence[MetricCall]], found: Records
    ) -> list[Any]:
        """Makes the replicas' calls of a metric on the user's.

        Returns what each `forward` returned for the whole batch; nothing if replicas made other
        calls.
        """
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
        for member in metrics_in(metric) if self._world is not None else ():
            member.distributed_available_fn = _never
        joined, values = _joined_calls(calls, found, metric), []
        for group in joined:
            with noted(f"[in {group[0].method} of {name}, for the batch of all replicas]"):
                value = _make(group, metric)
            values.extend([value] * (group[0].method == "forward"))
        return values if len(joined) == max(map(len, calls)) else []


# One call of `self.log` for those of all replicas


def merged_log(
    calls: Sequence[LogCall],
    sizes: Sequence[int],
    device: torch.device,
    seen: dict[str, int | None],
    count: int,
) -> LogCall:
    """One call of `self.log` that says what the replicas' calls, in shard order, say together.

    | `reduce_fx`      | value                                                                |
    |------------------|----------------------------------------------------------------------|
    | `"mean"`         | mean, weighted by shard size or by the user's own `batch_size`;      |
    |                  | shards whose `batch_size` is 0 are left out                          |
    | `"sum"`          | sum                                                                  |
    | `"min"`, `"max"` | smallest, largest                                                    |
    | any, of a metric | the metric itself, which by then has seen the whole batch            |

    Values are brought to the device; `seen` and `count` are for `_own_weights`.
    """
    first = calls[0]
    options, weights = first.options, sizes
    given = [call.options for call in calls]
    if "batch_size" in options or given.count(options) < len(given):
        options, weights = _own_weights(first.name, given, sizes, seen, count)
    value, values = first.value, [call.value for call in calls]
    if len(values) == 1:
        value = value.to(device) if isinstance(value, Tensor) else value
    elif isinstance(value, Tensor | Number):  # for other types Lightning raises its own error
        numbers = [_as_number(v, device) for v in values]
        reduce_fx = options.get("reduce_fx", "mean")
        how = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
        value = _reduced(how, numbers, weights)
    return LogCall(first.name, value, options, first.source)


_REDUCTIONS: dict[str, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


def _reduced(how: str, numbers: list[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum, the smallest or the largest of 0-dim tensors, else their weighted mean."""
    if how in _REDUCTIONS:
        return cast(Tensor, _REDUCTIONS[how](torch.stack(numbers), 0))
    if 0 in weights:  # a mean over nothing is NaN, and counts for nothing
        numbers = list(compress(numbers, weights)) or numbers
        weights = list(filter(None, weights)) or [1] * len(numbers)
    return weighted_mean(numbers, weights)


def _own_weights(
    name: str,
    given: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    seen: dict[str, int | None],
    count: int,
) -> tuple[Mapping[str, Any], Sequence[int]]:
    """The options of the joint call, and the weights of the replicas' values.

    The replicas' `batch_size` are the weights, and their sum is the joint call's. If all shards so
    far had the same one, not their size, it is a constant: the weights are the shards' sizes, and a
    batch with fewer samples than the `count` replicas has the sum of batches for all. `seen` has
    each name's constant, or None if it has varied.
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
    known = seen.get(name)
    seen[name] = own[0] if set(own) == {seen.get(name, own[0])} else None
    if seen[name] is None or own == [*sizes]:
        return {**first, "batch_size": sum(own)}, own
    shards = count if known and sum(sizes) < count else len(own)
    return {**first, "batch_size": own[0] * shards}, sizes


def _as_number(number: Any, device: torch.device) -> Tensor:
    """A floating tensor of at least single precision, in which Lightning keeps logged values."""
    default = torch.get_default_dtype()
    value = number if isinstance(number, Tensor) else torch.tensor(number, dtype=default)
    if value.dtype not in _KEPT_DTYPES:
        value = value.to(default if default == torch.float64 else torch.float32)
    return value.to(device, non_blocking=device.type != "cpu")


# The calls of a metric with the whole batch


def _joined_calls(
    records: Sequence[Sequence[MetricCall]], found: Records, metric: AnyMetric
) -> list[list[MetricCall]]:
    """Groups the replicas' calls: a group is what one device would have called once.

    One joined call, or one call per replica; each call alone if the replicas made different ones.
    """
    device = metrics_in(metric)[0].device
    records = [
        [MetricCall(call.metric, call.method, *to_device(call[2:], device)) for call in calls]
        for calls in records
    ]
    rows = list(zip(*records, strict=False))
    are_alike = all(len(calls) == len(rows) for calls in records) and all(
        len({call.method for call in row}) == 1 for row in rows
    )
    if are_alike:
        return [_joined(row, found, metric) for row in rows]
    first, *others = records
    rest = [[c] for calls in others for c in calls if c.method != "reset"]
    return [[call] for call in first] + rest


def _joined(row: Sequence[MetricCall], found: Records, metric: AnyMetric) -> list[MetricCall]:
    """The k-th calls of all replicas as one with the whole batch; unchanged if in doubt."""
    first = row[0]
    if first.method == "reset":
        return [first]
    join = _JoinArguments(
        tuple(found.sizes),
        metrics_in(metric)[0].device,
        RowRules(found.dim),
        where=(first.metric, first.method),
        numbers=_meaning_of_numbers(first, metric),
    )
    try:
        args, kwargs = join.node([(call.args, call.kwargs) for call in row], ())
    except _CannotJoin:
        return list(row)
    if len(row) > 1 and not join.numbers and not join.of_samples:
        return list(row)  # equal numbers alone may be counts or constants
    return [first._replace(args=args, kwargs=kwargs)]


def _make(calls: Sequence[MetricCall], metric: AnyMetric) -> Any:
    """Makes the calls of one group of `_joined_calls`; returns the value of its `forward`, if any.

    Several calls of `forward` have one value: that of a reset copy updated with all of them.
    """
    if len(calls) == 1:
        return getattr(metric, calls[0].method)(*calls[0].args, **calls[0].kwargs)
    alone = reset_copy(metric) if calls[0].method == "forward" else None
    for call in calls:
        metric.update(*call.args, **call.kwargs)
        if alone is not None:
            alone.update(*call.args, **call.kwargs)
    if alone is None:
        return None
    for member, other in zip(metrics_in(metric), metrics_in(alone), strict=True):
        keep_batch_value(member, other.compute() if other.update_called else None)
    return alone.compute()


_NUMBERS: dict[type[Metric], str] = {
    **{MeanMetric: "mean", CatMetric: "mean", SumMetric: "sum"},
    **{MaxMetric: "max", MinMetric: "min"},
}


def _meaning_of_numbers(call: MetricCall, metric: AnyMetric) -> str:
    """How numbers that replicas pass to a torchmetrics aggregator become the batch's number.

    "mean", "sum", "max" or "min". "" for other metrics, and for calls with a weight: these are made
    one after another, each with its own number.
    """
    inner = [m for m in metrics_in(metric) if not any(map(is_metric, m.children()))]
    found = {_NUMBERS.get(type(m), "") for m in inner}
    return found.pop() if len(found) == 1 and len(call.args) + len(call.kwargs) == 1 else ""


class _CannotJoin(Exception):
    """The arguments of several calls have no joint meaning."""


@dataclass(frozen=True)
class _JoinArguments(Join):
    """Joins metric arguments; where what one device would have passed is in doubt, it refuses."""

    numbers: str = ""
    of_samples: list[tree.Path] = field(default_factory=list)  # where something was joined

    def node(self, nodes: list[Any], path: tree.Path, override: Any = None) -> Any:
        if len(nodes) == 1:
            return nodes[0]
        keys = [[key for key, _ in tree.children(node) or ()] for node in nodes]
        has_same_keys = isinstance(nodes[0], list) or keys.count(keys[0]) == len(keys)
        if len({type(node) for node in nodes}) > 1 or not has_same_keys:
            raise _CannotJoin
        return super().node(nodes, path, override)

    def are_of_samples(self, nodes: list[Any], path: tree.Path) -> bool:
        are = isinstance(nodes[0], list) and super().are_of_samples(nodes, path)
        self.of_samples.extend([path] * are)
        return are

    def leaves(self, leaves: list[Any], path: tree.Path) -> Any:
        if self.numbers and all(isinstance(x, int | float) or _is_scalar(x) for x in leaves):
            dtype = torch.get_default_dtype()
            numbers = [torch.as_tensor(x, dtype=dtype, device=self.device) for x in leaves]
            return _reduced(self.numbers, numbers, self.sizes)
        if isinstance(leaves[0], Tensor):
            return self._tensors(as_rows(leaves, self.sizes), path)
        # A count that is equal on equal shards looks like a constant: call by call both are right.
        is_count = type(leaves[0]) is int and tuple(leaves) == self.sizes
        if is_count or not all(tree.equal(leaf, leaves[0]) for leaf in leaves):
            raise _CannotJoin
        return leaves[0]

    def _tensors(self, tensors: list[Tensor], path: tree.Path) -> Tensor:
        if any(map(_is_scalar, tensors)):
            raise _CannotJoin
        how, dim = fit_shapes([t.shape for t in tensors], self.sizes, self.row_rules.dim)
        if how == "same" and all(tree.equal(tensors[0], t) for t in tensors):
            return tensors[0]
        if how in ("same", "ragged"):
            raise _CannotJoin
        self.of_samples.append(path)
        return torch.cat(tensors, dim)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


# Several processes: what the replicas of all ranks have recorded is replayed on every rank


def _of_all_ranks(own: Records, world: World) -> Records:
    """What the replicas of all ranks recorded, in the order of the batch.

    Every rank takes part in every step: no other rank knows whether it has recorded anything.
    """
    if world.is_idle:
        own = own._replace(calls=(), sizes=(), replicas=())
    parts = world.all_gather_objects(own, "the end of its step")
    parts[world.rank] = own  # whose values may have a graph
    return Records(
        [calls for part in parts for calls in part.calls],
        [size for part in parts for size in part.sizes],
        [name for part in parts for name in part.replicas],
        sum(part.num_replicas for part in parts),
        own.dim,
    )


@contextmanager
def _logging_for_all(module: LightningModule, samples: int) -> Iterator[None]:
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
