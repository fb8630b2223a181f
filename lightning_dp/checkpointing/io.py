"""`ModulePrefixCheckpointIO`: checkpoints with clean keys, whatever wrappers left in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lightning
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dp.checkpointing import files
from lightning_dp.lightning_private import given_io, set_io
from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.errors import add_note, is_a
from lightning_dp.parallel.state_keys import PREFIXES, keys_of, match_keys, rename, without_outer
from lightning_dp.processes import ProcessesMixin

_VERSION = "pytorch-lightning_version"
_NOTES, _ADDED = "lightning_dp", "added_prefix"
_WEIGHTS_OF_TRAINER = ("state_dict", "current_model_state")  # the second by WeightAveraging
_BETWEEN_PROCESSES = ".temp.ckpt"  # by which Lightning's launchers hand over a bare state dict


class AtomicTorchCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`; local files are written atomically, and more are read."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        local = files.local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            files.write(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        try:
            loaded = files.read(path, map_location=map_location, weights_only=weights_only)
        except FileNotFoundError as error:  # in the words of Lightning's own IO
            raise FileNotFoundError(f"Checkpoint file not found: {path}") from error
        return cast(dict[str, Any], loaded)


class ModulePrefixMixin:  # its base class is of either of Lightning's packages
    """Saves checkpoints with clean keys, and loads them whatever prefixes wrappers left in them.

    The default of `DataParallelStrategy`; for others `Trainer(plugins=[...])`. It renames the
    model's state, also where averages or callbacks hold a copy under the model's names, and leaves
    all else, such as states of optimizers. Plain Lightning and torch load what it saves.

    A file may be a checkpoint of Lightning, a state dict, a dict that has one under `state_dict`,
    `model`, `model_state_dict` or `net`, or a `.safetensors` file. Without `weights_only=False` no
    code in it is run. Local files are written atomically: a crash leaves the old one.

    Args:
        checkpoint_io: the IO that writes and reads, such as `AsyncCheckpointIO()`, which may also
            have this one in it; None for `torch.save` into local files atomically.
        on_save: `"strip"` takes away wrappers around the whole model. `"add"` puts `module.`
            before the model's keys, for scripts with nn.DataParallel or DDP. `"keep"` does nothing.
        on_load: `"auto"` takes away what `"add"` has added, and wrappers around all keys; in what
            a Trainer has saved, `module.` is a submodule and stays. `DataParallelStrategy` then
            makes the keys the module's, at any depth. `"keep"` does nothing, nor does the strategy.
        prefixes: what wrappers put before keys, see `normalize_state_dict`.

    Raises:
        ValueError: an option is none of its choices.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/old.pt"
        >>> torch.save({"module.weight": torch.ones(1)}, path)
        >>> list(ModulePrefixCheckpointIO().load_checkpoint(path)["state_dict"])
        ['weight']
    """

    def __init__(
        self,
        checkpoint_io: Any | None = None,
        *,
        on_save: Literal["strip", "add", "keep"] = "strip",
        on_load: Literal["auto", "keep"] = "auto",
        prefixes: Sequence[str] = PREFIXES,
    ) -> None:
        check_choice("on_save", on_save, ("strip", "add", "keep"))
        check_choice("on_load", on_load, ("auto", "keep"))
        super().__init__()
        default: Any = AtomicTorchCheckpointIO()
        self.checkpoint_io = default if checkpoint_io is None else checkpoint_io
        if getattr(self.checkpoint_io, "checkpoint_io", self) is None:  # AsyncCheckpointIO(), say
            self.checkpoint_io.checkpoint_io = AtomicTorchCheckpointIO()
        self.on_save, self.on_load, self.prefixes = on_save, on_load, prefixes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves through the wrapped IO, with keys as `on_save` says."""
        if self.on_save != "keep" and Path(path).name != _BETWEEN_PROCESSES:
            checkpoint = strip_wrappers(checkpoint, self.prefixes)
            if self.on_save == "add":
                checkpoint = add_prefix(checkpoint)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the wrapped IO, with keys as `on_load` says, as a Trainer needs it."""
        options = {"map_location": map_location, "weights_only": weights_only}
        given = {name: value for name, value in options.items() if value is not None}
        loaded = self.checkpoint_io.load_checkpoint(path, **given)
        if Path(path).name != _BETWEEN_PROCESSES:
            loaded = as_lightnings(loaded)
            if self.on_load != "keep":
                loaded = strip_wrappers(remove_added(loaded), self.prefixes)
        return cast(dict[str, Any], loaded)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes through the wrapped IO."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Ends the wrapped IO: one that saves in a thread waits for it."""
        self.checkpoint_io.teardown()


class ModulePrefixCheckpointIO(ModulePrefixMixin, CheckpointIO):  # noqa: D101  # `__doc__`
    __doc__ = ModulePrefixMixin.__doc__


