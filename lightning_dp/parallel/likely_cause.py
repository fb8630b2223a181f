"""What may be wrong with code that works on one device and fails on a replica.

Such an error does not say that it comes from the split. Two common causes are looked for after a
failure, and named in its note: a tensor of a plain object that lies on another device, and a size
of the whole batch in a step that has a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 4
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_dp")


def likely_cause(
    module: nn.Module, device: torch.device, sizes: Sequence[int], k: int, error: BaseException
) -> str:
    """How the note continues after the samples in "in replica 2 on cuda:1, ..."; may be "".

    Args:
        module: the replica that has failed.
        device: its device.
        sizes: how many samples each replica had.
        k: the replica's number.
        error: its error.
    """
    if sum(map(bool, sizes)) < 2:
        return ""
    text = " ".join(arg for arg in error.args if type(arg) is str)
    try:
        cause = _on_another_device(module, device, text) or _size_of_batch(module, sizes, k, text)
    except Exception as failure:  # it must not take the place of the error
        return f"; looking for its cause failed with {type(failure).__qualname__}"
    return cause and f"; likely cause: {cause}"


def _on_another_device(module: nn.Module, device: torch.device, text: str) -> str:
    for path, tensor in _kept_tensors(module) if "device" in text.lower() else ():
        place = tensor.device
        if place != device and (place.type != "cpu" or str(place) in text):
            return (
                f"{path} lies on {place}, and this replica on {device}: replicas share objects "
                "that are no modules. Keep the tensor by register_buffer on an nn.Module, or move "
                "it where it is used"
            )
    return ""


def _size_of_batch(module: nn.Module, sizes: Sequence[int], k: int, text: str) -> str:
    numbers = set(map(int, re.findall(r"\b\d{1,9}\b", text)))
    n, size = sum(sizes), sizes[k]
    if n not in numbers or not any(m % size == 0 and m % n for m in numbers):
        return ""
    own = chain(module.named_buffers(), module.named_parameters())
    tensors = chain(_kept_tensors(module), ((f"self.{name}", t) for name, t in own))
    shapes = [f"{p} has the shape {tuple(t.shape)}" for p, t in tensors if n in t.shape]
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
            waiting += ((path + step, child, depth + 1) for step, child in _held_by(value))


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif type(value) is dict:
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif type(value).__module__.split(".")[0] not in _LIBRARIES:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f".{key}", child) for key, child in own.items())
