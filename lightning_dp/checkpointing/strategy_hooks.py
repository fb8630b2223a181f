"""The strategy's checkpoints: names that fit the module, and what a split has learnt."""

from __future__ import annotations

from typing import Any, cast

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dp.checkpointing.files import weights_in
from lightning_dp.checkpointing.io import (
    ModulePrefixCheckpointIO,
    name_for_module,
    nothing_to_resume,
)
from lightning_dp.lightning_private import given_io, set_io
from lightning_dp.parallel.errors import add_note, is_a
from lightning_dp.parallel.split import LearningSplit, SplitPolicy
from lightning_dp.processes import ProcessesMixin

_CHECKPOINT_KEY = "lightning_dp"


class CheckpointMixin(ProcessesMixin):
    """Saves clean names, loads any, and keeps what a split has learnt."""

    split_policy: SplitPolicy
    _weights_only_path: Any = None  # of a checkpoint without the training state that a fit needs

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or ours; in a wrapper that was given none it is ours too."""
        given = given_io(self)
        if given is None:
            set_io(self, ModulePrefixCheckpointIO())
        elif getattr(given, "checkpoint_io", self) is None:
            given.checkpoint_io = ModulePrefixCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        set_io(self, io)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Adds what a split has learnt; with several processes each learns anew."""
        if isinstance(self.split_policy, LearningSplit) and self._world is None:
            checkpoint[_CHECKPOINT_KEY] = {"split": self.split_policy.state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        weights_in(checkpoint, checkpoint_path)
        own = checkpoint.get(_CHECKPOINT_KEY, {})
        if "split" in own and isinstance(self.split_policy, LearningSplit) and self._world is None:
            self.split_policy.load_state_dict(own["split"])
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module = cast(LightningModule, self.lightning_module)
        if module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
            self._weights_only_path = module.trainer.ckpt_path
        name_for_module(checkpoint, module, self.checkpoint_io)
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        path, self._weights_only_path = self._weights_only_path, None
        if is_a(exception, KeyError) and path is not None:
            add_note(exception, nothing_to_resume(path))
