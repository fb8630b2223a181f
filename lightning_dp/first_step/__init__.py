"""Check: does a split call give the numbers of one device, and if not, why?

Decided here: what a call may change and how that is put back (`snapshot`), how both calls run
(`runner`), what is compared and how closely (`compare`), why they differ (`causes`), in which words
(`report`), how a module is checked whose calls are spread over the devices (`first_call`), and how
a LightningModule's steps are (`lightning_step`).

The *root* is the first device, on which the user's module is. *Alone* is a call on the root, with
the whole small batch or with one shard of it; *split* is the same call on the replicas.
"""

from lightning_dp.first_step.causes import check as check
from lightning_dp.first_step.compare import Key as Key
from lightning_dp.first_step.first_call import FirstCalls as FirstCalls
from lightning_dp.first_step.first_call import ForwardCall as ForwardCall
from lightning_dp.first_step.first_call import check_is_cheap as check_is_cheap
from lightning_dp.first_step.first_call import copied as copied
from lightning_dp.first_step.first_call import small_part as small_part
from lightning_dp.first_step.report import Report as Report
from lightning_dp.first_step.report import announce as announce
from lightning_dp.first_step.runner import Call as Call
from lightning_dp.first_step.snapshot import NotChecked as NotChecked
from lightning_dp.first_step.snapshot import copy_to_cpu as copy_to_cpu
