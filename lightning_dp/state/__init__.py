"""State: what a step leaves on `self` and in its optimizers.

Decided here: how containers that every replica has filled become one (`containers`,
`copied_containers`, `items`), which of the attributes that a step has bound stay (`module_state`,
for each module `module_attributes`; `looked_at` says which are the user's), what hooks keep
elsewhere (`kept_by_hooks`), what may not be `made_in_steps`, which optimizers a step can get hold
of (`optimizers`, and of one replica `own_optimizers`), that what it does to them is done once
(`shared_optimizers`), what `passes` for another object, and what replicas see in the place of
methods of an object that they share (`shared_methods`).
"""

from lightning_dp.state.copied_containers import live as live
from lightning_dp.state.items import copied as copied
from lightning_dp.state.items import is_container as is_container
from lightning_dp.state.module_state import ModuleState as ModuleState
from lightning_dp.state.optimizers import Tool as Tool
from lightning_dp.state.optimizers import own_methods as own_methods
from lightning_dp.state.optimizers import tools_of as tools_of
from lightning_dp.state.own_optimizers import own_optimizers as own_optimizers
from lightning_dp.state.passes import Passes as Passes
from lightning_dp.state.shared_methods import SharedMethods as SharedMethods
from lightning_dp.state.shared_optimizers import shared_optimizers as shared_optimizers
