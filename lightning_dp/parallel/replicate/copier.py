"""Attributes of a replica: copies by identity, as `copy.deepcopy` makes them, that follow the root.

The copier knows which module, parameter and buffer of the root stands for which of the replica's.
Lists, dicts, tuples and deques are always copied, since what steps append is joined; a set, a plain
object, a function or a bound method only if it reaches a part of the module. Everything else is
shared: arrays, data sets, loggers, optimizers, locks, files, the trainer. What the root has under
two names is one copy under two names. A tensor is shared, or brought to the replica's device.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import is_not
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lightning_dp.parallel.devices import seed_apart
from lightning_dp.parallel.replicate.structure import Contents
from lightning_dp.parallel.replicate.tensors import version_of
from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    HOOK_TABLES,
    compiled_function,
    with_cells,
)

Place: TypeAlias = tuple[int, str]
"""The number of a module (or of a parameter with attributes), and the name of an attribute."""

_ABSENT = object()
_ATOMS = frozenset(
    [bool, bytes, complex, float, int, str, type, type(None), torch.device, torch.dtype, torch.Size]
)
_SHARED_PACKAGES = {
    *(sys.stdlib_module_names - {"abc", "builtins", "collections", "types", "typing"}),
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"),
}
"""An instance of a class of these packages, or of a subclass of it, is shared as it is."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a class statement


class Copied(NamedTuple):
    """An attribute that a replica has a copy of, and what shows that the copy is out of date."""

    value: Any  # the root's
    own: Any
    made: Mapping[int, tuple[Any, Any]] = {}  # originals and copies, by the ids of the originals
    ids: frozenset[int] = frozenset()  # of all originals, and parts, whose copies it has
    contents: Contents | None = None
    tensors: Sequence[tuple[Tensor, float]] = ()  # copied to another device, and their versions

    def is_stale(self) -> bool:
        """Whether a container has other items, or a tensor was written to."""
        if self.contents is not None and self.contents.differ():
            return True
        return bool(self.tensors) and any(version_of(tensor) != v for tensor, v in self.tensors)


