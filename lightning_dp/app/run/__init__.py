"""How a configured program begins and ends, whatever its task is.

Decided here: what surrounds a task and its exit status (`program`), the log in a run's folder
(`log`), how a mistyped option (`mistyped`) and a refusal (`refusals`) are told in one line,
and the table of a sweep (`sweep`).
"""

from lightning_dp.app.run.log import note as note
from lightning_dp.app.run.log import note_machine as note_machine
from lightning_dp.app.run.mistyped import check_flags as check_flags
from lightning_dp.app.run.mistyped import composed_in_one_line as composed_in_one_line
from lightning_dp.app.run.program import INTERRUPTED as INTERRUPTED
from lightning_dp.app.run.program import as_program as as_program
from lightning_dp.app.run.refusals import few_keys as few_keys
from lightning_dp.app.run.sweep import table_in_the_end as table_in_the_end
