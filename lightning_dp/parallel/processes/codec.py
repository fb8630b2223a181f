"""The codec: a value taken apart into what stays from step to step, and what changes.

A skeleton is a value without its numbers, its tensors and its long texts: a pickle, with a gap for
each of them. The payload is what belongs into the gaps. Steps that tell each other the same kind of
thing have equal skeletons, so that the payload alone has to be sent.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_PROTOCOL = 4  # protocol 5 would keep the contents of arrays in the skeleton
_CODES = struct.Struct("<I")
_LONGEST = 128
"""Longer texts are payload. Shorter ones are names mostly, and stay from step to step."""

_NUMBER, _BYTES, _TEXT = range(3)
_Gap: TypeAlias = int | str  # one of these, or dtype and number of dims of a tensor: "float32 2"


class Room:
    """Bytes on the host, as Python and torch see them.

    Args:
        size: how many, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.memory = memoryview(bytearray(size))
        with torch.inference_mode(False):  # else nobody could write outside of it
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)


@dataclass(frozen=True)
class Encoded:
    """A value as bytes.

    Attributes:
        skeleton: what stays from step to step.
        numbers: the payload's first part: the numbers, and the sizes of what is in the second.
        blobs: the second part: tensors and texts, one after another.
    """

    skeleton: bytes
    numbers: bytes
    blobs: tuple[Tensor | bytes, ...]

    @property
    def length(self) -> int:
        """How many bytes the payload has."""
        return len(self.numbers) + sum(map(_size, self.blobs))

    def write(self, room: Room, start: int) -> None:
        """Copies the payload into a room."""
        for part in (self.numbers, *self.blobs):
            end = start + _size(part)
            if isinstance(part, Tensor):
                room.tensor[start:end].copy_(part)
            else:
                room.memory[start:end] = part
            start = end


def encode(value: Any) -> Encoded:
    """Takes a value apart: nested containers of numbers and tensors, and whatever can be pickled.

    Tensors lose their graphs, and views of one memory become independent. A parameter becomes a
    tensor.

    Raises:
        Exception: what pickle raises for what it cannot take.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    codes = "".join(["<", *pickler.codes])
    skeleton = b"".join((_CODES.pack(len(codes)), codes.encode(), file.getvalue()))
    numbers = struct.pack(codes, *pickler.numbers)
    return Encoded(skeleton, numbers, tuple(pickler.blobs))


def decode(skeleton: bytes, room: Room, start: int) -> Any:
    """Puts a value together, of its payload in a room; its tensors are on the host."""
    end = _CODES.size + _CODES.unpack_from(skeleton)[0]
    codes = struct.Struct(skeleton[_CODES.size : end])
    numbers = iter(codes.unpack_from(room.memory, start))
    file = io.BytesIO(skeleton)
    file.seek(end)
    return _Unpickler(file, numbers, room, start + codes.size).load()


class _Pickler(pickle.Pickler):
    """Pickles with gaps; what belongs into them is kept."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.codes: list[str] = []
        self.numbers: list[float] = []
        self.blobs: list[Tensor | bytes] = []

    def persistent_id(self, obj: Any) -> _Gap | None:
        """The kind of gap that there is to be; None for none."""
        cls = type(obj)
        if cls is float:
            return self._number("d", obj)
        if cls is int:  # those that do not fit stay in the skeleton
            return self._number("q", obj) if -(2**63) <= obj < 2**63 else None
        if cls is bool:
            return self._number("?", obj)
        if cls is str:
            return self._text(obj) if len(obj) > _LONGEST else None
        if cls is bytes:
            return self._blob(obj, _BYTES)
        if cls in (Tensor, nn.Parameter) and _is_plain(obj):
            return self._tensor(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Other tensors are pickled as their classes say, on the host."""
        if isinstance(obj, Tensor) and (obj.requires_grad or not _is_on_host(obj)):
            return obj.detach().cpu().__reduce_ex__(_PROTOCOL)
        return NotImplemented

    def _number(self, code: str, number: float) -> int:
        self.codes.append(code)
        self.numbers.append(number)
        return _NUMBER

    def _blob(self, blob: bytes, kind: int) -> int:
        self._number("q", len(blob))
        self.blobs.append(blob)
        return kind

    def _text(self, text: str) -> int:
        return self._blob(text.encode(errors="surrogatepass"), _TEXT)

    def _tensor(self, tensor: Tensor) -> _Gap:
        for size in tensor.shape:
            self._number("q", size)
        own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # Of a single element even contiguous tensors have any stride.
        self.blobs.append(own.as_strided((own.numel(),), (1,)).view(torch.uint8))
        return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.dim()}"


class _Unpickler(pickle.Unpickler):
    """Fills the gaps."""

    def __init__(self, file: io.BytesIO, numbers: Iterator[Any], room: Room, start: int) -> None:
        super().__init__(file)
        self._numbers, self._room, self._at = numbers, room, start

    def persistent_load(self, gap: Any) -> Any:
        """What belongs into the next gap."""
        if gap == _NUMBER:
            return next(self._numbers)
        if isinstance(gap, str):
            return self._tensor(*gap.split())
        start, self._at = self._at, self._at + next(self._numbers)
        own = bytes(self._room.memory[start : self._at])
        return own if gap == _BYTES else own.decode(errors="surrogatepass")

    def _tensor(self, dtype: str, dims: str) -> Tensor:
        shape = [next(self._numbers) for _ in range(int(dims))]
        own = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        start, self._at = self._at, self._at + own.numel() * own.element_size()
        own.view(-1).view(torch.uint8).copy_(self._room.tensor[start : self._at])
        return own


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its shape, its dtype and its bytes."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not tensor.is_nested and tensor.device.type != "meta"


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def _size(part: Tensor | bytes) -> int:
    return part.numel() if isinstance(part, Tensor) else len(part)
