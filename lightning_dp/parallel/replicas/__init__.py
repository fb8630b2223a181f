"""Replicas: one module on every device, built once, kept, and refreshed where the root changed.

Decided here: what a module is made of (`structure`), what stands for each part of it on another
device (`replica`: `weights`, `buffers`, `attributes`, `generators`, `compiled` parts) and leads
back to the root (`broadcast`), how all replicas are `built`, what is copied before a step
(`replicate`, by the `changes`) and may still be `arriving` as it begins, what a write changes that
leaves no trace (`untracked_writes`, by `fingerprints`; `limited_norm`) or that every replica makes
(`shared_writes`, `trained_writes`), which buffers are state of a batch (`buffer_state`), and which
modules cannot be replicated (`structure`, `hidden_layers`).
"""

from lightning_dp.parallel.replicas.buffer_state import WAYS_OUT as WAYS_OUT
from lightning_dp.parallel.replicas.buffer_state import alike as alike
from lightning_dp.parallel.replicas.buffer_state import keeps_state as keeps_state
from lightning_dp.parallel.replicas.changes import Contents as Contents
from lightning_dp.parallel.replicas.hidden_layers import (
    check_nothing_hidden as check_nothing_hidden,
)
from lightning_dp.parallel.replicas.hidden_layers import layers_in as layers_in
from lightning_dp.parallel.replicas.limited_norm import limits_norms as limits_norms
from lightning_dp.parallel.replicas.replicate import BufferCopies as BufferCopies
from lightning_dp.parallel.replicas.replicate import ParameterCopies as ParameterCopies
from lightning_dp.parallel.replicas.replicate import Replicas as Replicas
from lightning_dp.parallel.replicas.structure import ModuleStructure as ModuleStructure
from lightning_dp.parallel.replicas.structure import ReplicaRules as ReplicaRules
