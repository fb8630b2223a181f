"""What a replica logs and measures in a step is recorded.

Calls of `self.log` and of a metric's `update`, `forward` and `reset` are recorded, to be made on
the user's own module after the step, for the whole batch (see `recorder`). A `forward` also runs
where it is called, on a reset copy of the metric: its value, which may be a loss, is the shard's.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dp.lightning_private import state_defaults, unused_state
from lightning_dp.metrics.logged_values import OPTIONS, LogCall, MetricAt, Source
from lightning_dp.parallel.contexts import StandIn
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import backward_id

AnyMetric: TypeAlias = Metric | MetricCollection
MetricMethod: TypeAlias = Literal["forward", "update", "reset"]

_METHODS = ("forward", "update", "compute", "reset")


class MetricCall(NamedTuple):
    """A call of a metric on one replica; tensors are detached copies.

    The metric is its number among all modules, which is the same on all replicas and in every
    process.
    """

    metric: int
    method: MetricMethod
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


Call: TypeAlias = LogCall | MetricCall


class _NoMetric(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_OF_EVERY_METRIC = frozenset({*vars(_NoMetric()), *_METHODS})


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


def metrics_in(module: nn.Module) -> list[Metric]:
    """The metrics among a module and its submodules."""
    return [member for member in module.modules() if isinstance(member, Metric)]


def names_of_metric(module: nn.Module) -> frozenset[str]:
    """The attributes of a metric that are its state, or torchmetrics' own."""
    if not isinstance(module, Metric):
        return frozenset()
    return _OF_EVERY_METRIC.union(state_defaults(module))


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
        state = unused_state(state_defaults(member))
        memo.update({id(getattr(member, n)): v for n, v in state.items() if n[0] != "_"})
        values = [vars(member)[n] for n in ("_computed", "_forward_cache")]
        memo.update({id(value): value for value in values})
    clone = copy.deepcopy(metric, memo)
    clone.reset()
    for member in metrics_in(clone):
        member.distributed_available_fn = never
    return clone


class ReplicaRecord:
    """The calls that one replica makes during one step.

    Args:
        device: the replica's.
        leaving: devices whose logged values go to the host at once, where they are after its next
            wait.
    """

    def __init__(self, device: torch.device, leaving: Collection[torch.device]) -> None:
        self.device, self.calls = device, list[Call]()
        self.log_outside: Any = None  # the module's own, while nothing is recorded
        self.numbers: dict[int, int] = {}  # of the metrics, by their ids
        self._leaving = leaving
        self._sources: dict[int, tuple[Any, Source]] = {}  # of what metrics returned, by ids
        self._forwards: Counter[int] = Counter()

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """Finds the metrics among the replica's modules."""
        self.numbers = {id(m): n for n, m in enumerate(modules) if is_metric(m)}

    def clear(self) -> None:
        """Lets go of what was recorded."""
        self.calls.clear()
        self._sources.clear()
        self._forwards.clear()

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands for `self.log` on the replica; copies tensors, to which the step may still write.

        In a backward, where a checkpoint calls the module again, nothing leaves for the host: no
        wait is to come.
        """
        if self.log_outside is not None:  # by a wrapper that the step has left somewhere
            self.log_outside(name, value, *args, **options)
            return
        if args:
            options = {**dict(zip(OPTIONS, args, strict=False)), **options}
        _, source = self._sources.get(id(value), (None, None))
        if isinstance(value, Tensor):
            if options.get("enable_graph"):
                value = value.clone()
            elif value.device in self._leaving and backward_id() == -1:
                value = value.detach().to("cpu", non_blocking=True, copy=True)
            else:
                value = value.detach().clone()
        elif id(value) in self.numbers:
            value = MetricAt(self.numbers[id(value)])
        self.calls.append(LogCall(name, value, options, source))

    def note_value(self, value: Any, metric: int) -> None:
        """Notes where a value comes from: a step may log it."""
        call = self._forwards[metric]
        self._forwards[metric] += 1
        for i, leaf in enumerate(tree.leaves(value)):
            if isinstance(leaf, Tensor):
                self._sources[id(leaf)] = leaf, Source(metric, call, i)


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

    @property
    def _number(self) -> int:
        return self._record.numbers[id(self.metric)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples; that of all samples comes after the step.

        NaN for a shard that is too small for it: one device calls the metric with the whole batch,
        and so does the replay, which raises the error if there is one.
        """
        self._append("forward", args, kwargs)
        try:
            value = self._reset_copy()(*args, **kwargs)
        except Exception as error:
            if type(error) not in (ValueError, RuntimeError):
                add_note(error, f"[in forward of a metric ({type(self.metric).__qualname__})]")
                raise
            value = torch.tensor(float("nan"), device=self._record.device)
        self._record.note_value(value, self._number)
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

    def _append(self, method: MetricMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree.map_leaves(_snapshot, (args, kwargs))
        self._record.calls.append(MetricCall(self._number, method, args, kwargs))

    def _reset_copy(self) -> AnyMetric:
        """A copy is kept until the step or a hook binds an attribute of the metric anew."""
        metric = self.metric
        now = [v for m in metric.modules() for v in _free_attributes(m)]
        is_same = len(now) == len(self._copied) and all(map(is_, now, self._copied))
        trains = any(p.requires_grad for p in metric.parameters())
        if self._copy is None or trains or not is_same:
            self._copy, self._copied = reset_copy(metric), now
            device = self._record.device
            if not trains and any(m.device != device for m in metrics_in(self._copy)):
                self._copy.to(device)  # in forward mode metrics are on the output device
        else:
            self._copy.reset()
        return self._copy


class Recording:
    """While it lasts, `self.log` of the root and the root's metrics are recorded.

    Replicas have recorders in the place of these for good. It may end and begin again.
    """

    def __init__(
        self, module: Any, record: ReplicaRecord, metrics: Sequence[RecordedMetric]
    ) -> None:
        self._module, self._record = module, record
        self._stand_ins = [(vars(module), {"log": StandIn(module, "log", record.log)})]
        self._stand_ins += [(vars(recorded.metric), recorded.methods) for recorded in metrics]
        self._own: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        """Puts the recorders in front of the methods."""
        self._own = [{n: own[n] for n in new if n in own} for own, new in self._stand_ins]
        for attributes, stand_ins in self._stand_ins:
            attributes.update(stand_ins)
        self._record.log_outside = None

    def __exit__(self, *error: Any) -> None:
        """Gives the methods back."""
        for (attributes, stand_ins), own in zip(self._stand_ins, self._own, strict=True):
            for name in stand_ins:
                attributes.pop(name, None)
            attributes.update(own)
        self._record.log_outside = self._module.log


def _free_attributes(module: nn.Module) -> Iterator[Any]:
    """The attributes of a metric, or a module in it, that are neither state nor torchmetrics'."""
    names = names_of_metric(module) or _OF_EVERY_METRIC
    return (value for name, value in vars(module).items() if name not in names)


def _snapshot(leaf: Any) -> Any:
    """A detached copy: what the step does to its tensors afterwards must not matter."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
