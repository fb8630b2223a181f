"""A call of a metric on a replica: what it changes there is undone when the step ends.

The value is the shard's, and so is what the call leaves on the metric: its state, and whatever else
its code writes. After the step the call is made again with the whole batch, and leaves on the
module's own metric what it leaves on one device. Until then the step may read what its own calls
have left; only a metric's state is never that of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp.lightning_private import own_device, state_defaults, unused_state
from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.replicate import Contents
from lightning_dp.parallel.scatter import to_device
from lightning_dp.parallel.torch_private import (
    buffer_table,
    child_table,
    parameter_table,
    tables_as_attributes,
    version,
)
from lightning_dp.state import copied, is_container, live

Attributes = dict[str, Any]


class _NoMetric(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_OF_EVERY_METRIC = frozenset(vars(_NoMetric())) | {"forward", "reset"}
_ABSENT = object()


def names_of_metric(module: nn.Module) -> frozenset[str]:
    """The attributes of a metric that are its state, or torchmetrics' own."""
    if not isinstance(module, Metric):
        return frozenset()
    return _OF_EVERY_METRIC.union(state_defaults(module))


def state_of_metric(module: nn.Module, device: torch.device) -> Attributes:
    """The state of a metric that has seen nothing, on a device."""
    return unused_state(_defaults_on(device, module)) if isinstance(module, Metric) else {}


class _Copy(NamedTuple):
    """What a call has instead of something that it may write to in place."""

    value: Any
    seen: Contents | int

    @property
    def is_changed(self) -> bool:
        if isinstance(self.seen, int):
            return version(self.value) != self.seen
        return self.seen.differ()


class CalledModule:
    """A metric, or a module in a metric, on one replica."""

    def __init__(self, root: nn.Module, own: nn.Module, device: torch.device) -> None:
        self._root, self._own, self._device = root, own, device
        self._defaults: Attributes = {}
        self._defaults_seen: list[int] = []
        self._left: list[tuple[Attributes, str, Any, Any]] = []
        self._base: Attributes = {}
        self._before: Attributes = {}
        self._copies: dict[str, _Copy] = {}
        self._refers = own is not root and buffer_table(own) is buffer_table(root)

    def begin_step(self) -> None:
        """Notes what it has."""
        self._base = {**vars(self._own), **buffer_table(self._own)}

    def end_step(self) -> None:
        """Takes back what calls have left, unless the step has put something else there."""
        for values, name, before, after in reversed(self._left):
            if values.get(name, _ABSENT) is not after:
                continue
            if before is _ABSENT:
                values.pop(name, None)
            else:
                values[name] = before
        self._left = []

    def bound(self, *, weights: bool) -> Attributes:
        """What the step has bound on it by now, and not a call.

        With weights, its trained parameters too, for when they will have moved.
        """
        left = {id(after) for *_, after in self._left}
        values = {**vars(self._own), **buffer_table(self._own)}
        is_bound = [v is not self._base.get(n) and id(v) not in left for n, v in values.items()]
        of_metric = names_of_metric(self._root) or _OF_EVERY_METRIC
        bound = {n: values[n] for n in compress(values, is_bound) if n not in of_metric}
        for name, parameter in parameter_table(self._own).items() if weights else ():
            if parameter is not None and parameter.requires_grad:
                bound[name] = parameter.detach().clone()
        return bound

    def begin_call(self) -> None:
        """Gives it a state that has seen nothing, and copies of what may be written to."""
        attributes = vars(self._own)
        self._before = dict(attributes)
        of_metric = names_of_metric(self._root) or _OF_EVERY_METRIC
        buffers = {n: self._here(b) for n, b in buffer_table(self._own).items()}
        self._copies = _copies({n: v for n, v in attributes.items() if n not in of_metric}, buffers)
        copies = {name: copy.value for name, copy in self._copies.items()}
        buffers = {n: copies.get(n, b) for n, b in buffers.items()}
        parameters = {n: self._here(p) for n, p in parameter_table(self._own).items()}
        attributes.update({n: copy for n, copy in copies.items() if n in attributes})
        if isinstance(self._own, Metric):
            state = self._unused_state()
            buffers.update({n: state.pop(n) for n in buffers.keys() & state.keys()})
            attributes.update(state)
        attributes.update(own_device(self._own, self._device))
        attributes.update(tables_as_attributes(parameters, buffers, child_table(self._own)))

    def end_call(self) -> None:
        """Puts back what it had, but for what the call has changed.

        Nothing, if no call has begun. If an interrupt keeps it from its end, it can be told again.
        """
        if not self._before:
            return
        attributes = vars(self._own)
        after, buffers = dict(attributes), buffer_table(self._own)
        attributes.update(self._before)
        for name in after.keys() - self._before.keys():
            attributes.pop(name, None)
        of_metric = names_of_metric(self._root) or _OF_EVERY_METRIC
        self._leave(attributes, {n: v for n, v in after.items() if n not in of_metric})
        if not self._refers:
            moved = {n: b for n, b in buffers.items() if n not in of_metric}
            self._leave(buffer_table(self._own), moved)
        self._before, self._copies = {}, {}

    def _leave(self, values: Attributes, after: Attributes) -> None:
        """Lets the step see what the call has bound or written to."""
        for name, value in after.items():
            before, copy = values.get(name, _ABSENT), self._copies.get(name)
            if copy is not None and value is copy.value:
                is_new = copy.is_changed
            else:
                is_new = value is not before
            if is_new:
                # In this order: an interrupt may come in between.
                self._left.append((values, name, before, value))
                values[name] = value

    def _here(self, tensor: Tensor | None) -> Tensor | None:
        """Where the replica is: a metric of forward mode is on the output device."""
        return None if tensor is None else tensor.to(self._device)

    def _unused_state(self) -> Attributes:
        defaults = state_defaults(self._root)
        now = list(map(id, defaults.values()))
        if now != self._defaults_seen:
            self._defaults = _defaults_on(self._device, self._root)
            self._defaults_seen = now
        return unused_state(dict(self._defaults))


