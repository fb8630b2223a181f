"""Metrics: what all replicas log and measure in a step becomes one call each.

Decided here: what a replica writes down (`journal`), how values of `self.log` are merged (`logs`),
how metrics of torchmetrics record on replicas (`torchmetrics_on_replicas`) and are called with the
whole batch (`arguments`), and how such calls are taken back (`undo`).
"""

from lightning_dp.metrics.journal import Journals as Journals
from lightning_dp.metrics.torchmetrics_on_replicas import is_metric as is_metric
