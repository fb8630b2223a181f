"""Reads checkpoint files of torch, Lightning or safetensors, and writes torch's atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor, nn

from lightning_dp.checkpointing.state_keys import normalize_state_dict

WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
"""Under which keys people save a model's state; the first one is Lightning's."""
EXTRA_STATE = "_extra_state"  # ends the keys of what modules return from `get_extra_state`


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> Any:
    """Loads a file's weights into a module, whoever saved them and through whatever wrapper.

    The module may be bare, a LightningModule, in `nn.DataParallel`, DDP or `torch.compile`, and the
    file whatever `ModulePrefixCheckpointIO` reads. `weights_only=False` runs the code that a pickle
    asks for.

    Returns the missing and the unexpected keys, as `module.load_state_dict` does, which raises a
    RuntimeError for either if `strict`. A ValueError says what is wrong with the file.
    """
    state = weights_in(read(path, weights_only=weights_only), path)
    return module.load_state_dict(normalize_state_dict(state, module, strict=False), strict=strict)


def weights_in(loaded: Any, path: Any) -> Mapping[str, Any]:
    """The weights in what a file held, or a ValueError that says what it held instead."""
    state = find_weights(loaded)
    if state is None:
        keys = f" with the keys {list(map(str, loaded))[:8]}" if isinstance(loaded, Mapping) else ""
        raise ValueError(
            f"{path}: expected a state dict, or a dict that has one under one of {list(WEIGHTS)}; "
            f"got {type(loaded).__qualname__}{keys}. Save module.state_dict()."
        )
    return state


def find_weights(loaded: Any) -> Mapping[str, Any] | None:
    """The weights in what a file held: a state dict, or a dict with one under one of `WEIGHTS`."""
    if not isinstance(loaded, Mapping):
        return None
    for key in WEIGHTS:
        value = loaded.get(key)
        if _is_state(value) or (key == WEIGHTS[0] and isinstance(value, Mapping)):
            return value
    return loaded if _is_state(loaded) else None


def _is_state(value: Any) -> bool:
    """Whether something is a module's state: names and tensors, and modules' extra state."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    rest = [key for key, part in value.items() if not isinstance(part, Tensor)]
    return len(rest) < len(value) and all(key.endswith(EXTRA_STATE) for key in rest)


def read(path: str | Path, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Returns what a local or remote file holds; a ValueError says why one cannot be read.

    Unless `weights_only` is False no code in a pickle is run.
    """
    with fsspec.open(str(path), "rb") as file:
        head = file.read(12)
        file.seek(0)
        try:
            if head[8:9] == b"{":  # eight bytes of a length, then that much JSON
                device = map_location if isinstance(map_location, str | torch.device) else "cpu"
                from safetensors.torch import load  # of the extra `safetensors`

                tensors = load(file.read())
                return {key: tensor.to(device) for key, tensor in tensors.items()}
            return torch.load(file, map_location=map_location or "cpu", weights_only=weights_only)
        except (OSError, MemoryError, ImportError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # torch's message has the reason after general advice.
            lines = str(error).splitlines() or [repr(error)]
            marks = ("WeightsUnpickler error:", "Trying to load")
            reasons = [line for line in lines if any(mark in line for mark in marks)]
            raise ValueError(
                f"{path}: expected tensors and plain values in a checkpoint of torch, Lightning or "
                f"safetensors, got a file that begins with {head!r}, damaged or with code in it, "
                f"of which nothing was run: {[*reasons, *lines][0]} If you trust it: "
                "weights_only=False (--unsafe of lightning-dp convert)."
            ) from error


def write(content: Any, path: Path) -> None:
    """Writes what `torch.save` writes; a crash leaves the old file.

    A temporary file in the same folder is flushed to the disk before it replaces the old one, or a
    symbolic link's target.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