class StepAttributes:
    """What a step has bound on the module's own metric before, between and after its calls.

    Or on a module in it; and its trained parameters, which a step with manual optimisation moves.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._before: Attributes = {}
        self._after: Attributes | None = None

    def begin_step(self) -> None:
        """Notes what there is."""
        self._before, self._after = {**vars(self.root), **buffer_table(self.root)}, None

    def as_at(self, bound: Mapping[str, Any], device: torch.device) -> Lasting:
        """While it lasts, the metric is as it was when a replica called it, after it bound these.

        To be used once the replicas' steps have ended.
        """
        if self._after is None:
            self._after = named_values(self.root)
        after, before = self._after, self._before
        late = {n: before[n] for n, v in after.items() if n in before and v is not before[n]}
        early = {n: to_device(v, device) for n, v in bound.items() if v is not after.get(n)}
        parameters = dict(parameter_table(self.root))
        bound_after = {n: after[n] for n in [*late, *early] if n in after}
        detached = _detached(parameters)
        return _Bound(self.root, {**detached, **late, **early}, {**bound_after, **parameters})


class _Bound(Lasting):
    """While it lasts, a module has other attributes, buffers and parameters."""

    def __init__(self, module: nn.Module, others: Attributes, afterwards: Attributes) -> None:
        self._module, self._others, self._afterwards = module, others, afterwards

    def begin(self) -> None:
        self._bind(self._others)

    def end(self) -> None:
        self._bind(self._afterwards)

    def _bind(self, values: Attributes) -> None:
        tables = parameter_table(self._module), buffer_table(self._module)
        for name, value in values.items():
            table = next((table for table in tables if name in table), vars(self._module))
            table[name] = value


def named_values(module: nn.Module) -> Attributes:
    """Attributes and buffers that are neither a metric's state nor torchmetrics' own."""
    of_metric = names_of_metric(module) or _OF_EVERY_METRIC
    values = {**vars(module), **buffer_table(module)}
    return {name: value for name, value in values.items() if name not in of_metric}


def _detached(parameters: Attributes) -> Attributes:
    """Nobody makes a backward of a replayed call, and a graph would be kept."""
    return {n: None if p is None else p.detach() for n, p in parameters.items()}


def _copies(attributes: Attributes, buffers: Attributes) -> dict[str, _Copy]:
    """Copies of containers and of tensors that gradients do not flow to."""
    copies: dict[str, _Copy] = {}
    for name, value in [*attributes.items(), *buffers.items()]:
        if is_container(value):
            own = copied(value)
            copies[name] = _Copy(own, Contents(list(live(own))))
        elif isinstance(value, Tensor) and not value.requires_grad:
            with torch.inference_mode(False):  # which counts what is written to it
                own = value.clone()
            copies[name] = _Copy(own, version(own))
    return copies


def _defaults_on(device: torch.device, metric: nn.Module) -> Attributes:
    defaults = state_defaults(metric)
    return {n: v.to(device) if isinstance(v, Tensor) else [] for n, v in defaults.items()}
