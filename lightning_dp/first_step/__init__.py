"""Check: does a split call give the numbers of one device, and if not, why?

Before the first call of each kind, a small part of its batch runs once on the root alone and once
split over the devices, each time from the same state of the module (`snapshot`). What both compute
is compared and reported (`compare`), and experiments find why it differs (`check`). What is called
is a spread `forward` (`first_call`) or a LightningModule's step (`lightning_step`).

The *root* is the first device, on which the user's module is. *Alone* is a call on the root, with
the whole small batch or with one shard of it; *split* is the same call on the replicas.
"""

from lightning_dp.first_step.first_call import FirstCalls as FirstCalls
from lightning_dp.first_step.first_call import set_by_runs as set_by_runs
from lightning_dp.first_step.report import Report as Report
from lightning_dp.first_step.report import announce as announce
