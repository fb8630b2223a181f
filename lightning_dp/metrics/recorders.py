"""Recorders: what stands in front of a metric's methods on every replica while a step lasts.

Calls of `update`, `forward` and `reset` are written to the replica's journal, to be made on the
module's own metric after the step. A `forward` is also run where it is called, with the attributes
and parameters that the replica's metric has then: its value may be a loss.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.metrics.arguments import AnyMetric, MetricCall, MetricMethod, MetricValue
from lightning_dp.metrics.no_value import NoValue
from lightning_dp.metrics.one_call import CalledModule, StepAttributes
from lightning_dp.metrics.torchmetrics_on_replicas import is_metric
from lightning_dp.parallel.contexts import Lasting, StandIn, replaced
from lightning_dp.parallel.errors import add_note, is_a
from lightning_dp.parallel.replicate import layers_in
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import child_table

_SHADOWED = ("forward", "update", "compute", "reset")


class ReplicaMetrics:
    """The metrics of one replica.

    Args:
        submodules: all modules of the root, and the replica's, at equal positions.
        record: takes the calls.
        device: the replica's.
        attributes: what steps bind on the root's metrics and modules in them, by their ids.

    Attributes:
        modules: the metrics and modules in them, by the ids of the root's.
    """

    def __init__(
        self,
        submodules: tuple[Sequence[nn.Module], Sequence[nn.Module]],
        record: Callable[[MetricCall], None],
        device: torch.device,
        attributes: Mapping[int, StepAttributes],
    ) -> None:
        self.record = record
        self.is_calling = False
        self.weights_move = False  # in the midst of a step
        self.without_value: list[weakref.ref[NoValue]] = []
        self._values: dict[int, tuple[Any, MetricValue]] = {}  # by their ids, in this step
        self._calls: Counter[int] = Counter()  # of `forward`, by the metrics' ids
        pairs = list(zip(*submodules, strict=True))
        modules = {
            id(root): CalledModule(root, own, device)
            for root, own in pairs
            if id(root) in attributes
        }
        self.modules = modules
        self._roots: dict[int, nn.Module] = {}
        self._recorders: list[_Recorder] = []
        for root, own in pairs:
            if is_metric(root):
                inner = [i for i in map(id, all_in(root)) if i in modules]
                pairs_of = [(modules[i], attributes[i]) for i in inner]
                self._roots[id(own)] = root
                self._recorders.append(_Recorder(self, root, own, pairs_of))

    def original(self, value: Any) -> Any:
        """The module's own metric, if `value` is the replica's; else `value`."""
        return self._roots.get(id(value), value)

    def note(self, value: Any, metric: AnyMetric) -> None:
        """A metric's `forward` has returned this."""
        n = self._calls[id(metric)]
        self._calls[id(metric)] += 1
        for i, leaf in enumerate([value] if isinstance(value, NoValue) else tree.leaves(value)):
            if isinstance(leaf, Tensor | NoValue):
                self._values[id(leaf)] = leaf, MetricValue(metric, n, i)

    def source(self, value: Any) -> MetricValue | None:
        """Where a value comes from, if a metric has returned it in this step."""
        found = self._values.get(id(value))
        return None if found is None else found[1]

    def recording(self) -> AbstractContextManager[None]:
        """While it lasts, the metrics record instead of accumulating.

        A value that there was not and that somebody still has at its end is an error.
        """
        return _Recording(self)

    def begin_step(self) -> None:
        """From here on they record."""
        for module in self.modules.values():
            module.begin_step()
        for recorder in self._recorders:
            recorder.put_on()

    def pause(self) -> None:
        """They are as they are, until they `go_on` recording."""
        for recorder in self._recorders:
            recorder.take_off()

    def go_on(self) -> None:
        """After a pause; where there was none it does nothing."""
        for recorder in self._recorders:
            recorder.put_on()

    def end_step(self) -> None:
        """They accumulate again; to be told twice does no harm."""
        for recorder in self._recorders:
            recorder.take_off()
        for module in self.modules.values():
            module.end_step()
        self._values.clear()
        self._calls.clear()

    def check_values(self, kind: type[BaseException] | None) -> None:
        """Raises an error for a value that there is not, if the step ends without one."""
        missing, self.without_value = self.without_value, []
        for reference in missing if kind is None else ():
            if (value := reference()) is not None:
                value.fail()


