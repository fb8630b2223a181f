"""torchmetrics metrics on replicas: they record what a step does with them.

Calls of `update`, `forward` and `reset` are recorded, to be made on the user's own metric after the
step, with the whole batch (`replay`). A `forward` also runs where it is called, on a metric that
has seen nothing: its value, which may be a loss, is the shard's. Whatever the call writes on the
metric is gone afterwards, as the replay writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dp.lightning_private import own_device, state_defaults, unused_state
from lightning_dp.metrics.logged_values import LogCall, MetricAt, Source, log_call
from lightning_dp.parallel.contexts import StandIn
from lightning_dp.parallel.errors import add_note, chain, is_a
from lightning_dp.parallel.replicate import layers_in
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import (
    backward_id,
    buffer_table,
    child_table,
    parameter_table,
    tables_as_attributes,
)
from lightning_dp.state import copied, is_container

AnyMetric: TypeAlias = Metric | MetricCollection
MetricMethod: TypeAlias = Literal["forward", "update", "reset"]


class MetricCall(NamedTuple):
    """A call of a metric on one replica; tensors are detached copies.

    The metric is its number among all modules, which is the same on all replicas and in every
    process.
    """

    metric: int
    method: MetricMethod
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same call on different replicas."""
        return self.metric, self.method


Call: TypeAlias = LogCall | MetricCall


