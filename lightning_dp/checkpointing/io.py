"""`ModulePrefixCheckpointIO`: checkpoints with clean keys, whatever wrappers left in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lightning
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_dp.checkpointing import files
from lightning_dp.checkpointing.state_keys import (
    PREFIXES,
    keys_of,
    match_keys,
    rename,
    without_outer,
)
from lightning_dp.lightning_private import given_io, set_io
from lightning_dp.parallel.checks import check_choice
from lightning_dp.processes import ProcessesMixin

_VERSION = "pytorch-lightning_version"
_ADDED = "lightning_dp_added_prefix"
_AVERAGED = "current_model_state"  # the model's, where WeightAveraging saves an average for it


class AtomicTorchCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`; local files are written atomically, and more are read."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            files.write(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        loaded = files.read(path, map_location=map_location, weights_only=weights_only)
        return cast(dict[str, Any], loaded)


class ModulePrefixMixin:  # its base class is of either of Lightning's packages
    """Saves checkpoints with clean keys, and loads them whatever prefixes wrappers left in them.

    The default of `DataParallelStrategy`; for others `Trainer(plugins=[...])`. It renames the
    model's state and leaves all else, such as states of callbacks and optimizers. Plain Lightning
    and torch load what it saves.

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
        inner: Any = AtomicTorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        if getattr(inner, "checkpoint_io", self) is None:  # AsyncCheckpointIO(), say
            inner.checkpoint_io = AtomicTorchCheckpointIO()
        self.checkpoint_io = inner
        self.on_save, self.on_load, self.prefixes = on_save, on_load, prefixes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves through the wrapped IO, with keys as `on_save` says."""
        if self.on_save != "keep":
            checkpoint = strip(checkpoint, self.prefixes)
        if self.on_save == "add":
            checkpoint = add_prefix(checkpoint)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the wrapped IO, with keys as `on_load` says, as a Trainer needs it."""
        options = {"map_location": map_location, "weights_only": weights_only}
        given = {name: value for name, value in options.items() if value is not None}
        loaded = as_lightnings(self.checkpoint_io.load_checkpoint(path, **given))
        return cast(
            dict[str, Any], loaded if self.on_load == "keep" else strip(loaded, self.prefixes)
        )

    def remove_checkpoint(self, path: Any) -> None:
        """Removes through the wrapped IO."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Ends the wrapped IO: one that saves in a thread waits for it."""
        self.checkpoint_io.teardown()


class ModulePrefixCheckpointIO(ModulePrefixMixin, CheckpointIO):  # noqa: D101  # `__doc__`
    __doc__ = ModulePrefixMixin.__doc__


def as_lightnings(loaded: Any) -> Any:
    """What a file held; weights with the `state_dict` and version that a Trainer asks for."""
    weights = files.find_weights(loaded)
    if weights is None or (_VERSION in loaded and "state_dict" in loaded):
        return loaded
    rest = {} if weights is loaded else loaded
    # The present version: nothing is to be migrated.
    return {**rest, "state_dict": weights, _VERSION: rest.get(_VERSION, lightning.__version__)}


def strip(checkpoint: Any, prefixes: Sequence[str] = PREFIXES) -> Any:
    """Takes away what `add_prefix` has added, and the wrappers around all of the model's keys.

    In a Trainer's checkpoint `module.` is a submodule's, unless it was added.
    """
    weights = files.find_weights(checkpoint) or {}
    if isinstance(checkpoint, Mapping) and _ADDED in checkpoint:
        prefix = checkpoint[_ADDED]
        rest = {key: value for key, value in checkpoint.items() if key != _ADDED}
        return rename_weights(rest, {key: key.removeprefix(prefix) for key in weights})
    certain = PREFIXES[1:] if _is_trainers(checkpoint) else prefixes
    return rename_weights(checkpoint, without_outer(weights, certain))


def add_prefix(checkpoint: Any) -> Any:
    """Puts `module.` before the model's keys, with a note in a Trainer's checkpoint.

    The keys there are a LightningModule's: without a note the prefix would pass for a submodule.
    """
    weights = files.find_weights(checkpoint) or {}
    renamed = rename_weights(checkpoint, {key: PREFIXES[0] + key for key in weights})
    return {**renamed, _ADDED: PREFIXES[0]} if _is_trainers(checkpoint) else renamed


def rename_weights(checkpoint: Any, names: Mapping[str, str]) -> Any:
    """The checkpoint with other names of the model's keys; copies in other states keep theirs."""
    weights = files.find_weights(checkpoint)
    if weights is None or all(key == name for key, name in names.items()):
        return checkpoint
    if weights is checkpoint:
        return rename(weights, names)
    return {
        key: rename(value, names) if value is weights or key == _AVERAGED else value
        for key, value in checkpoint.items()
    }


def _is_trainers(checkpoint: Any) -> bool:
    """Whether a Trainer made it, so that `module.` in its `state_dict` is a submodule's."""
    keys = checkpoint.keys() if isinstance(checkpoint, Mapping) else ()
    return {_VERSION, "loops", "state_dict"}.issubset(keys)


class CheckpointMixin(ProcessesMixin):
    """The strategy's checkpoints: names that fit the module."""

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
        io: Any = self.checkpoint_io
        while io is not None and not isinstance(io, ModulePrefixMixin):
            io = getattr(io, "checkpoint_io", None)
        if io is not None and io.on_load == "auto":
            own = keys_of(self.lightning_module)
            names = match_keys(checkpoint["state_dict"], own, io.prefixes)
            checkpoint.update(rename_weights(checkpoint, names))
        super().load_model_state_dict(checkpoint, strict=strict)
