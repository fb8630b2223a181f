"""``lightning-dp doctor``: is all well on this machine, and what is fastest.

Decided here: which devices and laws are examined (`command`), how a module and data of one's own
are made from a configuration (`own_workload`), and what each process of the comparison with DDP
runs (`process`).
"""

from lightning_dp.app.doctor.command import devices_named as devices_named
from lightning_dp.app.doctor.command import main as main
from lightning_dp.app.doctor.own_workload import own_workloads as own_workloads
