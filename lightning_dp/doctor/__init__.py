"""Doctor: is all well on a machine that nobody of us has seen, and what should it be used for?

Decided here: what a machine has (`environment`, `machine`, `bandwidth`, `compilers`), what must
hold on it (`law`, `proof`; the laws are in `parts`, `steps` and `failures`, and train `subjects` on
the `bench`), who is at fault (`parts`, `culprits`), what is timed (`workloads`, `timing`, `ddp`)
and what follows from it (`advice`), in which order it is looked at and how told (`examination`,
`report`), what becomes of what hangs (`watchdog`) and of what takes long (`aside`).
"""

from lightning_dp.doctor.bench import muted as muted
from lightning_dp.doctor.bench import quiet_trainer as quiet_trainer
from lightning_dp.doctor.ddp import answer as answer
from lightning_dp.doctor.environment import shown_devices as shown_devices
from lightning_dp.doctor.environment import versions as versions
from lightning_dp.doctor.examination import Plan as Plan
from lightning_dp.doctor.examination import examine as examine
from lightning_dp.doctor.law import Law as Law
from lightning_dp.doctor.law import Result as Result
from lightning_dp.doctor.machine import machine as machine
from lightning_dp.doctor.machine import processor as processor
from lightning_dp.doctor.machine import seconds_of_process as seconds_of_process
from lightning_dp.doctor.proof import COMPILED as COMPILED
from lightning_dp.doctor.proof import LAWS as LAWS
from lightning_dp.doctor.proof import prove as prove
from lightning_dp.doctor.report import Report as Report
from lightning_dp.doctor.timing import Stopwatch as Stopwatch
from lightning_dp.doctor.timing import fair_threads as fair_threads
from lightning_dp.doctor.timing import timed as timed
from lightning_dp.doctor.timing import times_in_one_process as times_in_one_process
from lightning_dp.doctor.workloads import OWN_TWO as OWN_TWO
from lightning_dp.doctor.workloads import Workload as Workload
