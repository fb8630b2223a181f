"""Checkpoints that load anywhere: `ModulePrefixCheckpointIO`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch import nn
from typing_extensions import override

from lightning_dp.checkpointing import files as checkpoint_files
from lightning_dp.checkpointing.atomic_files import local_path
from lightning_dp.checkpointing.contents import (
    add_to,
    as_lightnings,
    is_lightnings,
    name_for_module,
    rename_model,
    take_added,
)
from lightning_dp.keys import PREFIXES, Renaming, shared_prefix, strip_prefix
from lightning_dp.lightning_private import set_io, wrapped_io
from lightning_dp.parallel.checks import check_choice

log = logging.getLogger(__name__)

ON_SAVE = ("strip", "add", "keep")
ON_LOAD = ("auto", "strip", "keep")

_PREFIX = "module."
_WRAPPERS_ONLY = tuple(prefix for prefix in PREFIXES if prefix != _PREFIX)
"""What nobody calls a submodule."""

_BETWEEN_PROCESSES = ".temp.ckpt"
"""The file by which Lightning's launchers hand a bare state dict to the main process."""


class AtomicTorchCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`; local files are written atomically, and more are read."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            checkpoint_files.write(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is not None and not local.exists():
            return super().load_checkpoint(path)  # which says so
        loaded = checkpoint_files.read(path, map_location=map_location, weights_only=weights_only)
        return cast(dict[str, Any], loaded)


class ModulePrefixMixin:
    """`ModulePrefixCheckpointIO` without the base class, which each of Lightning's packages has."""

    def __init__(
        self,
        checkpoint_io: Any | None = None,
        *,
        on_save: Literal["strip", "add", "keep"] = "strip",
        on_load: Literal["auto", "strip", "keep"] = "auto",
    ) -> None:
        check_choice("on_save", on_save, ON_SAVE)
        check_choice("on_load", on_load, ON_LOAD)
        super().__init__()
        self.checkpoint_io = _with_atomic_files(checkpoint_io)
        self.on_save = on_save
        self.on_load = on_load

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves through the wrapped IO, with keys as `on_save` says."""
        if self.on_save != "keep" and not _is_between_processes(path):
            checkpoint = _strip(checkpoint, _prefixes_in(checkpoint))
            if self.on_save == "add":
                checkpoint = add_to(checkpoint, _PREFIX)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the wrapped IO, with keys as `on_load` says, as a Trainer needs it."""
        options = {} if map_location is None else {"map_location": map_location}
        if _takes_weights_only(self.checkpoint_io):
            options["weights_only"] = checkpoint_files.is_safe(weights_only)
        loaded = self.checkpoint_io.load_checkpoint(path, **options)
        checkpoint = loaded if _is_between_processes(path) else self._after_loading(loaded)
        return cast(dict[str, Any], checkpoint)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes through the wrapped IO."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Ends the wrapped IO: one that saves in a thread waits for it."""
        self.checkpoint_io.teardown()

    def _after_loading(self, loaded: Any) -> Any:
        checkpoint = as_lightnings(loaded)
        if self.on_load == "keep" or not isinstance(checkpoint, Mapping):
            return checkpoint
        checkpoint = take_added(checkpoint)
        prefixes = PREFIXES if self.on_load == "strip" else _prefixes_in(checkpoint)
        return _strip(checkpoint, prefixes)


class ModulePrefixCheckpointIO(ModulePrefixMixin, CheckpointIO):
    """Saves checkpoints with clean keys, and loads them whatever prefixes wrappers left in them.

    The default of `DataParallelStrategy`; for others `Trainer(plugins=[...])`. It renames the
    states of models, wherever they are in a checkpoint (`state_dict`, averaged weights, states in
    those of callbacks that have the model's names), and leaves all else, such as states of
    optimizers. What it saves is a checkpoint as any other: plain Lightning and torch load it.

    Any file with weights is accepted: a checkpoint of Lightning, a state dict, a dict that has one
    under `state_dict`, `model`, `model_state_dict` or `net`, a `.safetensors` file. Files are read
    with `weights_only=True` unless the Trainer is told otherwise, and local files are written
    atomically: a crash in the middle of a save leaves the old one.

    Args:
        checkpoint_io: the IO that writes and reads; None or Lightning's `TorchCheckpointIO` for
            `torch.save` into local files atomically. `AsyncCheckpointIO` may be in here, or have
            this one in it.
        on_save: what happens to keys. `"strip"`: prefixes of wrappers around the whole model are
            taken away. `"add"`: keys have the prefix `module.`, for scripts with nn.DataParallel
            or DDP. `"keep"`: nothing. What the Trainer saves has the LightningModule's names, so
            that `module.` is a submodule's there, and stays.
        on_load: what happens to keys. `"auto"`: what `"add"` has added is taken away, and so are
            prefixes around all of what no Trainer has saved; with `DataParallelStrategy` they are
            then made the module's, at any depth. `"strip"`: prefixes that all keys share are taken
            away. `"keep"`: nothing, neither here nor in the strategy.

    Raises:
        ValueError: an option is none of its choices.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/old.pt"
        >>> torch.save({"module.weight": torch.ones(1)}, path)
        >>> list(ModulePrefixCheckpointIO().load_checkpoint(path)["state_dict"])
        ['weight']
    """


def name_as_module(checkpoint: dict[str, Any], module: nn.Module, checkpoint_io: Any) -> None:
    """Gives the weights in a checkpoint, in place, the module's names, if the IO says "auto"."""
    ours = next((io for io in _chain(checkpoint_io) if isinstance(io, ModulePrefixMixin)), None)
    if ours is not None and ours.on_load == "auto":
        name_for_module(checkpoint, module)


def _prefixes_in(checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """What can only be a wrapper's around all of the model's keys."""
    return _WRAPPERS_ONLY if is_lightnings(checkpoint) else PREFIXES


def _strip(checkpoint: Any, prefixes: tuple[str, ...]) -> Any:
    def naming(state: Mapping[str, Any]) -> Renaming:
        prefix = shared_prefix(state, prefixes)
        if prefix:
            log.info("Checkpoint: took %r from all %d keys.", prefix, len(state))
        return strip_prefix(state, prefix)

    return rename_model(checkpoint, naming)


def _chain(checkpoint_io: Any) -> Iterator[Any]:
    """An IO and those that it wraps."""
    while checkpoint_io is not None:
        yield checkpoint_io
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)


def _with_atomic_files(checkpoint_io: Any | None) -> Any:
    """The IO with ours at its end, where that would be Lightning's for torch files."""
    if checkpoint_io is None or _is_plain(checkpoint_io):
        return AtomicTorchCheckpointIO()
    *_, last = _chain(checkpoint_io)
    if hasattr(last, "checkpoint_io"):
        last.checkpoint_io = AtomicTorchCheckpointIO()
    for outer in _chain(checkpoint_io):
        if _is_plain(wrapped_io(outer)):
            set_io(outer, AtomicTorchCheckpointIO())
    return checkpoint_io


def _is_plain(checkpoint_io: Any) -> bool:
    """Whether it is Lightning's own for torch files, of whichever of its packages."""
    kind = type(checkpoint_io)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ == "TorchCheckpointIO" and package in ("lightning", "lightning_fabric")


def _takes_weights_only(checkpoint_io: Any) -> bool:
    *_, last = _chain(checkpoint_io)
    parameters = inspect.signature(last.load_checkpoint).parameters.values()
    return any(p.name == "weights_only" or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_between_processes(path: Any) -> bool:
    return Path(path).name == _BETWEEN_PROCESSES
