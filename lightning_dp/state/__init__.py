"""State: what a step leaves on `self`.

Decided here: how containers that every replica has filled become one (`containers`,
`copied_containers`, `items`), which of the attributes that a step has bound stay (`module_state`,
for each module `module_attributes`), what `self.optimizers()` gives a replica (`own_optimizers`),
and what `passes` for another object.
"""

from lightning_dp.state.copied_containers import live as live
from lightning_dp.state.items import copied as copied
from lightning_dp.state.items import is_container as is_container
from lightning_dp.state.module_state import ModuleState as ModuleState
from lightning_dp.state.own_optimizers import own_optimizers as own_optimizers
from lightning_dp.state.passes import Passes as Passes