def is_lightnings(checkpoint: Any) -> bool:
    """Whether a Trainer made it, so that `module.` in its `state_dict` is a submodule's."""
    keys = checkpoint.keys() if isinstance(checkpoint, Mapping) else ()
    return {_VERSION, "loops", "state_dict"}.issubset(keys)


def as_lightnings(loaded: Any) -> Any:
    """What a file held; weights with the `state_dict` and version that a Trainer asks for."""
    if isinstance(loaded, Mapping) and _VERSION in loaded and "state_dict" in loaded:
        return loaded
    weights = files.find_weights(loaded)
    if weights is None:
        return loaded
    rest = loaded if isinstance(loaded, Mapping) and loaded is not weights else {}
    # The present version: nothing is to be migrated.
    return {**rest, "state_dict": weights, _VERSION: rest.get(_VERSION, lightning.__version__)}


def strip_wrappers(checkpoint: Any, prefixes: Sequence[str] = PREFIXES) -> Any:
    """Takes away the wrappers around all of the model's keys; `module.` not if a Trainer saved."""
    weights = files.find_weights(checkpoint) or {}
    certain = PREFIXES[1:] if is_lightnings(checkpoint) else prefixes
    return rename_all(checkpoint, without_outer(weights, certain))


def rename_all(checkpoint: Any, names: Mapping[str, str]) -> Any:
    """The checkpoint with other names of the model's keys, wherever its state stands.

    A dict of tensors is a copy of the model's state, such as an average, if all its keys are the
    model's; any other has names of its own.
    """
    if all(key == name for key, name in names.items()):
        return checkpoint
    weights = files.find_weights(checkpoint)

    def renamed(value: Any) -> Any:
        if value is weights or files.is_state(value):
            return rename(value, names) if value.keys() <= names.keys() else value
        if type(value) in (dict, OrderedDict) and "param_groups" not in value:
            return type(value)((key, renamed(part)) for key, part in value.items())
        return type(value)(map(renamed, value)) if type(value) in (list, tuple) else value

    return renamed(checkpoint)


def add_prefix(checkpoint: Any) -> Any:
    """Puts `module.` before the model's keys, with a note in a Trainer's checkpoint.

    The keys there are a LightningModule's: without a note the prefix would pass for a submodule.
    """
    if not is_lightnings(checkpoint):
        weights = files.find_weights(checkpoint) or {}
        return rename_all(checkpoint, {key: PREFIXES[0] + key for key in weights})
    notes = {**checkpoint.get(_NOTES, {}), _ADDED: PREFIXES[0]}
    return _rename_trainers(checkpoint, lambda key: PREFIXES[0] + key) | {_NOTES: notes}


def remove_added(checkpoint: Any) -> Any:
    """Undoes `add_prefix` in a Trainer's checkpoint, if the note says so."""
    notes = dict(checkpoint.get(_NOTES, {})) if is_lightnings(checkpoint) else {}
    prefix = notes.pop(_ADDED, None)
    if prefix is None:
        return checkpoint
    return _rename_trainers(checkpoint, lambda key: key.removeprefix(prefix)) | {_NOTES: notes}


def _rename_trainers(checkpoint: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Renames what the Trainer itself saved; callbacks keep the names that they gave."""
    states = {key: checkpoint[key] for key in _WEIGHTS_OF_TRAINER if key in checkpoint}
    return {**checkpoint, **{k: rename(s, {n: name(n) for n in s}) for k, s in states.items()}}


def nothing_to_resume(path: Any) -> str:
    """The message for a checkpoint from which training cannot be resumed."""
    return (
        f"ckpt_path: expected a checkpoint to resume training from, got {str(path)!r}, which "
        "holds weights and no training state (optimizers, epoch). To begin a new training with "
        "these weights: init_from=... on the command line, or in Python "
        "lightning_dp.checkpointing.load_weights(model, path) before fit."
    )


class CheckpointMixin(ProcessesMixin):
    """The strategy's checkpoints: names that fit the module."""

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
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        files.weights_in(checkpoint, checkpoint_path)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module = cast(LightningModule, self.lightning_module)
        if module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
            self._weights_only_path = module.trainer.ckpt_path
        io: Any = self.checkpoint_io
        while io is not None and not isinstance(io, ModulePrefixMixin):
            io = getattr(io, "checkpoint_io", None)
        if io is not None and io.on_load == "auto":
            names = match_keys(checkpoint["state_dict"], keys_of(module), io.prefixes)
            checkpoint.update(rename_all(checkpoint, names))
            files.add_tied(checkpoint["state_dict"], module)
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        path, self._weights_only_path = self._weights_only_path, None
        if is_a(exception, KeyError) and path is not None:
            add_note(exception, nothing_to_resume(path))
