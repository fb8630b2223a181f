"""torchmetrics on replicas: calls are recorded, joined, and made once on the user's own metric.

In place of a metric's methods a replica has a `RecordedMetric`. A `forward` also runs where it is
called, on a reset copy of the metric: its value, which may be a loss, is the shard's. After the
step `replay` joins the arguments in shard order, which makes the very call that one device would
have made. Where they have no joint meaning, or replicas made different numbers of calls, the calls
are made one after another in shard order.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import torch
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

from lightning_dp.lightning_private import keep_batch_value, state_defaults, unused_state
from lightning_dp.parallel.contexts import StandIn
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.gather import Join, RowRules, as_rows, fit_shapes
from lightning_dp.parallel.scatter import to_device, tree, weighted_mean

if TYPE_CHECKING:
    from lightning_dp.metrics.recorder import Records, ReplicaRecord

AnyMetric: TypeAlias = Metric | MetricCollection
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_METHODS = ("forward", "update", "compute", "reset")


class MetricCall(NamedTuple):
    """A call of a metric on one replica; tensors are detached copies.

    The metric is its number among all modules: the same on all replicas and in every process.
    """

    metric: int
    method: Literal["forward", "update", "reset"]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def metrics_in(module: nn.Module) -> list[Metric]:
    """The metrics among a module and its submodules."""
    return [member for member in module.modules() if isinstance(member, Metric)]


def state_of_metric(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """The state of a metric that has seen nothing, on a device."""
    if not isinstance(module, Metric):
        return {}
    defaults = state_defaults(module)
    return unused_state(
        {n: v.to(device) if isinstance(v, Tensor) else [] for n, v in defaults.items()}
    )


def never() -> bool:
    """Whether a metric may sync with other processes: its states are those of all already."""
    return False


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
        member.distributed_available_fn = never
    return clone


# On a replica


class RecordedMetric:
    """Records the calls that one replica makes on one metric.

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

    def _append(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetricCall:
        """Records a call; what the step does to its tensors afterwards must not matter."""
        args, kwargs = tree.map_leaves(_detached_copy, (args, kwargs))
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


_OF_EVERY_METRIC = frozenset({*vars(SumMetric()), *_METHODS})


def _detached_copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


# After the step


def replay(
    calls: Sequence[Sequence[MetricCall]], found: Records, metric: AnyMetric, name: str
) -> list[Any]:
    """Makes the calls of all replicas on the user's own metric.

    Returns:
        What each `forward` returned for the whole batch; nothing if replicas made other calls.
    """
    joined, values = joined_calls(calls, found, metric), []
    for group in joined:
        try:
            value = _make(group, metric)
        except Exception as error:
            add_note(error, f"[in {group[0].method} of {name}, for the batch of all replicas]")
            raise
        values.extend([value] * (group[0].method == "forward"))
    return values if len(joined) == max(map(len, calls)) else []


def joined_calls(
    records: Sequence[Sequence[MetricCall]], found: Records, metric: AnyMetric
) -> list[list[MetricCall]]:
    """Lists of calls that are one: a call with the whole batch, or one of each replica's."""
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
    """The same call of all replicas as one with the whole batch; else as they are."""
    first = row[0]
    if first.method == "reset":
        return [first]
    device = _device_of(metric)
    join = _JoinArguments(
        tuple(found.sizes),
        device,
        RowRules(found.dim),
        where=(first.metric, first.method),
        numbers=_meaning_of_numbers(first, metric),
    )
    try:
        nodes = [to_device((call.args, dict(call.kwargs)), device) for call in row]
        args, kwargs = cast(Arguments, join.node(nodes, ()))
    except _CannotJoin:
        return list(row)
    if len(row) > 1 and not join.numbers and not join.of_samples:
        return list(row)  # equal numbers alone may be counts or constants
    return [first._replace(args=args, kwargs=kwargs)]


def _make(calls: Sequence[MetricCall], metric: AnyMetric) -> Any:
    """Makes calls that are one; returns what that returns.

    Of several calls of `forward` the value is that of a metric which has seen nothing else.
    """
    device = _device_of(metric)
    arguments = [to_device((call.args, dict(call.kwargs)), device) for call in calls]
    if len(calls) == 1:
        args, kwargs = arguments[0]
        return getattr(metric, calls[0].method)(*args, **kwargs)
    alone = reset_copy(metric) if calls[0].method == "forward" else None
    for args, kwargs in arguments:
        metric.update(*args, **kwargs)
        if alone is not None:
            alone.update(*args, **kwargs)
    if alone is None:
        return None
    for member, other in zip(metrics_in(metric), metrics_in(alone), strict=True):
        keep_batch_value(member, other.compute() if other.update_called else None)
    return alone.compute()


def _device_of(metric: AnyMetric) -> torch.device:
    """Where a metric, or the first one of a collection, has its states."""
    return next(m.device for m in metrics_in(metric))


_NUMBERS: dict[type[Metric], str] = {
    **{MeanMetric: "mean", CatMetric: "mean", SumMetric: "sum"},
    **{MaxMetric: "max", MinMetric: "min"},
}


def _meaning_of_numbers(call: MetricCall, metric: AnyMetric) -> str:
    """What a number is that is passed to torchmetrics' own aggregators, of the batch's samples.

    "" for other metrics, and for a step that passes a weight beside it, which counts itself: these
    calls are right one after another.
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
        return super().node(nodes, path)

    def are_of_samples(self, nodes: list[Any], path: tree.Path) -> bool:
        are = isinstance(nodes[0], list) and super().are_of_samples(nodes, path)
        self.of_samples.extend([path] * are)
        return are

    def leaves(self, leaves: list[Any], path: tree.Path) -> Any:
        if isinstance(leaves[0], Tensor):
            return self._tensors(as_rows(leaves, self.sizes), path)
        if self.numbers and all(isinstance(leaf, int | float) for leaf in leaves):
            return self._number([torch.tensor(leaf, dtype=torch.float64) for leaf in leaves]).item()
        # A count that is equal on equal shards looks like a constant: call by call both are right.
        is_count = type(leaves[0]) is int and tuple(leaves) == self.sizes
        if is_count or not all(tree.equal(leaf, leaves[0]) for leaf in leaves):
            raise _CannotJoin
        return leaves[0]

    def _tensors(self, tensors: list[Tensor], path: tree.Path) -> Tensor:
        if self.numbers and all(t.dim() == 0 for t in tensors):
            return self._number([t.to(torch.get_default_dtype()) for t in tensors])
        if any(t.dim() == 0 for t in tensors):
            raise _CannotJoin
        how, dim = fit_shapes([t.shape for t in tensors], self.sizes, self.row_rules.dim)
        if how == "same" and all(tree.equal(tensors[0], t) for t in tensors):
            return tensors[0]
        if how in ("same", "ragged"):
            raise _CannotJoin
        self.of_samples.append(path)
        return torch.cat(tensors, dim)

    def _number(self, numbers: list[Tensor]) -> Tensor:
        if self.numbers == "mean":
            return weighted_mean(numbers, self.sizes)
        reduce: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[self.numbers]
        reduced: Tensor = reduce(torch.stack(numbers), 0)
        return reduced
