"""The journal: what replicas say to the outside during a step, and its replay after the step.

Replicas write down their calls of `self.log` and of metrics, in the order in which they make them.
After the step the same calls of all replicas are joined and made once, on the main thread, on the
user's module.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.logs import LogCall, log_call, merged_log
from lightning_dp.metrics.torchmetrics_on_replicas import (
    MetricFaces,
    is_metric,
    is_per_sample,
    replay,
)
from lightning_dp.parallel.batch import Shards, StepDims
from lightning_dp.parallel.replaced import StandIn, standing_in
from lightning_dp.parallel.replicas import ReplicaRules, Replicas
from lightning_dp.parallel.split import Order, batch_order
from lightning_dp.state import ModuleState

Call: TypeAlias = LogCall | MetricCall
Row: TypeAlias = dict[int, Any]
"""The same call of several replicas, by the number of the replica among those that work."""


class Journal:
    """The calls of one replica during one step."""

    def __init__(self, device: torch.device) -> None:
        self.calls: list[Call] = []
        self.faces = MetricFaces(self.calls.append, device)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` on a replica."""
        own = self.faces.original(value) if isinstance(value, nn.Module) else value
        self.calls.append(log_call(name, own, args, kwargs))


class Journals(ReplicaRules):
    """The journals of all replicas of a LightningModule.

    Attributes:
        replays: whether what the replicas say reaches the module.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        output_device: torch.device,
    ) -> None:
        self._module = module
        self._output_device = output_device
        self._journals = [Journal(device) for device in devices]
        self._devices = list(devices)
        self._metrics: list[nn.Module] = []
        self._state = ModuleState(output_device)
        self.replays = True

    def on_build(self, leaves: list[nn.Module]) -> None:
        """Remembers the module's own metrics, which record during a step."""
        self._metrics = leaves

    def is_leaf(self, module: nn.Module) -> bool:
        """Metrics are copied in a way of their own."""
        return is_metric(module)

    def copy_leaf(self, module: nn.Module, k: int, device: torch.device) -> nn.Module:
        """A metric that writes into replica k's journal."""
        return self._journals[k].faces.make(module)

    def own_attributes(
        self, module: nn.Module, twin: nn.Module, k: int, device: torch.device
    ) -> dict[str, Any]:
        """`self.device` and `self.log` of a replica."""
        own: dict[str, Any] = {**own_device(module, device)}
        if module is self._module:
            own["log"] = StandIn(twin, "log", self._journals[k].log)
        return own

    @contextlib.contextmanager
    def around(
        self,
        replicas: Replicas,
        shards: Shards,
        is_rerun: bool = False,
    ) -> Iterator[None]:
        """Records while the replicas run; if all went well, replays.

        A rerun has done so before. It, and a step that did not fit and will run again, leave the
        module as it was.
        """
        for journal in self._journals:
            journal.calls.clear()
        state = self._state
        state.begin(replicas.submodules, shards.active)
        try:
            # Replica 0 is the user's module: it records only while the step lasts.
            own = self._journals[0]
            worn = own.faces.worn(self._metrics) if self._metrics else contextlib.nullcontext()
            with standing_in(self._module, "log", own.log), worn:
                yield
            if is_rerun:
                state.undo()
            else:
                state.settle(replicas, shards)
        except torch.OutOfMemoryError:
            state.undo()
            raise
        if not is_rerun:
            self._replay(shards)

    def _replay(self, shards: Shards) -> None:
        if not self.replays:
            return
        sizes, order = shards.active_sizes, shards.active_order
        journals = [self._journals[k].calls for k in shards.active]
        for row in _aligned(journals, sizes, order, shards.dims):
            present = [sizes[i] for i in row]
            calls: list[Any] = list(row.values())
            if isinstance(calls[0], MetricCall):
                positions = None if order is None else [order[i] for i in row]
                replay(calls, present, positions, shards.dims)
                continue
            if len(row) < len(journals):
                self._refuse(calls[0].name, row, shards)
            merged = merged_log(calls, present, self._output_device, shards.dims)
            self._module.log(merged.name, merged.value, **merged.options)

    def _refuse(self, key: str, present: Row, shards: Shards) -> NoReturn:
        names = [
            f"replica {k} on {self._devices[k]} ({shards.sizes[k]} samples)" for k in shards.active
        ]
        got = [name for i, name in enumerate(names) if i in present]
        missing = [name for i, name in enumerate(names) if i not in present]
        raise ValueError(
            f"self.log({key!r}): expected the same keys from every replica, got it from "
            f"{', '.join(got)}, but not from {', '.join(missing)}. Log it for every shard; "
            "a value that some shards lack can be logged through a torchmetrics metric."
        )


def _aligned(
    journals: Sequence[Sequence[Call]],
    sizes: Sequence[int],
    order: Order | None,
    dims: StepDims,
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
    alone = {
        key: _one_by_one(own, sizes, order)
        for key, own in of_metrics.items()
        if is_per_sample([list(row.values()) for row in own], sizes, dims)
    }
    aligned: list[Row] = []
    for (key, n), row in rows.items():
        if key not in alone:
            aligned.append(row)
        elif n == 0:
            aligned.extend(alone[key])
    return aligned


def _one_by_one(rows: list[Row], sizes: Sequence[int], order: Order | None) -> list[Row]:
    alone = [{k: row[k]} for k in range(len(sizes)) for row in rows if k in row]
    places = None if order is None or len(alone) != sum(sizes) else batch_order(order)
    return alone if places is None else [alone[i] for i in places]
