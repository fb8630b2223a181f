"""First step: is a split batch's step that of one device, and if not, why.

Decided here: how the two are compared (`check`, `compare`), what the difference comes from
(`diagnosis`), and that trying leaves no trace (`snapshot`).
"""

from lightning_dp.first_step.check import FirstStep as FirstStep
from lightning_dp.first_step.check import check_first_step as check_first_step
