"""The journal: what replicas say to the outside during a step, and its replay after the step.

Replicas write down their calls of `self.log` and of metrics, in the order in which they make them.
After the step the same calls of all replicas are joined and made once, on the main thread, on the
user's module.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.logs import LogCall, merged_log
from lightning_dp.metrics.torchmetrics_on_replicas import (
    MetricFaces,
    is_metric,
    is_per_sample,
    replay,
)
from lightning_dp.parallel.batch import Shards, StepDims
from lightning_dp.parallel.replaced import replaced
from lightning_dp.parallel.replicas import ReplicaRules, Replicas
from lightning_dp.parallel.split import Order, batch_order
from lightning_dp.state import ModuleState

Call: TypeAlias = LogCall | MetricCall


class Journal:
    """The calls of one replica during one step."""

    def __init__(self, device: torch.device) -> None:
        self.calls: list[Call] = []
        self.faces = MetricFaces(self.calls.append, device)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` on a replica."""
        own = self.faces.original(value) if isinstance(value, nn.Module) else value
        self.calls.append(LogCall.of(name, own, args, kwargs))


class Journals(ReplicaRules):
    """The journals of all replicas of a LightningModule.

    Args:
        module: the user's module.
        devices: the replicas' devices, root first.
        output_device: where logged values end up.

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

    def own_attributes(self, module: nn.Module, k: int, device: torch.device) -> dict[str, Any]:
        """`self.device` and `self.log` of a replica."""
        own: dict[str, Any] = {**own_device(module, device)}
        if module is self._module:
            own["log"] = self._journals[k].log
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
            with replaced(self._module, log=own.log), worn:
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
            positions = None if order is None else [order[i] for i in row]
            metric_calls = [call for call in row.values() if isinstance(call, MetricCall)]
            log_calls = [call for call in row.values() if isinstance(call, LogCall)]
            if metric_calls:
                replay(metric_calls, present, positions, shards.dims)
            else:
                self._check_complete(log_calls[0].name, list(row), shards)
                merged = merged_log(log_calls, present, self._output_device, shards.dims)
                self._module.log(merged.name, merged.value, **merged.options)

    def _check_complete(self, key: str, present: Sequence[int], shards: Shards) -> None:
        names = [
            f"replica {k} on {self._devices[k]} ({shards.sizes[k]} samples)" for k in shards.active
        ]
        if len(present) < len(names):
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
    positions: Order | None,
    dims: StepDims,
) -> list[dict[int, Call]]:
    """The replicas' calls side by side: the n-th call with a key stands beside the other n-th ones.

    The order is that of the first replica; calls that it did not make come last. Calls that were
    made sample by sample stand alone, in the order of the batch.

    Args:
        journals: the calls of every replica that worked.
        sizes: the samples of these replicas.
        positions: those of their samples in the batch; None for shard order.
        dims: what is known of this kind of step.
    """
    rows: dict[tuple[object, ...], list[dict[int, Call]]] = {}
    order: list[tuple[tuple[object, ...], int]] = []
    for k, calls in enumerate(journals):
        counts: Counter[tuple[object, ...]] = Counter()
        for call in calls:
            own = rows.setdefault(call.key, [])
            if counts[call.key] == len(own):
                order.append((call.key, len(own)))
                own.append({})
            own[counts[call.key]][k] = call
            counts[call.key] += 1
    alone = {key: _one_by_one(own, sizes, positions, dims) for key, own in rows.items()}
    aligned: list[dict[int, Call]] = []
    for key, n in order:
        single = alone[key]
        aligned.extend([rows[key][n]] if single is None else single if n == 0 else [])
    return aligned


def _one_by_one(
    rows: list[dict[int, Call]], sizes: Sequence[int], positions: Order | None, dims: StepDims
) -> list[dict[int, Call]] | None:
    """The calls sample after sample, if they are calls of a metric made sample by sample."""
    calls = [[call for call in row.values() if isinstance(call, MetricCall)] for row in rows]
    if not all(calls) or not is_per_sample(calls, sizes, dims):
        return None
    alone = [{k: row[k]} for k in range(len(sizes)) for row in rows if k in row]
    is_in_order = positions is None or len(alone) != sum(sizes)
    places = None if is_in_order else batch_order(positions or ())
    return alone if places is None else [alone[i] for i in places]
