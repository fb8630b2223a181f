"""Metrics: what all replicas log and measure in a step becomes one call each.

`journal` records what replicas log and measure, and replays it once; `logs` merges calls of
`self.log`. Metrics of torchmetrics: `recorders` record their calls on replicas, `one_call` and
`no_value` are what such a call returns there, `torchmetrics_on_replicas` and `arguments` replay it
with the whole batch, `undo` takes it back. With several processes: `exchange` and `wire` gather the
records, `steps_on_host` records steps that run once per process, `own_sync` keeps metrics from
syncing twice.
"""

from lightning_dp.metrics.journal import Journals as Journals
from lightning_dp.metrics.steps_on_host import HostJournals as HostJournals
from lightning_dp.metrics.steps_on_host import SpreadJournals as SpreadJournals
from lightning_dp.metrics.torchmetrics_on_replicas import is_metric as is_metric
