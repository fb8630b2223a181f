"""Monitor: what the devices did, in numbers (`history`), a table and a picture (`display`)."""

from lightning_dp.monitor.callback import DataParallelMonitor as DataParallelMonitor
from lightning_dp.monitor.display import table_of as table_of
from lightning_dp.monitor.history import Period as Period
