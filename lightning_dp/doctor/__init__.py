"""Doctor: do this machine's devices together compute what one of them computes?

Decided here: six `laws` that several devices keep, and the `report` of ``doctor`` and ``env``.
"""

from lightning_dp.doctor.report import env as env
from lightning_dp.doctor.report import main as main
from lightning_dp.doctor.report import versions as versions
