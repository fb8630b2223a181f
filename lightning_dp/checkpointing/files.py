"""Reads checkpoint files that torch, Lightning or safetensors wrote, and writes them atomically."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from torch import Tensor, nn

from lightning_dp.checkpointing.state_keys import PREFIXES, normalize_state_dict
from lightning_dp.parallel.torch_private import is_extra_state

PathLike = str | os.PathLike[str]

SAFETENSORS = ".safetensors"
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
"""Under which keys people save a model's state; the first one is Lightning's."""


def load_weights(
    module: nn.Module,
    path: PathLike,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
    prefixes: Sequence[str] = PREFIXES,
) -> Any:
    """Loads a file's weights into a module, whoever saved them and through whatever wrapper.

    The module may be bare, a LightningModule, in `nn.DataParallel`, DDP or `torch.compile`, and the
    file whatever `ModulePrefixCheckpointIO` reads. `weights_only=False` runs the code that a pickle
    asks for, `prefixes` are those of `normalize_state_dict`.

    Returns the missing and the unexpected keys, as `module.load_state_dict` does, which raises a
    RuntimeError for either if `strict`. A ValueError says what is wrong with the file.
    """
    state = weights_in(read(path, weights_only=weights_only), path)
    named = normalize_state_dict(state, module, prefixes=prefixes, strict=False)
    return module.load_state_dict(named, strict=strict)


def weights_in(loaded: Any, path: PathLike) -> Mapping[str, Any]:
    """The weights in what a file held, or a ValueError that says what it held instead."""
    state = find_weights(loaded)
    if state is None:
        found = type(loaded).__qualname__
        if isinstance(loaded, Mapping):
            found = f"a dict with the keys {[str(key) for key in loaded][:8]}"
        raise ValueError(
            f"{path}: expected a state dict, or a dict that has one under one of {list(WEIGHTS)}; "
            f"got {found}. Save module.state_dict()."
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
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(part, Tensor) for part in value.values())
        and all(isinstance(v, Tensor) or is_extra_state(k) for k, v in value.items())
    )


def read(path: PathLike, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Returns what a local or remote file holds; a ValueError says why one cannot be read.

    Unless `weights_only` is False no code in a pickle is run.
    """
    local = local_path(path)
    if local is not None and local.is_dir():
        raise ValueError(f"{path}: expected a checkpoint file, got a folder. Give a file in it.")
    with fsspec.open(str(path), "rb") if local is None else local.open("rb") as opened:
        file: BinaryIO = io.BytesIO(opened.read()) if local is None else opened
        head = file.read(12)
        file.seek(0)
        try:
            if head[8:9] == b"{":  # eight bytes of a length, then that much JSON
                device = map_location if isinstance(map_location, str | torch.device) else "cpu"
                tensors = _safetensors().load(file.read())
                return {key: tensor.to(device) for key, tensor in tensors.items()}
            return torch.load(file, map_location=map_location or "cpu", weights_only=weights_only)
        except (OSError, MemoryError, ImportError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if weights_only is False and not isinstance(error, pickle.UnpicklingError | EOFError):
                raise  # the code in the pickle failed
            # torch's message has the reason after general advice.
            lines = str(error).splitlines() or [repr(error)]
            marks = ("WeightsUnpickler error:", "Trying to load")
            reason = next((line for line in lines if any(m in line for m in marks)), lines[0])
            raise ValueError(
                f"{path}: expected tensors and plain values in a checkpoint of torch, Lightning or "
                f"safetensors, got a file of {file.seek(0, os.SEEK_END):,} bytes that begins with "
                f"{head!r}, damaged or with code in it, of which nothing was run: {reason} If you "
                "trust it: weights_only=False (--unsafe of lightning-dp convert)."
            ) from error


def write(checkpoint: Any, path: Path) -> None:
    """Writes a checkpoint as `torch.save` does; until it is complete an old file stays."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # torch reports an incomplete archive; its context is what stopped the writing.
            if isinstance(error.__context__, OSError | MemoryError | KeyboardInterrupt):
                raise error.__context__ from error
            raise


def write_safetensors(state: Mapping[str, Any], path: Path) -> None:
    """Writes a state dict as safetensors, or raises a ValueError if it has other values."""
    library = _safetensors()
    try:
        # Clones: the library refuses tensors that share memory.
        tensors = {
            k: v.detach().cpu().contiguous().resolve_conj().resolve_neg().clone()
            for k, v in state.items()
        }
        content = library.save(tensors, {"format": "pt"})
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{path}: expected dense tensors of the dtypes that safetensors holds, got {error!r}. "
            "Write a .pt or .ckpt file."
        ) from error
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "A .safetensors file needs the package safetensors: python -m pip install "
            "'lightning-dp[safetensors]'."
        ) from error
    return safetensors.torch


def local_path(path: PathLike) -> Path | None:
    """The path of a local file; None for an address such as `s3://bucket/file`."""
    name = os.fspath(path)
    if name.startswith("file://"):
        name = fsspec.core.url_to_fs(name)[1]
    return None if "://" in name else Path(name)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, and then replaces a file by what was written there.

    The temporary file lies in the same folder and is flushed to the disk before `os.replace`, so a
    crash leaves the old file. A symbolic link's target is replaced; permissions stay.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
