"""Monitor: what the devices did, for people.

Decided here: what is kept of the steps (`history`), how it is drawn (`picture`), put into
tables (`table`) and logged (`callback`).
"""

from lightning_dp.monitor.callback import DataParallelMonitor as DataParallelMonitor
from lightning_dp.monitor.history import Period as Period
