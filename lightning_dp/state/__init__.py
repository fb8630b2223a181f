"""State: what a step leaves on `self` and in its optimizers.

Decided here: how containers that every replica has filled become one (`containers`), which of the
attributes that a step has bound stay (`module_state`), and that options of optimizers change once
(`optimizer_groups`).
"""

from lightning_dp.state.containers import copied as copied
from lightning_dp.state.containers import is_container as is_container
from lightning_dp.state.copied_containers import Contents as Contents
from lightning_dp.state.copied_containers import live as live
from lightning_dp.state.module_state import ModuleState as ModuleState
from lightning_dp.state.optimizer_groups import changed_once as changed_once
