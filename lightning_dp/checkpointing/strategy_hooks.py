"""The strategy's checkpoints: names that fit the module, and what a split has learnt."""

from __future__ import annotations

from typing import Any, cast

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dp.checkpointing.contents import nothing_to_resume
from lightning_dp.checkpointing.files import weights_in
from lightning_dp.checkpointing.io import ModulePrefixCheckpointIO, name_as_module
from lightning_dp.lightning_private import given_io, set_io
from lightning_dp.parallel.errors import add_note, is_a
from lightning_dp.parallel.split import LearningSplit, SplitPolicy
from lightning_dp.processes import Course, FailuresMixin

_CHECKPOINT_KEY = "lightning_dp"
_PROCESSES, _COUNTS = "processes", "devices"  # whose splits they are, and how many devices each has


class CheckpointMixin(FailuresMixin):
    """Saves clean names, loads any, and keeps what a split has learnt."""

    split_policy: SplitPolicy
    _present_course: Course | None = None
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
        """Adds what a split has learnt, and where the data of several processes are."""
        own: dict[str, Any] = {}
        if isinstance(self.split_policy, LearningSplit):
            own["split"] = self._learnt(self.split_policy)
        if "optimizer_states" in checkpoint and self._has_course:
            own["course"] = self._course.state(is_alone=self.is_failing)
        if own:
            checkpoint[_CHECKPOINT_KEY] = own
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        weights_in(checkpoint, checkpoint_path)
        own = checkpoint.get(_CHECKPOINT_KEY, {})
        if "split" in own and isinstance(self.split_policy, LearningSplit):
            self._relearn(self.split_policy, own["split"])
        module = cast(LightningModule, self.lightning_module)
        if "course" in own and module.trainer.state.fn == TrainerFn.FITTING:
            self._course.load(own["course"])
        return checkpoint

    def _learnt(self, split: LearningSplit) -> dict[str, Any]:
        """What the splits of all processes have learnt; of one alone, without more ado."""
        own = split.state_dict()
        if self._world is None or self.is_failing:
            return own
        return {_PROCESSES: self._world.gather(own), _COUNTS: list(self._world.device_counts)}

    def _relearn(self, split: LearningSplit, learnt: dict[str, Any]) -> None:
        """Goes on with what the same process had learnt, if devices are shared out as then.

        Else every process begins anew: what one has learnt is of its own devices.
        """
        world = self._world
        counts = [len(self.parallel_devices or ())] if world is None else [*world.device_counts]
        told = learnt.get(_PROCESSES, [learnt])
        if len(told) == len(counts) and learnt.get(_COUNTS, counts) == counts:
            split.load_state_dict(told[0 if world is None else world.rank])

    @property
    def _has_course(self) -> bool:
        """With several processes, and where one goes on from what several have saved.

        Else a fit goes on as Lightning has it.
        """
        return self._world is not None or self._present_course is not None

    @property
    def _course(self) -> Course:
        if self._present_course is None:
            trainer = cast(LightningModule, self.lightning_module).trainer
            self._present_course = Course(trainer, self.parallel_devices or [], self._world)
        return self._present_course

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Training loaders know their place, for checkpoints."""
        placed = self._course.placed(dataloader) if self._has_course else dataloader
        return super().process_dataloader(placed)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._has_course:
            self._course.check_start()

    @override
    def teardown(self) -> None:
        self._present_course = None
        super().teardown()

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module = cast(LightningModule, self.lightning_module)
        if module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
            self._weights_only_path = module.trainer.ckpt_path
        name_as_module(checkpoint, module, self.checkpoint_io)
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        path, self._weights_only_path = self._weights_only_path, None
        if is_a(exception, KeyError) and path is not None:
            add_note(exception, nothing_to_resume(path))
