"""``lightning-dp plan``: what many machines would give.

Decided here: which options describe a cluster and a model (`options`), what is measured on this
machine instead of being told (`measure`), and what is printed of the forecast (`command`).
"""

from lightning_dp.app.plan.command import main as main
from lightning_dp.app.plan.options import typed as typed
