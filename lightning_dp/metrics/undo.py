"""Undo: metrics as they were before the calls of a step, which may run out of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_dp.metrics.arguments import AnyMetric


class MetricStates:
    """What metrics have, kept where a device may run out of memory.

    In `kept` are tensors and containers, and what was in them.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def keep(self, metrics: Sequence[AnyMetric]) -> None:
        """Copies what these metrics have now; items of lists are not written to."""
        self.kept = []
        parts = {part: None for metric in metrics for part in metric.modules()}
        for part in parts:
            if isinstance(part, Metric | MetricCollection) and _can_fail(part):
                self._keep(vars(part))
                for value in (*vars(part).values(), *part.buffers(recurse=False)):
                    self._keep(value)

    def give_back(self) -> None:
        """Gives them the same again: the same objects, with what was in them."""
        with torch.no_grad():
            for value, content in self.kept:
                if isinstance(value, Tensor):
                    value.copy_(content)
                    continue
                value.clear()
                value.update(content) if isinstance(value, dict | set) else value.extend(content)
        self.drop()

    def drop(self) -> None:
        """There is nothing to give back any more."""
        self.kept = []

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.kept.append((value, value.detach().clone()))
        elif isinstance(value, dict | list | deque | set):
            self.kept.append((value, value.copy()))


def _can_fail(metric: AnyMetric) -> bool:
    """Whether its states are where memory runs out with an error that is met by another try."""
    tensors = (value for value in vars(metric).values() if isinstance(value, Tensor))
    return isinstance(metric, MetricCollection) or any(
        device.type != "cpu" for device in (metric.device, *(t.device for t in tensors))
    )
