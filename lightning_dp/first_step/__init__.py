"""Check: does a split call give the numbers of one device, and if not, why?

Before the first call of each kind, a small part of its batch runs once on the root alone and once
split over the devices, each time from the same state of the module (`snapshot`). `call` is one such
run, `compare` finds which values differ and why, and `report` says it. What is called is a spread
`forward` (`first_call`) or a LightningModule's step (`lightning_step`).
"""

from lightning_dp.first_step.first_call import FirstCalls as FirstCalls
from lightning_dp.first_step.report import Report as Report
from lightning_dp.first_step.report import announce as announce
