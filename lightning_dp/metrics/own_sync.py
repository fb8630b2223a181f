"""The own sync of metrics, where there are several processes.

torchmetrics adds up the states of all processes when a metric is computed. What steps have done to
a metric has been done in every process already: until its next reset there is nothing to add up.
A metric that only hooks have called syncs as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_dp.lightning_private import is_of_all_processes, mark_as_of_all_processes
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.recorders import all_in


class OwnSyncs:
    """Keeps metrics from syncing during steps, and as long as they have what steps left on them.

    Attributes:
        in_step: whether a step runs, or is replayed.
    """

    def __init__(self) -> None:
        self.in_step = False

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Looks after the metrics among these."""
        for module in modules:
            if isinstance(module, Metric):
                given = module.distributed_available_fn
                given = given.given if isinstance(given, _WhereNeeded) else given
                module.distributed_available_fn = _WhereNeeded(module, given, self)

    def count_as_of_all(self, calls: Sequence[MetricCall]) -> None:
        """A metric has now what the steps of all processes have given it by these calls."""
        if calls[0].method != "reset":
            for module in all_in(calls[0].metric):
                if isinstance(module, Metric):
                    mark_as_of_all_processes(module)


class _WhereNeeded:
    """Stands for a metric's `distributed_available_fn`; in pickles it is the metric's own."""

    def __init__(self, metric: Metric, given: Callable[[], bool], syncs: OwnSyncs) -> None:
        self._metric, self.given, self._syncs = weakref.ref(metric), given, syncs

    def __call__(self) -> bool:
        metric = self._metric()
        is_whole = self._syncs.in_step or (metric is not None and is_of_all_processes(metric))
        return not is_whole and self.given()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """That of the metric's copy, which has what the metric has."""
        copy = memo.get(id(self._metric()))
        return self.given if copy is None else _WhereNeeded(copy, self.given, self._syncs)

    def __reduce__(self) -> Any:
        return _itself, (self.given,)


def _itself(value: Any) -> Any:
    return value
