"""State dicts in `.safetensors` files, which need the extra `safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_dp.checkpointing.atomic_files import replacing

SUFFIX = ".safetensors"
_LONGEST_HEADER = 100_000_000  # by the format
_ORDER = "lightning_dp.order"  # the format itself sorts names


def is_one(head: bytes) -> bool:
    """Whether a file that begins so is one: eight bytes of a length, then that much JSON."""
    return head[8:9] == b"{" and 1 < int.from_bytes(head[:8], "little") <= _LONGEST_HEADER


def read(file: BinaryIO, path: str | os.PathLike[str], map_location: Any) -> dict[str, Tensor]:
    """The state dict in a file, tied weights tied, in the order that `write` has noted."""
    library = _library()
    name = getattr(file, "name", None)  # a local file needs no copy in memory
    tensors: dict[str, Tensor]
    try:
        notes = _notes(file)
        order = _order(notes)
        file.seek(0)
        tensors = library.load(file.read()) if name is None else library.load_file(name)
    except Exception as error:  # the library's own types of errors
        raise ValueError(
            f"{path}: expected a .safetensors file, got one that is cut short or damaged: {error}"
        ) from error
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
    # What others note may happen to name a tensor. Ours is complete: every key is a tensor of the
    # file, or tied to one.
    first = {key: key if key in tensors else notes.get(key) for key in order}
    if tensors.keys() - first.keys() or not all(name in tensors for name in first.values()):
        return tensors
    return {key: tensors[str(name)] for key, name in first.items()}


def keeps_order(path: Path) -> bool:
    """Whether the order of keys in a file is that of the module, and not of the alphabet."""
    if path.suffix.lower() != SUFFIX:
        return True
    with path.open("rb") as file:
        return bool(_order(_notes(file)))


def write(state: Mapping[str, Any], path: Path) -> None:
    """Writes a state dict; of tied weights one is written, and which are tied to it is noted."""
    library = _library()
    from safetensors import SafetensorError

    for key, value in state.items():
        _check_value(key, value, path)
    tensors, notes = _untied(state)
    notes[_ORDER] = json.dumps(list(state))
    with replacing(path) as place:
        try:
            if place == path:  # a device or a pipe, which the library would replace by a file
                place.write_bytes(library.save(tensors, notes))
            else:
                library.save_file(tensors, place, notes)
        except KeyError as error:
            raise ValueError(
                f"{path}: expected dtypes that .safetensors files can hold, got {error}. Write a "
                ".pt or .ckpt file."
            ) from error
        except SafetensorError as error:  # such as a full disk; no OSError
            raise OSError(f"{path}: {error}") from error


def _check_value(key: str, value: Any, path: Path) -> None:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if not dense or value.is_nested or value.is_quantized:
        raise ValueError(
            f"{path}: expected tensors only, dense ones with values, as the format holds no "
            f"others; got {key!r} of type {type(value).__qualname__}. Write a .pt or .ckpt file."
        )


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share no memory, and of tied ones the key of the one that is kept."""
    # The library writes memory as it is: conjugated and negated views are to be computed before.
    values = {key: value.detach().resolve_conj().resolve_neg() for key, value in state.items()}
    notes = {"format": "pt"}
    kept: dict[Any, str] = {}
    tensors: dict[str, Tensor] = {}
    storages: set[Any] = set()
    for key, tensor in values.items():
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        first = kept.setdefault(memory if tensor.numel() else key, key)
        if first != key:
            notes[key] = first
            continue
        # A copy of its own, where it is a part or a view of another tensor.
        storage = tensor.untyped_storage()
        place = tensor.device, storage.data_ptr()
        own = storage.nbytes() == tensor.nbytes and place not in storages
        storages.add(place)
        tensors[key] = (tensor if own else tensor.clone()).cpu().contiguous()
    return tensors, notes


def _notes(file: BinaryIO) -> dict[str, str]:
    """What the header says besides tensors, which the library does not tell of a file in memory."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    notes = json.loads(file.read(length)).get("__metadata__")
    return notes if isinstance(notes, dict) else {}


def _order(notes: Mapping[str, str]) -> list[str]:
    """The keys in the module's order, as `write` notes them; none in the files of others."""
    try:
        order = json.loads(notes.get(_ORDER, "[]"))
    except (TypeError, ValueError, RecursionError):  # no note of ours
        return []
    is_ours = isinstance(order, list) and all(isinstance(key, str) for key in order)
    return order if is_ours else []


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "A .safetensors file needs the package safetensors: python -m pip install "
            "'lightning-dp[safetensors]'."
        ) from error
    return safetensors.torch
