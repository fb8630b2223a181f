"""Metrics: what all replicas log and measure in a step becomes one call each.

The replicas record their calls of `self.log` and of torchmetrics metrics (`replica`). After the
step the calls are merged (`logged_values`, `replay`) and made once, on the user's own module
(`recorder`). With several processes each sends the others its records first (`ranks`).
"""

from lightning_dp.metrics.recorder import StepRecorder as StepRecorder
from lightning_dp.metrics.replica import is_metric as is_metric
