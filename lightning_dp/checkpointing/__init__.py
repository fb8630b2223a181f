"""Checkpointing: what is written to files and read from them.

Decided here: what is in a checkpoint and under which names (`contents`), which kinds of files there
are (`files`, `safetensors_files`), that a file is whole or not there (`atomic_files`), and how
Lightning gets at it (`io`, `strategy_hooks`).
"""

from lightning_dp.checkpointing import files as files
from lightning_dp.checkpointing import safetensors_files as safetensors_files
from lightning_dp.checkpointing.atomic_files import replacing as replacing
from lightning_dp.checkpointing.contents import add_to as add_to
from lightning_dp.checkpointing.contents import added_to as added_to
from lightning_dp.checkpointing.contents import as_lightnings as as_lightnings
from lightning_dp.checkpointing.contents import is_lightnings as is_lightnings
from lightning_dp.checkpointing.contents import note_added as note_added
from lightning_dp.checkpointing.contents import nothing_to_resume as nothing_to_resume
from lightning_dp.checkpointing.contents import rename as rename
from lightning_dp.checkpointing.contents import rename_states as rename_states
from lightning_dp.checkpointing.contents import take_added as take_added
from lightning_dp.checkpointing.files import load_weights as load_weights
from lightning_dp.checkpointing.io import ModulePrefixCheckpointIO as ModulePrefixCheckpointIO
from lightning_dp.checkpointing.strategy_hooks import CheckpointMixin as CheckpointMixin
