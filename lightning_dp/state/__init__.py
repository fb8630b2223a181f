"""State: what a step leaves on `self`, items in lists and dicts (`merge`) and attributes."""

from lightning_dp.state.merge import copied as copied
from lightning_dp.state.merge import is_container as is_container
from lightning_dp.state.module_state import ModuleState as ModuleState
from lightning_dp.state.own_optimizers import OwnOptimizers as OwnOptimizers