class Attributes:
    """The attributes of a replica's modules, and of those of its parameters that have some.

    `owners` are the root's modules and parameters, each with the replica's; `parts` has what stands
    for a module, parameter or buffer of the root, by its id. The replica has the attributes in
    `kept` for itself; all else follows the root's, which are of these `versions`.
    """

    def __init__(
        self,
        owners: Sequence[tuple[Any, Any]],
        parts: dict[int, Any],
        kept: Sequence[dict[str, Any]],
        versions: Sequence[int],
        source: torch.device,
        device: torch.device,
        generators: OwnGenerators,
    ) -> None:
        self._owners, self._kept = owners, kept
        self.parts = parts
        self._moves = source.type != "cpu" and device != source
        self._source, self._device, self.generators = source, device, generators
        self._roots = [vars(root) for root, _ in owners]
        self._own = [vars(own) for _, own in owners]
        self._copies: dict[Place, Copied] = {}
        self._watched: list[tuple[Place, Copied]] = []
        self.with_graphs: list[Place] = []  # attributes that are tensors with a graph
        self.compiles = False  # a compiled function was found
        left_out, places = FIXED_NAMES - {*HOOK_TABLES}, set[Place]()
        for j, (root, own) in enumerate(zip(self._roots, self._own, strict=True)):
            own.update({**root, **kept[j]})
            places.update((j, name) for name in root.keys() - kept[j].keys() - left_out)
        self._copy(places)
        self._versions = list(versions)
        self._sizes = list(map(len, self._own))

    def follow(self, versions: Sequence[int], *, everything: bool = False) -> None:
        """Follows the root's attributes, which are of these versions; all, after a failed step."""
        stale = {place for place, copied in self._watched if copied.is_stale()}
        sizes = list(map(len, self._own))
        if not (stale or everything or versions != self._versions or sizes != self._sizes):
            return
        everything = everything or sizes != self._sizes
        for j, (now, seen) in enumerate(zip(versions, self._versions, strict=True)):
            if everything or now != seen:
                stale.update((j, name) for name in self._changed(j))
        self._copy(stale)
        self._versions, self._sizes = list(versions), list(map(len, self._own))

    def keep(self, j: int, name: str) -> None:
        """Keeps the replica's value of an attribute until the root's is bound anew."""
        self._copies[j, name] = Copied(self._roots[j].get(name), self._own[j][name])
        self._watched = [(place, copied) for place, copied in self._watched if place != (j, name)]

    def replace(self, parts: Mapping[int, Any]) -> None:
        """Has what refers to parts of the root refer to these, by the ids of the root's."""
        changed = {i for i, own in parts.items() if self.parts.get(i) is not own}
        self.parts.update(parts)
        self._copy({p for p, c in self._copies.items() if not c.ids.isdisjoint(changed)})

    def connect(self, *, connects: bool) -> None:
        """Has tensors with a graph as they are, on the replica's device; or without it again."""
        for j, name in self.with_graphs:
            value = self._roots[j].get(name)
            if isinstance(value, Tensor):
                value = value.to(self._device) if connects else self.tensor(value)
                # As the module's own code sets it: recurrent layers note their weights then.
                setattr(self._owners[j][1], name, value)

    def _changed(self, j: int) -> Iterator[str]:
        root, own, kept = self._roots[j], self._own[j], self._kept[j]
        for name in root.keys() - kept.keys():
            copied = self._copies.get((j, name), Copied(root[name], root[name]))
            if copied.value is not root[name] or own.get(name, _ABSENT) is not copied.own:
                yield name
        yield from own.keys() - root.keys() - kept.keys()

    def _copy(self, stale: set[Place]) -> None:
        if not stale:
            return
        # What refers to the same container or object as a stale attribute gets the same new copy.
        size = 0
        while size != len(stale):
            size, known = len(stale), stale & self._copies.keys()
            ids = set[int]().union(*(self._copies[place].made for place in known))
            stale |= {p for p, copied in self._copies.items() if not copied.ids.isdisjoint(ids)}
        memo = dict(self.parts)
        for place, copied in self._copies.items():
            if place not in stale:
                memo.update({i: own for i, (_, own) in copied.made.items()})
        self.with_graphs = [place for place in self.with_graphs if place not in stale]
        for place in sorted(stale, key=self._turn):
            self._copy_one(place, memo)
        self._watched = [(p, c) for p, c in self._copies.items() if c.contents or c.tensors]

    def _turn(self, place: Place) -> tuple[int, Place]:
        """Tensors first, which containers may hold; hooks last, which may know containers."""
        value = self._roots[place[0]].get(place[1])
        return 2 * (place[1] in HOOK_TABLES) - isinstance(value, Tensor), place

    def _copy_one(self, place: Place, memo: dict[int, Any]) -> None:
        j, name = place
        self._copies.pop(place, None)
        if name not in self._roots[j]:
            self._own[j].pop(name, None)
            return
        value, copier = self._roots[j][name], _Copier(self, memo)
        if name in HOOK_TABLES and not value:
            self._own[j][name] = type(value)()  # a step may add hooks for its replica's calls
            return
        is_plain = isinstance(value, Tensor) and id(value) not in memo
        if is_plain and value.requires_grad:
            self.with_graphs.append(place)
        self._own[j][name] = own = copier.tensor(value) if is_plain else copier.copy(value)
        self.compiles = self.compiles or copier.compiles
        if own is value:
            return
        kept = None if is_plain and value.grad_fn is not None else value  # or its graph would live
        of_torch = name.startswith("_") and type(self._owners[j][0]).__module__[:6] == "torch."
        contents = Contents(copier.live) if copier.live and not of_torch else None
        ids = frozenset(copier.ids)
        self._copies[place] = Copied(kept, own, copier.made, ids, contents, copier.tensors)

    def tensor(self, value: Tensor) -> Tensor:
        """A tensor without its graph, on the replica's device; on the host it stays there."""
        own = value if value.grad_fn is None else value.detach()
        leaves = self._moves and own.device == self._source and not own.requires_grad
        return own.to(self._device) if leaves else own


