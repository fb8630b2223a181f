"""What may be wrong with code that works on one device and fails on a replica.

Replicas have parts of a batch, and share what is no module and no tensor of a module. An error that
comes from that does not say so. What is found here is said in its note. It is looked for after a
failure only, and nothing of the users' is called.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Shards, tree
from lightning_dp.parallel.errors import add_note

_DEPTH = 4
_MOST = 20_000  # objects that are looked at
_VALUES = (str, bytes, int, float, type(None), torch.device)
_NO_HELPERS = (type, FunctionType, ModuleType, nn.Module, *_VALUES)
_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", __name__.partition(".")[0])
"""A trainer, and what we put on a replica, are no helpers."""

_LAST_STEP = re.compile(r"(\.\w+|\[[^\[\]]*\])$")


class _Found(NamedTuple):
    """Something on `self`, and how one would write where it is."""

    path: str
    value: Any


@dataclass(frozen=True)
class LikelyCause:
    """Of an error in a replica; "" if nothing is known.

    Args:
        module: the replica.
        device: where it is.
        shards: the batch in pieces.
        k: the replica's number.
    """

    module: nn.Module
    device: torch.device
    shards: Shards
    k: int

    def __call__(self, error: BaseException) -> str:
        """What goes on after the samples in "in replica 2 on cuda:1, ..."."""
        if len(self.shards.active) < 2:
            return ""
        return _first(self._causes(error))

    def _causes(self, error: BaseException) -> Iterator[str]:
        held = list(_held_by(self.module))
        text = _text(error)
        numbers = set(map(int, re.findall(r"\b\d{1,9}\b", text)))
        if "device" in text.lower():
            yield from self._elsewhere(held, text)
        yield from self._shared(held, error)
        yield from self._padding(numbers)
        yield from self._whole_batch(numbers, held)
        yield from self._one_sample()

    def _elsewhere(self, held: list[_Found], text: str) -> Iterator[str]:
        """A tensor of a plain object lies on another device, of which the error speaks."""
        for path, value in held:
            if _is_tensor(value) and value.device != self.device:
                place = value.device
                if place.type != "cpu" or str(place) in text:
                    yield (
                        f"{path} lies on {place}, and this replica on {self.device}: replicas "
                        "share objects that are no modules. Keep the tensor by register_buffer on "
                        "an nn.Module, or move it where it is used"
                    )

    def _shared(self, held: list[_Found], error: BaseException) -> Iterator[str]:
        """The error was raised in a method of a plain object."""
        paths = {id(found.value): found.path for found in held}
        trace = error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if id(owner) in paths and not _is_tensor(owner):
                yield (
                    f"raised in {paths[id(owner)]} ({type(owner).__qualname__}), one object that "
                    f"all {len(self.shards.active)} replicas call: if it has a state, one device "
                    "calls it once. Call it in a hook such as on_train_batch_start, or use "
                    'DataParallelStrategy(mode="forward")'
                )
            trace = trace.tb_next

    def _padding(self, numbers: set[int]) -> Iterator[str]:
        """Samples are padded to the longest of the batch, which is in another shard."""
        part = self.shards.parts[self.k]
        tensors = [leaf for leaf in tree.leaves(part) if _is_tensor(leaf)]
        padded = numbers & {size for x in tensors for size in x.shape[1:]}
        counts = [x for x in tensors if x.dim() == 1 and not x.is_floating_point() and len(x)]
        for longest in map(int, map(Tensor.max, counts if padded else ())):
            for length in sorted(padded):
                if longest < length and longest in numbers:
                    yield (
                        f"the batch is padded to {length}, and the longest sample of this shard "
                        f"has {longest}: pad to the length of the batch, such as by "
                        f"pad_packed_sequence(..., total_length={length})"
                    )

    def _whole_batch(self, numbers: set[int], held: list[_Found]) -> Iterator[str]:
        """Something has as many rows as the whole batch."""
        n, size = sum(self.shards.sizes), self.shards.sizes[self.k]
        if n not in numbers or not any(m % size == 0 and m % n for m in numbers):
            return
        own = chain(self.module.named_buffers(), self.module.named_parameters())
        tensors = [*held, *(_Found(f"self.{name}", tensor) for name, tensor in own)]
        shapes = [
            f"{path} has the shape {tuple(value.shape)}"
            for path, value in tensors
            if _is_tensor(value) and n in value.shape
        ]
        which = f" ({', '.join(shapes[:3])})" if shapes else ""
        yield (
            f"{n} is the size of the whole batch, and {size} that of this shard{which}: take sizes "
            "from what the step is given"
        )

    def _one_sample(self) -> Iterator[str]:
        """A row of numbers beside one number: what a DataLoader yields with batch_size=None."""
        part, n = self.shards.parts[self.k], sum(self.shards.sizes)
        dims = [x.dim() for x in tree.leaves(part) if _is_tensor(x)]
        if sorted(dims) == [0, 1]:
            yield (
                f"the batch may be a single sample, a row of {n} numbers and a label, which was "
                "read as so many samples: give the DataLoader a batch_size"
            )


def note_kept_tensors(error: BaseException, module: nn.Module, devices: set[torch.device]) -> None:
    """Adds a note to an error outside of steps, if an object has kept tensors of several replicas.

    Such as a meter that steps call, and that is asked at the end of the epoch.
    """
    if cause := _first(_kept(error, module, devices)):
        add_note(error, f"[after steps on {len(devices)} devices{cause}]")


def _kept(error: BaseException, module: nn.Module, devices: set[torch.device]) -> Iterator[str]:
    text = "".join([_text(error), *getattr(error, "__notes__", ())])
    if "device" not in text.lower() or "[in replica" in text:
        return
    first: dict[str, _Found] = {}  # of what lies side by side
    for found in _held_by(module):
        if _is_tensor(found.value) and (device := found.value.device) in devices:
            other = first.setdefault(_LAST_STEP.sub("", found.path), found)
            if other.value.device != device and str(device) in text:
                yield (
                    f"{found.path} lies on {device} and {other.path} on {other.value.device}: "
                    "replicas share objects that are no modules, and each has left its own "
                    "tensors there. Return from the step what it keeps, and hand it over in a "
                    "hook such as on_train_batch_end, which gets the outputs of the whole batch"
                )


def _first(causes: Iterator[str]) -> str:
    """The first of them, as it goes on in a note; "" if there is none."""
    try:
        cause = next(causes, "")
    except Exception as failure:  # it must not take the place of the error
        return f"; looking for its cause failed with {type(failure).__qualname__}"
    return cause and f"; likely cause: {cause}"


def _text(error: BaseException) -> str:
    return " ".join(arg for arg in error.args if type(arg) is str)


def _held_by(module: nn.Module) -> Iterator[_Found]:
    """What modules keep beside their parameters, buffers and submodules, and all that is in it."""
    tables = vars(nn.Module()).keys()
    waiting = [
        (_Found(f"self.{f'{name}.' if name else ''}{key}", value), 0)
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if key not in tables
    ]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        found, depth = waiting.pop(0)
        if id(found.value) in seen or not _may_be_helper(type(found.value)):
            continue
        seen.add(id(found.value))
        yield found
        if depth < _DEPTH and not _is_tensor(found.value):
            waiting += ((child, depth + 1) for child in _children(found))


def _may_be_helper(cls: type) -> bool:
    return not issubclass(cls, _NO_HELPERS) and cls.__module__.split(".")[0] not in _FRAMEWORKS


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)  # objects of users may answer `isinstance` themselves


def _children(found: _Found) -> Iterator[_Found]:
    path, value = found
    if type(value) in (list, tuple, set):
        yield from (_Found(f"{path}[{i}]", child) for i, child in enumerate(value))
    elif type(value) is dict:
        simple = ((k, child) for k, child in value.items() if type(k) in (str, int))
        yield from (_Found(f"{path}[{key!r}]", child) for key, child in simple)
    else:
        with contextlib.suppress(AttributeError):  # it has slots, or is written in C
            attributes = object.__getattribute__(value, "__dict__")
            yield from (_Found(f"{path}.{key}", child) for key, child in attributes.items())
