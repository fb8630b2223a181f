"""State dicts in `.safetensors` files, which need the extra `safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SUFFIX = ".safetensors"
_LONGEST_HEADER = 100_000_000  # by the format
_ORDER = "lightning_dp.order"  # the format itself sorts names


def is_one(head: bytes) -> bool:
    """Whether a file that begins so is one: eight bytes of a length, then that much JSON."""
    return head[8:9] == b"{" and 1 < int.from_bytes(head[:8], "little") <= _LONGEST_HEADER


def read(
    file: BinaryIO, path: str | os.PathLike[str], size: int, map_location: Any
) -> dict[str, Tensor]:
    """The state dict in a file, tied weights tied, in the order that `write` has noted.

    Raises:
        ImportError: the extra is not installed.
        ValueError: the file is cut short or damaged.
    """
    notes: dict[str, str] = _header(file, path, size).get("__metadata__", {})
    library = _library()
    file.seek(0)
    name = getattr(file, "name", None)  # a local file needs no copy in memory
    tensors: dict[str, Tensor]
    try:
        order = json.loads(notes.get(_ORDER, "[]"))
        tensors = library.load(file.read()) if name is None else library.load_file(name)
    except Exception as error:  # the library's own types of errors
        raise ValueError(
            f"{path}: expected a .safetensors file, got a damaged one: {error}"
        ) from error
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
    tensors |= {key: tensors[name] for key, name in notes.items() if name in tensors}
    return {key: tensors[key] for key in order} if set(order) == set(tensors) else tensors


def keeps_order(path: Path) -> bool:
    """Whether the order of keys in a file is that of the module, and not of the alphabet."""
    if path.suffix != SUFFIX:
        return True
    with path.open("rb") as file:
        notes: dict[str, str] = _header(file, path, path.stat().st_size).get("__metadata__", {})
    return _ORDER in notes


def write(state: Mapping[str, Any], path: Path) -> None:
    """Writes a state dict; of tied weights one is written, and which are tied to it is noted.

    Raises:
        ImportError: the extra is not installed.
        ValueError: a value is no tensor.
    """
    other = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise ValueError(
            f"{path}: expected tensors only, as the format holds no others; got {other!r} of type "
            f"{type(state[other]).__qualname__}. Write a .pt or .ckpt file."
        )
    notes = {"format": "pt", _ORDER: json.dumps(list(state))}
    kept: dict[Any, str] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in state.items():
        first = kept.setdefault(_memory_of(tensor) if tensor.numel() else key, key)
        if first == key:
            # A copy of its own, where it is a part of a bigger tensor.
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            tensors[key] = (tensor if whole else tensor.clone()).detach().cpu().contiguous()
        else:
            notes[key] = first
    _library().save_file(tensors, path, notes)


def _memory_of(tensor: Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _header(file: BinaryIO, path: str | os.PathLike[str], size: int) -> dict[str, Any]:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        ends = [part["data_offsets"][1] for key, part in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        expected = max(size + 1, 8 + length)
    if size != expected:
        raise ValueError(
            f"{path}: expected a .safetensors file of {expected:,} bytes by its header, got "
            f"{size:,} bytes: it is cut short or damaged."
        )
    return header


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "A .safetensors file needs the package safetensors: python -m pip install "
            "'lightning-dp[safetensors]'."
        ) from error
    return safetensors.torch
