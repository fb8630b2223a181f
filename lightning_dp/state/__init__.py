"""State: what a step leaves on `self`, items in lists and dicts (`merge`) and attributes."""

from lightning_dp.state.module_state import ModuleState as ModuleState
from lightning_dp.state.module_state import warn_of_step as warn_of_step
