"""Reading the checkpoint files that people have, and writing them so that a crash harms none."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from torch import nn

from lightning_dp.checkpointing import safetensors_files
from lightning_dp.checkpointing.atomic_files import local_path, replacing
from lightning_dp.checkpointing.contents import WEIGHTS, find_weights
from lightning_dp.keys import normalize_state_dict, with_ties

PathLike = str | os.PathLike[str]

_TORCHS_REASON = "WeightsUnpickler error:"
_OTHER_PROTOCOL = "Unsupported operand"  # one of torch.save's argument pickle_protocol
_TORCHS_MAGIC = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")

_IF_TRUSTED = (
    "If you trust it: weights_only=False (an argument of load_weights, and of the Trainer's fit, "
    "validate, test and predict; --unsafe of lightning_dp.convert)"
)

_STOPS = (OSError, MemoryError, KeyboardInterrupt, SystemExit)

_FOREIGN = {
    b"version https://git-lfs": "a pointer of Git LFS (fetch the file: `git lfs pull`)",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    b"<?xml": "XML",
    b"{": "JSON or other text",
    b"\x1f\x8b": "a gzip archive (unpack it)",
    b"\x89hdf": "an HDF5 file, such as Keras writes",
    b"\x93numpy": "a NumPy array",
    b"gguf": "a GGUF file",
    b"\x00" * 16: "nothing but zeros at its beginning, as a crash leaves it",
}


def load_weights(
    module: nn.Module, path: PathLike, *, strict: bool = True, weights_only: bool | None = None
) -> Any:
    """Loads a file's weights into a module, whoever saved them and through whatever wrapper.

    Args:
        module: any module: bare, a LightningModule, in `nn.DataParallel`, DDP or `torch.compile`.
        path: a state dict, a dict that has it under `state_dict`, `model`, `model_state_dict` or
            `net`, a checkpoint of Lightning, or a `.safetensors` file; local or remote.
        strict: whether keys have to be the module's, no less and no more.
        weights_only: False runs the code that a pickle asks for: for files that you trust.

    Returns:
        The missing and the unexpected keys, as `module.load_state_dict` does.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no weights; the message says what was found.
        RuntimeError: `module.load_state_dict` refuses the weights.
    """
    state = weights_in(read(path, weights_only=weights_only), path)
    named = with_ties(normalize_state_dict(state, module), module)
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


def read(path: PathLike, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """What a local or remote file holds that torch, Lightning or safetensors wrote.

    A ValueError says what is wrong with a file that cannot be read.
    """
    map_location = "cpu" if map_location is None else map_location
    weights_only = is_safe(weights_only)
    local = local_path(path)
    if local is None:
        with fsspec.open(str(path), "rb") as remote:
            return _load(io.BytesIO(remote.read()), path, map_location, weights_only)
    if local.is_dir():
        raise ValueError(
            f"{path}: expected a checkpoint file, got a folder. A distributed checkpoint has to "
            "be made one file by the tool that wrote it."
        )
    with local.open("rb") as file:
        return _load(file, path, map_location, weights_only)


def is_safe(weights_only: bool | None) -> bool:
    """Whether to read tensors and plain values only: yes, unless somebody said no, as for torch."""
    if weights_only is None:
        forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
        return forced not in ("1", "y", "yes", "true")
    return weights_only


def write(checkpoint: Any, path: Path) -> None:
    """Writes a checkpoint as `torch.save` does; until it is complete an old file stays."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # What stopped the writing, of which torch only tells that its archive is incomplete.
            if isinstance(error.__context__, _STOPS):
                raise error.__context__ from error
            raise


def _load(file: BinaryIO, path: PathLike, map_location: Any, weights_only: bool) -> Any:
    head = file.read(512)
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not head:
        raise ValueError(f"{path}: expected a checkpoint, got an empty file (0 bytes).")
    foreign = _foreign(head, file)
    if safetensors_files.is_one(head):
        return safetensors_files.read(file, path, map_location)
    if foreign is not None:
        raise ValueError(
            f"{path}: expected a checkpoint of torch, Lightning or safetensors, got {foreign} "
            f"({size:,} bytes). Give a file that one of these has written."
        )
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(_refusal(file, path, size, weights_only, error)) from error
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not weights_only:  # it may be the user's own code that failed
            raise
        raise ValueError(_refusal(file, path, size, weights_only, error)) from error


def _foreign(head: bytes, file: BinaryIO) -> str | None:
    """What a file is, if torch cannot read it."""
    if head.startswith(b"PK"):
        return _foreign_archive(file)
    if head.startswith(b"\x80"):  # a pickle, as torch.save wrote them before version 1.6
        is_torchs = _TORCHS_MAGIC in head[:32] or len(head) < 32
        return None if is_torchs else "a pickle that torch.save did not write"
    start = head.lstrip().lower()
    known = (what for magic, what in _FOREIGN.items() if start.startswith(magic))
    return next(known, f"a file that begins with {head[:12]!r}")


def _foreign_archive(file: BinaryIO) -> str | None:
    try:
        if not zipfile.is_zipfile(file):
            return "the beginning of a checkpoint: the end is missing"
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return f"a damaged archive ({error})"
    file.seek(0)
    inside = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inside:
        return "a TorchScript archive (take torch.jit.load(file).state_dict())"
    return None if "data.pkl" in inside else f"a zip archive of {names[:4]}"


def _refusal(
    file: BinaryIO, path: PathLike, size: int, weights_only: bool, error: Exception
) -> str:
    needed = _code_needed(file, error) if weights_only else []
    if needed:
        return (
            f"{path}: expected tensors and plain values, got a pickle that needs code to be run "
            f"({', '.join(needed[:5])}); nothing was run. {_IF_TRUSTED}, or "
            "torch.serialization.add_safe_globals([...]) for these alone."
        )
    *_, reason = str(error).partition(_TORCHS_REASON)
    lines = (reason or str(error)).split("\n")
    reason = next((line.strip() for line in lines if line.strip()), type(error).__qualname__)
    if weights_only and reason.startswith(_OTHER_PROTOCOL):
        return (
            f"{path}: expected a pickle of protocol 2, which torch.save writes by default, got "
            f"another one, or a damaged file ({size:,} bytes): {reason}. {_IF_TRUSTED}."
        )
    return (
        f"{path}: expected a checkpoint, got one that torch cannot read, cut short or damaged "
        f"({size:,} bytes): {reason}"
    )


def _code_needed(file: BinaryIO, error: Exception) -> list[str]:
    """The classes and functions that a pickle asks for, as far as that can be said."""
    named = re.findall(r"GLOBAL ([\w.]+)", str(error))  # the first one of them
    with contextlib.suppress(Exception):  # damaged
        file.seek(0)
        return torch.serialization.get_unsafe_globals_in_checkpoint(file) or named
    return named