class _Copier:
    """Copies the value of one attribute."""

    def __init__(self, attributes: Attributes, memo: dict[int, Any]) -> None:
        self._attributes, self._memo = attributes, memo
        self.made: dict[int, tuple[Any, Any]] = {}
        self.ids: set[int] = set()
        self.live: list[Collection[Any]] = []  # the containers, the root's and their copies
        self.tensors: list[tuple[Tensor, float]] = []
        self.compiles = False
        self._outside: set[int] = set()  # ids of what reaches no part of the module

    def copy(self, value: Any) -> Any:
        """What the replica has in the place of a value."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._memo:
            self.ids.add(id(value))
            return self._memo[id(value)]
        if isinstance(value, Tensor):
            return value  # what steps have collected stays where it is
        if kind is torch.Generator:
            return self._attributes.generators.of(value)
        if isinstance(value, dict) or kind in (list, deque):
            return self._container(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if kind is ref:
            target = value()
            return ref(self.copy(target)) if id(target) in self._memo else value
        original = value.__func__ if kind is MethodType else value
        self.compiles = self.compiles or compiled_function(original) is not None
        if isinstance(value, nn.Module | type) or not self._reaches(value):
            return value
        if kind is MethodType:
            return MethodType(self.copy(original), self.copy(value.__self__))
        if kind is partial:
            keywords = {name: self.copy(item) for name, item in value.keywords.items()}
            return partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        if kind is set:
            return self._make(value, set(map(self.copy, value)))
        return self._function(value) if kind is FunctionType else self._object(value)

    def _make(self, value: Any, own: Any) -> Any:
        self._memo[id(value)] = own
        self.made[id(value)] = (value, own)
        self.ids.add(id(value))
        return own

    def tensor(self, value: Tensor) -> Tensor:
        """What the replica has in the place of a tensor that is an attribute."""
        own = self._attributes.tensor(value)
        if value.grad_fn is not None:  # which nothing here may keep alive
            return own
        if own.device != value.device:
            self.tensors.append((value, version_of(value)))
        return value if own is value else self._make(value, own)

    def _container(self, value: Any) -> Any:
        own = copy.copy(value)  # which keeps a class, a default factory or a longest length
        own.clear()
        self._make(value, own)
        if isinstance(value, dict):
            for key, item in value.items():
                own[self.copy(key)] = self.copy(item)
            self.live += [value.keys(), value.values(), own.keys(), own.values()]
        else:
            own.extend(map(self.copy, value))
            self.live += [value, own]
        return own

    def _tuple(self, value: Any) -> Any:
        items = list(map(self.copy, value))
        if not any(map(is_not, items, value)):
            return value
        make = getattr(type(value), "_make", type(value))  # a namedtuple takes its items one by one
        return self._make(value, make(items))

    def _function(self, value: FunctionType) -> FunctionType:
        """A function whose cells hold the replica's parts; all other cells it shares."""
        original, known = compiled_function(value), value.__closure__ or ()
        cells = list(map(self._cell, known))
        if not any(map(is_not, cells, known)):
            return value
        own = with_cells(value, cells)
        self._make(value, own)
        for cell, old in zip(cells, known, strict=True):
            if cell is not old and _content(cell) is None:
                cell.cell_contents = self.copy(old.cell_contents)
        if original is not None:
            own = with_cells(value, cells, self.copy(original))
            self._make(value, own)
        return own

    def _cell(self, cell: CellType) -> CellType:
        """A cell of several functions is one cell of their copies."""
        if id(cell) not in self._memo and self._reaches(_content(cell)):
            self._make(cell, CellType())
        own: CellType = self._memo.get(id(cell), cell)
        return own

    def _object(self, value: Any) -> Any:
        cls: Any = type(value)
        own = self._make(value, (cls if cls is SimpleNamespace else object).__new__(cls))
        if hasattr(value, "__dict__"):
            vars(own).update({name: self.copy(item) for name, item in vars(value).items()})
            self.live += [vars(value).keys(), vars(value).values(), vars(own).values()]
        for name in _slots(value):
            if hasattr(value, name):
                object.__setattr__(own, name, self.copy(getattr(value, name)))
        return own

    def _reaches(self, value: Any) -> bool:
        """Whether a value leads to a part of the module, or to something that was copied."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if type(item) in _ATOMS or id(item) in seen or id(item) in self._outside:
                continue
            if id(item) in self._memo:
                return True
            seen.add(id(item))
            waiting.extend(_within(item))
        self._outside |= seen
        return False


def _within(value: Any) -> Iterable[Any]:
    """What a value refers to, as far as the copier follows references."""
    kind = type(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | deque):
        return value
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if kind is FunctionType:
        return [*map(_content, value.__closure__ or ()), compiled_function(value)]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    if isinstance(value, Tensor | nn.Module | type) or _is_shared(cast(Any, kind)):
        return ()
    slots = [getattr(value, name) for name in _slots(value) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *slots]


@lru_cache(1024)
def _is_shared(cls: Any) -> bool:
    """Whether an object of this class is shared whatever it refers to."""
    if cls is SimpleNamespace:
        return False
    bases = [base for base in cls.__mro__ if base is not object]
    packages = {base.__module__.partition(".")[0] for base in bases}
    is_plain = all(base.__flags__ & _HEAP_TYPE for base in bases)
    return not is_plain or not packages.isdisjoint(_SHARED_PACKAGES)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _slots(value: Any) -> list[str]:
    """The attributes that the classes of a value keep in `__slots__`."""
    members = [vars(cls).items() for cls in type(value).__mro__]
    found = [n for items in members for n, m in items if isinstance(m, MemberDescriptorType)]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


class OwnGenerators:
    """A replica's generators of random numbers, one for each that a module of the root has.

    What a replica draws in a step follows from the state of the root's generator as the step
    begins: whoever sets the root's seed or state sets all.
    """

    def __init__(self, k: int, source: torch.device, device: torch.device) -> None:
        self._k, self._source, self._device = k, source, device
        self.own: WeakKeyDictionary[torch.Generator, torch.Generator] = WeakKeyDictionary()

    def of(self, root: torch.Generator) -> torch.Generator:
        """The one that replaces a generator; on the replica's device if that is on the root's."""
        device = self._device if root.device == self._source else root.device
        return self.own.setdefault(root, torch.Generator(device))

    def follow(self, *, alone: bool) -> None:
        """Seeds them before a step; `alone`, the root draws nothing in it, but has to move on."""
        for root, own in self.own.items():
            state = bytes(root.get_state().tolist())
            number = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big")
            own.manual_seed(seed_apart(number, self._k))
            if alone:
                torch.rand(1, generator=root, device=root.device)