class _Recording(Lasting):
    def __init__(self, metrics: ReplicaMetrics) -> None:
        self._metrics = metrics

    def begin(self) -> None:
        self._metrics.begin_step()

    def end(self) -> None:
        self._metrics.end_step()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self._metrics.check_values(kind)


class _Calling(Lasting):
    """A metric and those in it run as they are, and leave their states as they were."""

    def __init__(self, replica: ReplicaMetrics, modules: Sequence[CalledModule]) -> None:
        self._replica, self._modules = replica, modules

    def begin(self) -> None:
        self._replica.is_calling = True
        for module in self._modules:
            module.begin_call()

    def end(self) -> None:
        for module in self._modules:
            module.end_call()
        self._replica.is_calling = False


class _Recorder:
    """Writes down the calls that one replica makes on one metric."""

    def __init__(
        self,
        replica: ReplicaMetrics,
        root: Any,
        own: nn.Module,
        inner: list[tuple[CalledModule, StepAttributes]],
    ) -> None:
        self._replica = replica
        self._metric: AnyMetric = root
        self._own = own
        self._inner = inner  # itself, and the modules in it
        self._replaced: dict[str, Any] | None = None
        self._standing: replaced | None = None
        self._shadows = {n: StandIn(own, n, getattr(self, n)) for n in _SHADOWED}

    def put_on(self) -> None:
        """Stands in front of the methods; to be told twice does no harm."""
        if self._standing is not None:
            return
        attributes = vars(self._own)
        self._replaced = {name: attributes[name] for name in _SHADOWED if name in attributes}
        # Known to those who put everything back after an interrupt.
        self._standing = replaced(self._own, **self._shadows)
        self._standing.__enter__()

    def take_off(self) -> None:
        """Gives the metric its methods back."""
        if self._standing is not None:
            self._standing.end()
        self._standing = self._replaced = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value over the replica's own samples: that of all samples comes after the step."""
        if self._replica.is_calling:
            return self._run("forward", *args, **kwargs)
        self._append("forward", args, kwargs)
        try:
            with _Calling(self._replica, [module for module, _ in self._inner]):
                value = self._run("forward", *args, **kwargs)
        except Exception as error:
            # Too few samples, perhaps. Errors of other types, out of memory too, are never that.
            if type(error) not in (ValueError, RuntimeError) and not is_a(error, Warning):
                add_note(error, f"[in forward of a metric ({type(self._metric).__qualname__})]")
                raise
            value = self._no_value(error)
        self._replica.note(value, self._metric)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self._replica.is_calling:
            self._run("update", *args, **kwargs)
        else:
            self._append("update", args, kwargs)

    def reset(self) -> None:
        if self._replica.is_calling:
            self._run("reset")
        else:
            self._append("reset", (), {})

    def compute(self) -> Any:
        if self._replica.is_calling:
            return self._run("compute")
        raise RuntimeError(
            f"Expected compute() of {type(self._metric).__qualname__} to be called after the step: "
            "during it a replica knows only its own samples. Log the metric object with "
            "self.log(name, metric), or call compute() in an epoch-end hook."
        )

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method that the metric has itself."""
        own = (self._replaced or {}).get(name)
        if own is None:
            own = getattr(type(self._own), name).__get__(self._own)
        return own(*args, **kwargs)

    def _no_value(self, error: Exception) -> NoValue:
        value = NoValue(error, f"{type(self._metric).__qualname__}.forward")
        self._replica.without_value.append(weakref.ref(value))
        return value

    def _append(self, method: MetricMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = ("metric", id(self._metric), method)
        weights = self._replica.weights_move
        bound = [(there, here.bound(weights=weights)) for here, there in self._inner]
        arguments = _snapshot(args), _snapshot(kwargs)
        call = MetricCall(key, self._metric, method, *arguments, bound)
        self._replica.record(call)


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


def _snapshot(arguments: Any) -> Any:
    """Detached copies: what the step does to its tensors afterwards must not matter."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments
    )
