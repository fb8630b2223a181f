"""Checkpointing: what is written to files and read from them.

Decided here: what is in a checkpoint and under which names (`contents`), which kinds of files there
are (`files`, `safetensors_files`), that a file is whole or not there (`atomic_files`), and how
Lightning gets at it (`io`, `strategy_hooks`).
"""

from lightning_dp.checkpointing import files, safetensors_files
from lightning_dp.checkpointing.contents import (
    add_to,
    added_to,
    as_lightnings,
    is_lightnings,
    note_added,
    rename,
    rename_states,
    take_added,
)
from lightning_dp.checkpointing.files import load_weights
from lightning_dp.checkpointing.io import ModulePrefixCheckpointIO
from lightning_dp.checkpointing.strategy_hooks import CheckpointMixin

__all__ = [
    "CheckpointMixin",
    "ModulePrefixCheckpointIO",
    "add_to",
    "added_to",
    "as_lightnings",
    "files",
    "is_lightnings",
    "load_weights",
    "note_added",
    "rename",
    "rename_states",
    "safetensors_files",
    "take_added",
]
