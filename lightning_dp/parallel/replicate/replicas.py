"""The replicas of a module, one per device: built once, kept, and refreshed before every step.

[Note: what is copied when] A replica's parameters are leaves. On the root's device they are in the
root's memory; elsewhere they are copies, sent again if the version counter or data pointer of the
root's has changed. Trained parameters are also sent after every optimizer step or backward, because
fused optimizers raise no version counter. Buffers are in memory of their own, also on the root's
device, where a step may resize them. Attributes are copied anew, all of them, when one of the
root's is bound anew or a container has other items. Where a parameter, submodule, hook or buffer
comes or goes, all replicas are built anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_not, ne
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dp.parallel.comm import Packed, Packing, gradients_on, to_device_coalesced
from lightning_dp.parallel.replicate.attributes import ATOMS, Copier
from lightning_dp.parallel.replicate.structure import (
    ModuleStructure,
    OwnAttributes,
    compiled_attributes,
    holds_compiled_code,
    refuse_limited_norms,
)
from lightning_dp.parallel.torch_private import (
    BATCH_NORMS,
    FIXED_NAMES,
    HOOK_TABLES,
    at_end_of_backward,
    backward_id,
    buffer_table,
    child_table,
    gradient_hooks,
    parameter_table,
    tables_as_attributes,
    version,
)

BufferCopies: TypeAlias = Literal["changed", "all", "read"]
Table: TypeAlias = dict[str, Tensor | None]

_get: Callable[[dict[str, Any], str, object], Any] = dict.get
_REQUIRES_GRAD, _TRAINING, _STALE = map(attrgetter, ("requires_grad", "training", "stale"))
_HOOK_TABLES = frozenset(HOOK_TABLES)


class Replicas:
    """A module and its replicas.

    Attributes:
        modules: one per device; `modules[0]` is the root itself, on the first device.
        submodules: all modules of every replica, at equal positions; another list after replicas
            were replaced.
        root_parameters: the root's parameters, tied ones once.
        packing: how parameters, and gradients of their kinds, are packed when they travel.
        compiles: whether the module is known to run compiled code. Compiling in several threads at
            once is unsafe.
        run_in_order: whether the module holds what replicas cannot use in several threads at once:
            a `threading.local`, which is empty in other threads, or a `torch.Generator`, from which
            they would draw in no fixed order.

    Args:
        root: the module.
        devices: the replicas' devices, the root's first.
        own_attributes: gives a replica's modules attributes of their own.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device],
        own_attributes: OwnAttributes = lambda *_: {},
    ) -> None:
        self._root, self._devices = root, list(devices)
        self._own_attributes = own_attributes
        with torch.inference_mode(False), torch.no_grad():
            self._build()
        if len({*devices}) > 1:
            hook = register_optimizer_step_post_hook(partial(_after_step, weakref.ref(self)))
            weakref.finalize(self, hook.remove)

    def _build(self) -> None:
        self._are_dropped = False
        structure = ModuleStructure(self._root, self._devices[0])
        self._structure, self._tables = structure, Contents(structure.tables)
        self._hooks = numbers_of(structure.hook_tables)
        with_buffers = [m for m in structure.modules if buffer_table(m)]
        # In training mode their outputs do not depend on buffers, which never require gradients.
        self._norms = [m for m in with_buffers if type(m) in BATCH_NORMS]
        self._read_tables = [buffer_table(m) for m in with_buffers if type(m) not in BATCH_NORMS]
        self.root_parameters = structure.parameters
        self.compiles = holds_compiled_code(self._root)
        self.packing = Packing(structure.parameters)
        if len(self._devices) > 1:
            refuse_limited_norms(structure.modules)
        self._others = [
            Replica(structure, k, device, self._own_attributes, self.packing)
            for k, device in enumerate(self._devices)
            if k > 0
        ]
        self._have_copies = not all([r.in_root_memory for r in self._others])
        self._copy_parameters(self._others)
        self._copy_buffers(self._others)
        self._copy_attributes()
        self.modules = [self._root, *(replica.module for replica in self._others)]
        self.submodules = [structure.modules, *(r.submodules for r in self._others)]

    def drop(self) -> None:
        """Drops the replicas after an error; the next refresh makes new ones.

        A thread that was left behind may still use them. They also hold autograd graphs, and
        Python's garbage collector finds no cycle that passes through a graph.
        """
        self._are_dropped, self._others = True, []
        self.modules, self.submodules = self.modules[:1], self.submodules[:1]

    def mark_stale(self, *, trained_only: bool = False) -> None:
        """Has the next refresh copy everything, or all trained parameters, changed or not."""
        for replica in self._others:
            replica.stale = "trained" if trained_only and replica.stale != "all" else "all"

    # Every step

    def refresh(
        self,
        active: Collection[int] | None = None,
        *,
        frozen: bool = False,
        buffers: BufferCopies = "changed",
    ) -> None:
        """Brings replicas up to date; a root with other parameters or submodules gets new ones.

        Args:
            active: those of this step; None for all.
            frozen: copies also all parameters with requires_grad=False, not only those known to
                have changed, since writes through `.data` cannot be detected.
            buffers: "changed", "all", or "read": all, but none if the forward only writes to them.
        """
        are_dropped, self._are_dropped = self._are_dropped, True  # until this has ended
        # An inference tensor could never be trained, and evaluation often comes before training.
        with torch.inference_mode(False), torch.no_grad():
            others = [replica for replica in self._others if not active or replica.k in active]
            # Of other shapes or dtypes, parameters do not fit into the memory of copies elsewhere.
            fit = not self._have_copies or self.packing.fits(self.root_parameters)
            hooks = numbers_of(self._structure.hook_tables)
            if are_dropped or not fit or hooks != self._hooks or self._tables.differ():
                self._build()
            elif others:
                everything = "all" in map(_STALE, others)
                self._copy_parameters(others, frozen)
                if buffers == "read" and not (everything or self._reads_buffers()):
                    others = []
                elif buffers == "changed" and not everything:
                    others = [replica for replica in others if replica.has_other_buffers()]
                has_new = bool(others) and self._copy_buffers(others)
                if (has_new and self._hold_tensors) or self._have_other_attributes():
                    self._copy_attributes()
        self._are_dropped = False

    def _copy_parameters(self, others: Sequence[Replica], frozen: bool = False) -> None:
        """Copies the parameters that have changed, those that are frozen, or all.

        A bucket is sent whole if one of its parameters has changed. Copies go through `.data`:
        no version counter rises, and backwards of earlier calls stay possible.
        """
        roots = self.root_parameters
        # Replicas in the root's memory see what is written there.
        versions = versions_of(roots) if self._have_copies else []
        state = ParameterState(pointers_of(roots), versions, list(map(_REQUIRES_GRAD, roots)))
        followed = [(replica, replica.follow(state, frozen)) for replica in others]
        stale = [(replica, positions) for replica, positions in followed if positions]
        if stale:
            targets = [
                [r.packed[j] for r, positions in stale if positions & bucket.positions]
                for j, bucket in enumerate(self.packing.buckets)
            ]
            self.packing.send(roots, targets)
        for replica, positions in stale:
            for i in positions.intersection(self.packing.alone):
                replica.parameters[i].data.copy_(roots[i].data)

    def _reads_buffers(self) -> bool:
        """Whether a forward reads a buffer."""
        return bool(self._read_tables) or not all(map(_TRAINING, self._norms))

    def _copy_buffers(self, others: Sequence[Replica]) -> bool:
        """Gives replicas new buffers, with the root's values; whether there are any."""
        roots = self._structure.buffers()
        for replica in others:
            arrived = to_device_coalesced(roots, replica.device)
            copies = [buffer.detach().clone() for buffer in arrived]
            for root, copy in zip(roots, copies, strict=True):
                vars(copy).update(vars(root))
            replica.take_buffers(roots, copies)
        return bool(roots)

    def _have_other_attributes(self) -> bool:
        """Whether an attribute, or the content of a container, is not what was copied."""
        return (
            self._attributes.differ()
            or self._containers.differ()
            or (bool(self._moved) and versions_of(self._moved) != self._moved_versions)
        )

    def _copy_attributes(self, *, with_graphs: bool = False) -> None:
        """Copies all attributes of all modules anew, and notes what shows that they change."""
        copiers = [r.copy_attributes(with_graphs=with_graphs) for r in self._others]
        self._hold_tensors = any([copier.holds_tensors for copier in copiers])
        self._have_graphs = any([copier.has_graphs for copier in copiers])
        self.compiles |= any([copier.compiles for copier in copiers])
        self.run_in_order = any([copier.runs_in_order for copier in copiers])
        self._attributes = Attributes(self._structure.owners)
        self._containers = Contents([c for copier in copiers for c in copier.containers])
        self._moved = [tensor for copier in copiers for tensor in copier.moved]
        self._moved_versions = versions_of(self._moved)

    # Whose gradients and buffers are whose

    @property
    def parameters(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every replica; equal positions correspond, tied ones appear once.

        Left out are replicas whose gradients are all in the root's, see `share_parameters`.
        """
        return [self.root_parameters, *[r.parameters for r in self._others if r.has_gradients]]

    def parameters_of(self, k: int) -> Sequence[Tensor]:
        """The parameters that a backward of replica k fills: the root's where it shares them."""
        shares = k == 0 or self._others[k - 1].shares
        return self.root_parameters if shares else self._others[k - 1].parameters

    def share_parameters(self, share: bool) -> None:
        """Has replicas on the root's device compute with the root's own parameters, or no longer.

        Their backwards then accumulate into the root's `.grad`, and there is nothing to sum. Called
        after every refresh; `share` only where backwards run one after another, or as one.
        """
        changed = False
        for replica in self._others:
            if replica.in_root_memory:
                # A later backward through a graph of its own parameters still fills their `.grad`.
                replica.has_gradients |= not share
                if replica.shares != share:
                    replica.share(share)
                    changed = True
        if changed and self._hold_tensors:
            self._copy_attributes()

    @property
    def root_buffers(self) -> list[Tensor | None]:
        """The root's buffers."""
        return entries(self._structure.buffer_tables)

    @property
    def buffers(self) -> list[list[Tensor | None]]:
        """Every replica's buffers, the root's first."""
        tables = [self._structure.buffer_tables, *(r.buffer_tables for r in self._others)]
        return list(map(entries, tables))

    def refuse_trained_buffers(self) -> None:
        """Raises a ValueError about leaf buffers that require gradients: replicas' would be lost.

        A buffer with a graph, which a step has left on the module, is copied as a value.
        """
        read = entries(self._read_tables)
        if any([b.requires_grad and b.is_leaf for b in read if b is not None]):
            buffers = self._root.named_buffers()
            names = [name for name, b in buffers if b.requires_grad and b.is_leaf]
            raise ValueError(
                f"Expected buffers without gradients, got {names}, of which a step on several "
                "devices would lose those of all devices but the first. Make them parameters, "
                'or use DataParallelStrategy(mode="forward").'
            )

    def connect(self, active: Iterable[int], after_backward: Callable[[], None]) -> None:
        """Has replicas compute with functions of the root's parameters, see `Replica.connect`.

        Attributes that are tensors with a graph are part of it, too. A backward through them calls
        `after_backward` at its end.
        """
        for k in active:
            if k > 0:
                self._others[k - 1].connect(after_backward)
        if self._hold_tensors or self._have_graphs:
            self._copy_attributes(with_graphs=torch.is_grad_enabled())


def _after_step(replicas: Callable[[], Replicas | None], *_: Any) -> None:
    """Runs after a step of any optimizer."""
    living = replicas()
    if living is not None:
        living.mark_stale(trained_only=True)


class Replica:
    """Replica k > 0: copies of the root's modules, with parameters and buffers of their own.

    `_compute_with` puts other tensors into the modules' tables: the root's own parameters
    (`share`), or functions of the root's parameters (`connect`).
    """

    def __init__(
        self,
        source: ModuleStructure,
        k: int,
        device: torch.device,
        own_attributes: OwnAttributes,
        packing: Packing,
    ) -> None:
        self._source, self.k, self.device = source, k, device
        # What may have changed without a trace: nothing, trained parameters, or everything.
        self.stale: Literal["", "trained", "all"] = "all"
        self.shares = False  # whether it computes with the root's own parameters
        roots, is_there = source.parameters, device == source.device
        # What shares the memory of an inference tensor could never be trained.
        self.in_root_memory = is_there and not any([p.is_inference() for p in roots])
        self.has_gradients = not self.in_root_memory  # a backward may fill its own parameters
        self.packed, self._memory = list[Packed](), [p.detach() for p in roots]
        if not self.in_root_memory:
            self.packed, self._memory = packing.memory(roots, device)
        self.parameters = list(map(_leaf, roots, self._memory))
        self._seen = ParameterState([], [], [])
        self._root_buffers: list[Tensor] = []
        self._buffers: list[Tensor] = []  # its own, one for each of the root's
        self._in_use: list[Tensor] = [*self.parameters]  # for the root's parameters, then buffers
        self._make_modules(own_attributes)

    def _make_modules(self, own_attributes: OwnAttributes) -> None:
        """Makes modules with tables of their own; attributes are copied later."""
        source = self._source
        self._twins: dict[int, Any] = {id(m): object.__new__(type(m)) for m in source.modules}
        self.submodules: list[nn.Module] = [self._twins[id(m)] for m in source.modules]
        self.module = self.submodules[0]
        self.buffer_tables: list[Table] = []
        self._tables: list[tuple[Table, Table]] = []  # of parameters and buffers; the root's first
        self._kept: list[Set[str]] = []  # names of attributes that it has for itself
        pairs = list(zip(source.modules, self.submodules, strict=True))
        for original, twin in pairs:
            weights, buffers = dict[str, Any](), dict[str, Any]()
            self._tables.append((parameter_table(original), weights))
            self._tables.append((buffer_table(original), buffers))
            self.buffer_tables.append(buffers)
            found = child_table(original).items()
            children = {name: self._twins.get(id(child)) for name, child in found}
            attributes = tables_as_attributes(weights, buffers, children)
            attributes.update(own_attributes(original, twin, self.k, self.device))
            hooks = {name: type(vars(original)[name])() for name in HOOK_TABLES}
            vars(twin).update({**vars(original), **hooks, **attributes})
            self._kept.append((FIXED_NAMES - _HOOK_TABLES) | attributes.keys())
        for j, (original, twin) in enumerate(pairs):
            compiled = compiled_attributes(original, twin)
            vars(twin).update(compiled)
            self._kept[j] |= compiled.keys()
        self._kept += [frozenset(["__deepcopy__"])] * len(self.parameters)  # see `alias_parameters`

    # Parameters and buffers

    def follow(self, state: ParameterState, frozen: bool) -> set[int]:
        """Compares the root's state with the last one seen; returns positions to be sent.

        Where replicas compute in the root's memory, nothing is sent.
        """
        everything = self.stale == "all"
        # Inside a backward (a checkpoint recomputes) other threads read the parameters.
        trained = everything or (self.stale == "trained" and backward_id() < 0)
        if trained:
            self.stale = ""
        frozen, seen, self._seen = frozen or everything, self._seen, state
        if self.in_root_memory:
            trained, frozen = everything, False
        if not (trained or frozen) and seen == state:
            return set()
        parameters, roots = self.parameters, self._source.parameters
        bound = _differences(state.pointers, seen.pointers)
        toggled = _differences(state.requires_grad, seen.requires_grad)
        for i in toggled:
            parameters[i].requires_grad_(state.requires_grad[i])
        if self.in_root_memory:
            for i in range(len(parameters)) if everything else bound:
                parameters[i].data = roots[i].data
            return set()
        written = _differences(state.versions, seen.versions)
        # As on one device, a backward through the old values raises autograd's error: the version
        # counter of a saved tensor has changed.
        increment_version([parameters[i] for i in bound | written])
        for i in _differences(pointers_of(parameters), pointers_of(self._memory)):
            parameters[i].data = self._memory[i]  # a step has bound `.data` of its replica anew
        stale = bound | written | toggled
        chosen = {True: trained, False: frozen}
        return stale.union(i for i, trains in enumerate(state.requires_grad) if chosen[trains])

    def has_other_buffers(self) -> bool:
        """Whether buffers of the root, or its own, were bound or written to since their copy."""
        return self._all_buffers()[1] != self._seen_buffers[1]

    def _all_buffers(self) -> tuple[list[Tensor | None], list[float]]:
        """The root's buffers and its own; and their ids, pointers and versions, to be compared."""
        found = entries(self._source.buffer_tables + self.buffer_tables)
        present = [buffer for buffer in found if buffer is not None]
        return found, [*map(id, found), *pointers_of(present), *versions_of(present)]

    def take_buffers(self, roots: list[Tensor], copies: list[Tensor]) -> None:
        """Takes copies of the root's buffers as its own."""
        self._root_buffers, self._buffers = roots, copies
        self._compute_with([*self._in_use[: len(self.parameters)], *copies])
        self._seen_buffers = self._all_buffers()  # kept alive: no other tensor can get their ids

    def _stand_ins(self) -> dict[int, Any]:
        """The tensors it computes with, by the ids of the root's parameters and buffers."""
        roots = [*self._source.parameters, *self._root_buffers]
        return dict(zip(map(id, roots), self._in_use, strict=True))

    def _compute_with(self, tensors: Sequence[Tensor]) -> None:
        """Puts tensors in the place of the root's parameters and buffers."""
        self._in_use = [*tensors]
        stand_ins = self._stand_ins()
        for root_table, table in self._tables:
            for name in table.keys() - root_table.keys():
                del table[name]
            table.update({name: stand_ins.get(id(t), t) for name, t in root_table.items()})

    def share(self, shares: bool) -> None:
        """Computes with the root's own parameters, or no longer."""
        self.shares = shares
        parameters = self._source.parameters if shares else self.parameters
        self._compute_with([*parameters, *self._buffers])

    def connect(self, on_backward: Callable[[], None]) -> None:
        """Computes with aliases of the root's parameters, and of its buffers with gradients.

        A backward goes through them to the root, and calls `on_backward`. In a call without
        gradients, earlier aliases of the same memory stay: a reentrant checkpoint recomputes with
        the tensors that the module holds when the backward runs.
        """
        if self.shares and not any(map(_REQUIRES_GRAD, self._root_buffers)):
            return
        roots = [*self._source.parameters, *self._root_buffers]
        tensors = [*(self._source if self.shares else self).parameters, *self._buffers]
        if torch.is_grad_enabled():
            at_end = partial(at_end_of_backward, on_backward)
            self._compute_with(alias_parameters(roots, tensors, at_end))
        elif pointers_of(tensors) != pointers_of(self._in_use):
            self._compute_with(tensors)

    # Attributes

    def copy_attributes(self, *, with_graphs: bool) -> Copier:
        """Copies all attributes of the root's modules and parameters anew; returns the copier.

        Tensors come first, which containers may hold; hooks last, which may know containers.
        """
        parts = {**self._stand_ins(), **self._twins}
        copier = Copier(parts, self._source.device, self.device)
        tensors, others, hooks = [], [], []
        owners = zip(self._source.owners, [*self.submodules, *self._in_use], strict=False)
        for j, (original, twin) in enumerate(owners):
            source, target, kept = vars(original), vars(twin), self._kept[j]
            if source is target:  # a parameter that is the root's own
                continue
            for name in target.keys() - source.keys() - kept:
                del target[name]
            for name, value in source.items():
                if name in kept:
                    continue
                if type(value) in ATOMS:
                    target[name] = value
                elif isinstance(value, Tensor):
                    tensors.append((target, name, value))
                elif name not in _HOOK_TABLES:
                    others.append((target, name, value))
                elif value or target[name]:
                    hooks.append((target, name, value))
        # Inference tensors could not be used in training.
        with torch.inference_mode(False), torch.set_grad_enabled(with_graphs):
            for target, name, value in tensors:
                target[name] = copier.tensor(value)
            for target, name, value in others + hooks:
                target[name] = copier.copy(value)
        return copier


# In the root's graph


def alias_parameters(
    roots: Sequence[Tensor], twins: Sequence[Tensor], on_backward: Callable[[], None]
) -> list[Tensor]:
    """The root's tensors inside a replica's graph: functions of them in the twins' memory.

    What requires no gradient is its twin. Any backward, `torch.autograd.grad` and second
    derivatives reach the root's tensors, whose hooks see one sum; each calls `on_backward`.
    """
    pairs = enumerate(zip(roots, twins, strict=True))
    trained = [i for i, (root, twin) in pairs if root.requires_grad and twin is not root]
    # A node for all of them gives None to tensors that a step did not use. A leaf's `.grad` stays
    # None then. But autograd would call a tensor's hook with None, and would run, and so free, the
    # graph of a tensor that is no leaf: these get a node each.
    alone = [i for i in trained if gradient_hooks(roots[i]) or not roots[i].is_leaf]
    together = [i for i in trained if i not in alone]
    tensors: list[Tensor] = list(twins)
    for group in filter(None, [*([i] for i in alone), together]):
        aliases = _aliases([twins[i] for i in group], on_backward, *(roots[i] for i in group))
        for i, alias in zip(group, aliases, strict=True):
            # deepcopy refuses tensors with a graph: an alias is deep-copied as its twin.
            vars(alias).update(vars(twins[i]), __deepcopy__=twins[i].__deepcopy__)
            if isinstance(roots[i], nn.Parameter) and type(roots[i]) is not nn.Parameter:
                alias.__class__ = type(roots[i])
            tensors[i] = alias
    return tensors


class _Aliases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, twins: list[Tensor], on_backward: Callable[[], None], *roots: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None: AdamW moves parameters that get zeros
        ctx.device, ctx.on_backward = roots[0].device, on_backward
        return tuple(twin.detach() for twin in twins)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.on_backward()
        return None, None, *gradients_on(ctx.device, list(gradients))


_aliases: Callable[..., tuple[Tensor, ...]] = _Aliases.apply


# Detecting changes


class Contents:
    """The items of containers at one moment. They are compared by identity."""

    def __init__(self, containers: Sequence[Collection[Any]]) -> None:
        self._containers = containers
        self._lengths = list(map(len, containers))
        self._filled = list(filter(len, containers))
        self._items = list(chain.from_iterable(self._filled))

    def differ(self) -> bool:
        """Whether the containers have other items now."""
        if list(map(len, self._containers)) != self._lengths:
            return True
        return any(map(is_not, chain.from_iterable(self._filled), self._items))


class Attributes:
    """The attributes of modules and parameters at one moment, compared by identity."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._tables: list[dict[str, Any]] = [vars(owner) for owner in owners]
        self._lengths = list(map(len, self._tables))
        places = [(table, name) for table in self._tables for name in table.keys() - FIXED_NAMES]
        self._places = [table for table, _ in places], [name for _, name in places]
        self._values = [table[name] for table, name in places]

    def differ(self) -> bool:
        """Whether the owners have other attributes now."""
        if list(map(len, self._tables)) != self._lengths:
            return True
        now = map(_get, *self._places, repeat(self))  # for those that are gone
        return any(map(is_not, now, self._values))


class ParameterState(NamedTuple):
    """Parameters have changed where one of these lists differs."""

    pointers: list[int]
    versions: list[float]
    requires_grad: list[bool]


def numbers_of(hook_tables: Iterable[dict[int, Any]]) -> list[int]:
    """The numbers of hooks; none is used a second time."""
    return list(chain.from_iterable(filter(None, hook_tables)))


def versions_of(tensors: Sequence[Tensor]) -> list[float]:
    """Numbers that grow when a tensor is written to; NaN, which equals nothing, has no counter."""
    try:
        return list(map(version, tensors))
    except RuntimeError:  # an inference tensor has none
        return [float("nan") if t.is_inference() else version(t) for t in tensors]


def pointers_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors are in memory."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has none
        return [t.data_ptr() if t.layout is torch.strided else 0 for t in tensors]


def _differences(now: Sequence[Any], before: Sequence[Any]) -> set[int]:
    return set(compress(count(), map(ne, now, before)))


def _leaf(root: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """A parameter of the root's class in some memory."""
    leaf = nn.Parameter(memory, requires_grad=root.requires_grad)
    if type(leaf) is nn.Parameter:
        leaf.__class__ = type(root)
    return leaf


def entries(tables: Iterable[Table]) -> list[Tensor | None]:
    """All buffers in some modules' tables, in order."""
    return list(chain.from_iterable(map(dict.values, tables)))
