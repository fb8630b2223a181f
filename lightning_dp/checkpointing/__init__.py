"""Checkpoints: `io` is Lightning's CheckpointIO, `files` reads and writes, `convert` is a verb."""

from lightning_dp.checkpointing.files import load_weights as load_weights
from lightning_dp.checkpointing.io import CheckpointMixin as CheckpointMixin
from lightning_dp.checkpointing.io import ModulePrefixCheckpointIO as ModulePrefixCheckpointIO
from lightning_dp.checkpointing.io import ModulePrefixMixin as ModulePrefixMixin
