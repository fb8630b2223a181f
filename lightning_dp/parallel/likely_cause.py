"""What may be wrong with code that works on one device and fails on a replica.

Such an error does not say that it comes from the split. Two common causes are looked for after a
failure, and named in its note: a tensor of a plain object that lies on another device, and a size
of the whole batch in a step that has a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.scatter import Shards

_DEPTH = 4


@dataclass(frozen=True)
class LikelyCause:
    """Of an error in a replica.

    Args:
        module: the replica.
        device: its device.
        shards: the batch in pieces.
        k: the replica's number.
    """

    module: nn.Module
    device: torch.device
    shards: Shards
    k: int

    def __call__(self, error: BaseException) -> str:
        """How the note continues after the samples in "in replica 2 on cuda:1, ..."; may be ""."""
        if len(self.shards.active) < 2:
            return ""
        text = " ".join(arg for arg in error.args if type(arg) is str)
        try:
            cause = self._on_another_device(text) or self._size_of_batch(text)
        except Exception as failure:  # it must not take the place of the error
            return f"; looking for its cause failed with {type(failure).__qualname__}"
        return cause and f"; likely cause: {cause}"

    def _on_another_device(self, text: str) -> str:
        if "device" not in text.lower():
            return ""
        for path, tensor in _kept_tensors(self.module):
            place = tensor.device
            if place != self.device and (place.type != "cpu" or str(place) in text):
                return (
                    f"{path} lies on {place}, and this replica on {self.device}: replicas share "
                    "objects that are no modules. Keep the tensor by register_buffer on an "
                    "nn.Module, or move it where it is used"
                )
        return ""

    def _size_of_batch(self, text: str) -> str:
        numbers = set(map(int, re.findall(r"\b\d{1,9}\b", text)))
        n, size = sum(self.shards.sizes), self.shards.sizes[self.k]
        if n not in numbers or not any(m % size == 0 and m % n for m in numbers):
            return ""
        own = chain(self.module.named_buffers(), self.module.named_parameters())
        tensors = chain(_kept_tensors(self.module), ((f"self.{name}", t) for name, t in own))
        shapes = [
            f"{path} has the shape {tuple(tensor.shape)}"
            for path, tensor in tensors
            if n in tensor.shape
        ]
        which = f" ({', '.join(shapes[:3])})" if shapes else ""
        return (
            f"{n} is the size of the whole batch, and {size} that of this shard{which}: take sizes "
            "from what the step is given"
        )


def _kept_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a module keeps beside parameters and buffers, also in its plain objects."""
    tables = vars(nn.Module()).keys()
    waiting = [
        (f"self.{f'{name}.' if name else ''}{key}", value, 0)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in tables
    ]
    seen: set[int] = set()
    while waiting:
        path, value, depth = waiting.pop(0)
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif depth < _DEPTH:
            waiting += ((path + step, child, depth + 1) for step, child in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    package = type(value).__module__.split(".")[0]
    if type(value) in (list, tuple):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif type(value) is dict:
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif package not in ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_dp"):
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f".{key}", child) for key, child in own.items())
