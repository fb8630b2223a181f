"""Replicas: one module on every device, built once, kept, and refreshed where the root changed."""

from lightning_dp.parallel.replicate.replicas import BufferCopies as BufferCopies
from lightning_dp.parallel.replicate.replicas import Contents as Contents
from lightning_dp.parallel.replicate.replicas import Replicas as Replicas
from lightning_dp.parallel.replicate.structure import ModuleStructure as ModuleStructure
from lightning_dp.parallel.replicate.structure import OwnAttributes as OwnAttributes
from lightning_dp.parallel.replicate.structure import layers_in as layers_in
from lightning_dp.parallel.replicate.structure import refuse_limited_norms as refuse_limited_norms
