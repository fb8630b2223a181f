"""What is in a checkpoint: which entries are a model's weights, and those under other names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import lightning
from torch import Tensor, nn

from lightning_dp.keys import (
    PREFIXES,
    Renaming,
    add_prefix,
    bare,
    keys_of,
    renamed,
    renaming_like,
    strip_prefix,
    with_ties,
)
from lightning_dp.parallel.torch_private import is_extra_state

WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
"""Under which keys people save a model's state; the first one is Lightning's."""

_VERSION = "pytorch-lightning_version"
_OURS = "lightning_dp"
_ADDED = "added_prefix"

Rename = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Naming = Callable[[Mapping[str, Any]], Renaming]

_LIGHTNINGS = ("state_dict", "current_model_state")  # the second one in averaging of weights

_NOT_WEIGHTS = re.compile(
    r"(^|_)(optim(?!al)|sched|hyper_?param|hparams)|^(loops|averaging_state|lightning_dp)$", re.I
)
"""Entries that hold tensors under names, or anything else, but no weights."""


def is_model_state(value: Any) -> bool:
    """Whether something is a module's state: names and tensors, and extra state of modules."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(part, Tensor) for part in value.values())
        and all(
            isinstance(key, str) and (isinstance(part, Tensor) or is_extra_state(key))
            for key, part in value.items()
        )
    )


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def is_lightnings(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a Trainer made it, so that `module.` in its `state_dict` is a submodule's."""
    return {_VERSION, "loops", "state_dict"} <= checkpoint.keys()


def find_weights(loaded: Any) -> Mapping[str, Any] | None:
    """The weights in what a file held: a module or state, or either under one of `WEIGHTS`."""
    if isinstance(loaded, nn.Module):
        return loaded.state_dict()
    if not isinstance(loaded, Mapping):
        return None
    for key in WEIGHTS:
        value = loaded.get(key)
        if isinstance(value, nn.Module):
            return value.state_dict()
        if is_model_state(value) or (key == WEIGHTS[0] and _has_names(value)):
            return value
    return loaded if is_model_state(loaded) else None


def as_lightnings(loaded: Any) -> Any:
    """What a file held; weights with the `state_dict` and version that a Trainer asks for."""
    if isinstance(loaded, Mapping) and _VERSION in loaded and "state_dict" in loaded:
        return loaded
    weights = find_weights(loaded)
    if weights is None:
        return loaded
    rest = loaded if isinstance(loaded, Mapping) and loaded is not weights else {}
    # The present version: nothing is to be migrated.
    return {**rest, "state_dict": weights, _VERSION: rest.get(_VERSION, lightning.__version__)}


def nothing_to_resume(path: Any) -> str:
    """What is wrong with a checkpoint from which training cannot go on."""
    return (
        f"ckpt_path: expected a checkpoint to resume training from, got {str(path)!r}, which "
        "holds weights and no training state (optimizers, epoch). To begin a new training with "
        "these weights: init_from=... on the command line, or in Python "
        "lightning_dp.checkpointing.load_weights(model, path) before fit."
    )


def note_added(checkpoint: Any, prefix: str | None) -> Any:
    """Notes in a Trainer's checkpoint that a prefix was added to the model's keys; None: not.

    The keys are a LightningModule's: without a note the prefix would be taken for a submodule.
    """
    if not isinstance(checkpoint, Mapping) or not is_lightnings(checkpoint):
        return checkpoint
    ours = {key: value for key, value in checkpoint.get(_OURS, {}).items() if key != _ADDED}
    if prefix is not None:
        ours[_ADDED] = prefix
    if ours == checkpoint.get(_OURS, {}):
        return checkpoint
    return {**checkpoint, _OURS: ours}


def added_to(checkpoint: Any) -> str | None:
    """The prefix that a note says was added."""
    is_trainers = isinstance(checkpoint, Mapping) and is_lightnings(checkpoint)
    ours = checkpoint.get(_OURS, {}) if is_trainers else {}
    return cast("str | None", ours.get(_ADDED))


def rename_states(checkpoint: Any, main: Rename, nested: Rename | None = None) -> Any:
    """The checkpoint with its model states under other names; whatever else is in it stays.

    `main` renames the model's own state, and `nested` those in other places, such as callbacks';
    they return what they were given if nothing changes.
    """
    if is_model_state(checkpoint):
        return main(checkpoint)
    if not isinstance(checkpoint, Mapping):
        return checkpoint
    # Beside a Trainer's `state_dict` there may be a `net` of the LightningModule's own making.
    others = () if is_lightnings(checkpoint) else WEIGHTS
    changed = {}
    for key, value in checkpoint.items():
        if (key in _LIGHTNINGS and _has_names(value)) or (key in others and is_model_state(value)):
            changed[key] = main(value)
        elif not _NOT_WEIGHTS.search(str(key)):
            changed[key] = _rename_nested(value, nested or main)
    return _with(checkpoint, changed)


def _rename_nested(value: Any, rename: Rename) -> Any:
    if is_model_state(value):
        return rename(value)
    if isinstance(value, Mapping) and "param_groups" not in value:
        parts = {k: v for k, v in value.items() if not _NOT_WEIGHTS.search(str(k))}
        return _with(value, {k: _rename_nested(v, rename) for k, v in parts.items()})
    if type(value) in (list, tuple):
        items = [_rename_nested(item, rename) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def _with(mapping: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """The mapping with other values; the very same if there are none."""
    changed = {key: value for key, value in changed.items() if value is not mapping[key]}
    if not changed:
        return mapping
    other: Any = copy.copy(mapping)
    other.update(changed)
    return other


def rename(state: Mapping[str, Any], renaming: Renaming) -> Mapping[str, Any]:
    """A state under other names; the very same if they are no others."""
    return renamed(state, renaming) if renaming.changes else state


def rename_model(checkpoint: Any, naming: Naming) -> Any:
    """The checkpoint with its model's state under other names.

    In a Trainer's checkpoint, states in other places go along if they have the model's names:
    whoever made others, such as a callback that averages a part of the model, knows them by theirs.
    In what other people wrote each state is named for itself.
    """

    def named(state: Mapping[str, Any]) -> Mapping[str, Any]:
        return rename(state, naming(state))

    if not isinstance(checkpoint, Mapping) or not is_lightnings(checkpoint):
        return rename_states(checkpoint, named)
    weights = find_weights(checkpoint) or {}
    renaming = naming(weights)

    def alongside(state: Mapping[str, Any]) -> Mapping[str, Any]:
        return rename(state, renaming) if state.keys() <= weights.keys() else state

    return rename_states(checkpoint, named, alongside)


def name_for_module(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Renames, in place, the model's state in a checkpoint to what the module calls it."""
    own = keys_of(module)
    checkpoint.update(rename_model(checkpoint, lambda state: renaming_like(state, own)))
    if isinstance(checkpoint.get("state_dict"), Mapping):
        checkpoint["state_dict"] = with_ties(checkpoint["state_dict"], module)


def add_to(checkpoint: Any, prefix: str) -> Any:
    """Puts a prefix before the model's keys, and notes that in a Trainer's checkpoint."""
    added = _rename_own(checkpoint, lambda state: rename(state, add_prefix(state, prefix)))
    return note_added(added, prefix)


def take_added(checkpoint: Any) -> Any:
    """Undoes `add_to` in a Trainer's checkpoint, if that was done to it."""
    prefix = added_to(checkpoint)
    if prefix is None:
        return checkpoint

    def taken(state: Mapping[str, Any]) -> Mapping[str, Any]:
        has_it = all(key.startswith(prefix) for key in state)
        return rename(state, strip_prefix(state, prefix)) if has_it else state

    return note_added(_rename_own(checkpoint, taken), None)


def _rename_own(checkpoint: Any, renamed: Rename) -> Any:
    """Renames the model's state; those in other places too, if their keys are some of its own."""
    wrappers = [tuple(prefix.split(".")[:-1]) for prefix in PREFIXES]
    own = set(bare(find_weights(checkpoint) or {}, wrappers).values())

    def renamed_if_own(state: Mapping[str, Any]) -> Mapping[str, Any]:
        return renamed(state) if set(bare(state, wrappers).values()) <= own else state

    return rename_states(checkpoint, renamed, renamed_if_own)
