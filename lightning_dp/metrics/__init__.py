"""Metrics: what all replicas log and measure in a step becomes one call each.

`recorder` records a step and makes its calls of `self.log`; `metric_calls` those of torchmetrics.
With several processes each sends the others its records first (`ranks`).
"""

from lightning_dp.metrics.metric_calls import is_metric as is_metric
from lightning_dp.metrics.recorder import StepRecorder as StepRecorder
