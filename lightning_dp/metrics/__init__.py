"""Metrics: what all replicas log and measure in a step becomes one call each.

Decided here: what a replica writes down (`journal`) and in what else than steps (`backwards`), how
values of `self.log` are merged (`logs`), what is told of those that are no means (`logged_means`)
and of steps that call loggers themselves (`own_rows`), how metrics of torchmetrics record on
replicas (`recorders`), what such a call returns (`one_call`, `no_value`), how they are called with
the whole batch (`torchmetrics_on_replicas`, `arguments`), and how such calls are taken back
(`undo`). Of several processes: what their replicas say together (`exchange`, as bytes: `wire`),
what steps say that each runs once (`steps_on_host`), and when metrics sync themselves (`own_sync`).
"""

from lightning_dp.metrics.backwards import Backwards as Backwards
from lightning_dp.metrics.journal import Journals as Journals
from lightning_dp.metrics.own_rows import OwnRows as OwnRows
from lightning_dp.metrics.steps_on_host import HostJournals as HostJournals
from lightning_dp.metrics.steps_on_host import SpreadJournals as SpreadJournals
from lightning_dp.metrics.torchmetrics_on_replicas import is_metric as is_metric