class _NoMetric(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_OF_EVERY_METRIC = frozenset(vars(_NoMetric())) | {"forward", "reset"}
_METHODS = ("forward", "update", "compute", "reset")


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric or a collection of them."""
    return isinstance(module, Metric | MetricCollection)


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


def all_in(metric: nn.Module) -> list[nn.Module]:
    """A metric and all modules in it, also metrics in plain containers; itself first."""
    found: dict[int, nn.Module] = {}
    waiting = [metric]
    while waiting:
        module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        waiting.extend(child for child in child_table(module).values() if child is not None)
        for value in vars(module).values():
            waiting.extend(hidden for _, hidden in layers_in(value, "") if is_metric(hidden))
    return list(found.values())


def never() -> bool:
    """Whether a metric may sync with other processes: its states are those of all already."""
    return False


class ReplicaRecord:
    """The calls that one replica makes during one step.

    Args:
        names: the options that the module's `log` takes by position.
        device: the replica's.
        leaving: devices whose logged values go to the host at once.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, leaving: Sequence[torch.device]
    ) -> None:
        self.calls: list[Call] = []
        self.device = device
        self.recorders: list[_MetricRecorder] = []
        self._names, self._leaving = names, leaving
        self._numbers: dict[int, int] = {}  # of the metrics, by their ids
        self._sources: dict[int, tuple[Any, Source]] = {}  # of what metrics returned, by ids
        self._forwards: Counter[int] = Counter()

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """Finds the metrics among the replica's modules."""
        self._numbers = {id(m): n for n, m in enumerate(modules) if is_metric(m)}
        self.recorders = [
            _MetricRecorder(self, m, n) for n, m in enumerate(modules) if is_metric(m)
        ]

    def clear(self) -> None:
        """Lets go of what was recorded."""
        self.calls.clear()
        self._sources.clear()
        self._forwards.clear()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` on the replica."""
        _, source = self._sources.get(id(value), (None, None))
        if id(value) in self._numbers:
            value = MetricAt(self._numbers[id(value)])
        elif isinstance(value, NoValue):
            value = value.error
        options = {**dict(zip(self._names, args, strict=False)), **kwargs}
        leaving = self._leaving if backward_id() == -1 else ()  # else no copy is pending
        self.calls.append(log_call(name, value, options, leaving, source))

    def note(self, value: Any, metric: int) -> None:
        """A metric's `forward` has returned this value of the shard."""
        call = self._forwards[metric]
        self._forwards[metric] += 1
        for i, leaf in enumerate([value] if isinstance(value, NoValue) else tree.leaves(value)):
            if isinstance(leaf, Tensor | NoValue):
                self._sources[id(leaf)] = leaf, Source(metric, call, i)


class _MetricRecorder:
    """Records the calls that one replica makes on one metric."""

    def __init__(self, record: ReplicaRecord, metric: Any, number: int) -> None:
        self._record, self.metric, self._number = record, metric, number
        self._modules = all_in(metric)
        self.own: dict[
            str, Any
        ] = {}  # methods that the metric has for itself, while it is recorded
        self.shadows = {name: StandIn(metric, name, getattr(self, name)) for name in _METHODS}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples: that of all samples comes after the step."""
        self._append("forward", args, kwargs)
        try:
            with self._unused():
                value = self.metric.forward(*args, **kwargs)
        except Exception as error:
            # Too few samples, perhaps. Errors of other types, out of memory too, are never that.
            name = type(self.metric).__qualname__
            if type(error) not in (ValueError, RuntimeError) and not is_a(error, Warning):
                add_note(error, f"[in forward of a metric ({name})]")
                raise
            value = NoValue(error, name)
        self._record.note(value, self._number)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._append("update", args, kwargs)

    def reset(self) -> None:
        self._append("reset", (), {})

    def compute(self) -> NoReturn:
        raise RuntimeError(
            f"Expected compute() of {type(self.metric).__qualname__} to be called after the step: "
            "during it a replica knows only its own samples. Log the metric object with "
            "self.log(name, metric), or call compute() in an epoch-end hook."
        )

    @contextmanager
    def _unused(self) -> Iterator[None]:
        """While it lasts, the metric and those in it have seen nothing; then they are as before."""
        before = [dict(vars(module)) for module in self._modules]
        methods = {id(other.metric): other.own for other in self._record.recorders}
        try:
            for module in self._modules:
                own = _attributes_of_unused(
                    module, methods.get(id(module), {}), self._record.device
                )
                vars(module).clear()
                vars(module).update(own)
            yield
        finally:
            for module, attributes in zip(self._modules, before, strict=True):
                vars(module).clear()
                vars(module).update(attributes)

    def _append(self, method: MetricMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = MetricCall(self._number, method, _snapshot(args), _snapshot(kwargs))
        self._record.calls.append(call)


class Recording:
    """While it lasts, `self.log` of the root and the metrics of replicas are recorded.

    It may end and begin again. What the step itself binds in the place of `log` stays.
    """

    def __init__(
        self, module: nn.Module, first: ReplicaRecord, records: Sequence[ReplicaRecord]
    ) -> None:
        self._log = StandIn(module, "log", first.log)
        self._shadows: list[tuple[nn.Module, dict[str, StandIn], dict[str, Any]]] = [
            (module, {"log": self._log}, {}),
            *((r.metric, r.shadows, r.own) for record in records for r in record.recorders),
        ]

    def __enter__(self) -> None:
        """Begins."""
        self.begin()

    def __exit__(self, *error: Any) -> None:
        """Ends."""
        self.end()

    def begin(self) -> None:
        """Puts the recorders in front of the methods."""
        for module, shadows, own in self._shadows:
            attributes = vars(module)
            own.update({n: attributes[n] for n in shadows if n in attributes})
            attributes.update(shadows)

    def end(self) -> None:
        """Gives the methods back. Called twice, it does nothing the second time."""
        for module, shadows, own in self._shadows:
            attributes = vars(module)
            for name in [n for n, shadow in shadows.items() if attributes.get(n) is shadow]:
                del attributes[name]
                attributes.update({name: own[name]} if name in own else {})
            own.clear()

    def retire(self) -> None:
        """From now on what stood for `self.log` is the method: wrappers may still call it."""
        self._log.retire()


def _attributes_of_unused(
    module: nn.Module, methods: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """What a metric has that has seen nothing, with copies of what a call may write to.

    In forward mode replicas use the metric of the root, which is on the output device.
    """
    attributes = dict(vars(module))
    parameters = {n: p if p is None else p.to(device) for n, p in parameter_table(module).items()}
    buffers = {n: b if b is None else b.to(device) for n, b in buffer_table(module).items()}
    if is_metric(module):
        attributes = {n: v for n, v in attributes.items() if n not in _METHODS} | methods
        names = names_of_metric(module) or _OF_EVERY_METRIC
        free = {n: v for n, v in attributes.items() if n not in names}
        attributes |= {n: copied(v) for n, v in free.items() if is_container(v)}
        attributes |= {n: _own_copy(v) for n, v in free.items() if isinstance(v, Tensor)}
        attributes |= {**state_of_metric(module, device), **own_device(module, device)}
        buffers = {n: _own_copy(b) for n, b in buffers.items()}
    if isinstance(module, Metric):
        attributes["distributed_available_fn"] = never
    return attributes | tables_as_attributes(parameters, buffers, child_table(module))


def _own_copy(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.requires_grad else tensor.clone()


def _snapshot(arguments: Any) -> Any:
    """Detached copies: what the step does to its tensors afterwards must not matter."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments
    )


class NoValue:
    """What a metric returns for a shard that is too small for it: every use raises its error.

    One device calls the metric with the whole batch, and so does the replay: the error matters only
    to a step that uses the shard's value.
    """

    error: Exception

    def __init__(self, error: Exception, metric: str) -> None:
        add_note(
            error,
            f"[{metric}.forward over the samples of one replica; to log what it is over the whole "
            "batch, log the metric object, and do not use the value that it returns in a step]",
        )
        self.__dict__["error"] = error
        for cause in chain(error, "__cause__"):  # whose frames would keep all that is in them
            BaseException.with_traceback(cause, None)
            BaseException.__setattr__(cause, "__context__", None)

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error."""
        raise self.__dict__["error"]

    def __getattr__(self, name: str) -> Any:
        """Asking it for anything is using it."""
        self.fail()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """So is giving it to a function of torch."""
        for leaf in tree.leaves((args, kwargs or {})):
            if isinstance(leaf, NoValue):
                leaf.fail()


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"}
for _name in {n for n in dir(Tensor) if n[:2] == "__" and callable(getattr(Tensor, n))} - {
    *(set(dir(object)) - _COMPARISONS),
    *("__torch_function__", "__class_getitem__", "__getattr__", "__hash__", "__setstate__"),
}:
    setattr(NoValue, _name, NoValue.fail)
