"""Processes, as Lightning has them: who is who, and which part of a batch each one loads.

Decided here: ranks (`ranks`), the process group (`group`, with a store of its own for each time
processes are started: `attempts`), and which of a machine's devices are whose (`machine`); what
stands in place of a user's loader (`loaders`): of a DataLoader, which samples of each batch are
loaded here (`slices`), and that all processes draw the same ones (`draws`, in one
`drawing_state`; `torch_loaders` has what is private to torch); of an iterable, which share of it
is read here (`streams`). All begin with the same module and options (`alike`), and optimizers
keep theirs (`optimizers`). What becomes of all when one fails (`failures`, `watch`, `whereabouts`)
or is told to end (`stopping`); where a fit is in its data, and its random states, so that it goes
on from a checkpoint as if nothing had been (`course`, `random_states`).
"""

from lightning_dp.processes.alike import begin_alike as begin_alike
from lightning_dp.processes.alike import check_options as check_options
from lightning_dp.processes.course import Course as Course
from lightning_dp.processes.failures import FailuresMixin as FailuresMixin
from lightning_dp.processes.group import check_group_options as check_group_options
from lightning_dp.processes.loaders import is_idle_in as is_idle_in
from lightning_dp.processes.loaders import is_of_several as is_of_several
from lightning_dp.processes.loaders import open_fetcher as open_fetcher
from lightning_dp.processes.ranks import ProcessesMixin as ProcessesMixin
from lightning_dp.processes.slices import Slice as Slice
