"""State: what a step leaves on `self`, items in lists and dicts (`merge`) and attributes."""

from lightning_dp.state.module_state import ModuleState as ModuleState
