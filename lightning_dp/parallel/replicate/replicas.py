"""The replicas of a module, one per device: built once, kept, and refreshed before every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.comm import Packing, gradients_on, to_device_coalesced
from lightning_dp.parallel.replicate.compiled import Compilations, compiled_attributes
from lightning_dp.parallel.replicate.copier import ATOMS, Copier, OwnGenerators
from lightning_dp.parallel.replicate.structure import Contents, ModuleStructure, ReplicaRules
from lightning_dp.parallel.replicate.tensors import (
    BufferState,
    Parameters,
    ReplicaParameters,
    copies_of,
    entries,
    pointers_of,
    versions_of,
)
from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    HOOK_TABLES,
    at_end_of_backward,
    buffer_table,
    child_table,
    gradient_hooks,
    parameter_table,
    tables_as_attributes,
)

ParameterCopies: TypeAlias = Literal["changed", "frozen", "all"]
BufferCopies: TypeAlias = Literal["changed", "all", "read"]

_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")
_HOOK_TABLES = frozenset(HOOK_TABLES)
_ABSENT = object()


class Replicas:
    """A module and its replicas.

    `modules[0]` is the root itself, whose parameters lie on the first device. `submodules` has all
    modules of every replica, at equal positions; it is another list after replicas were replaced.
    `attributes` counts changes of the root's attributes. `limited` are embeddings with `max_norm`.
    `before_rebuild` is called with the parameters of all replicas before others take their place,
    to save accumulated gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device],
        rules: ReplicaRules | None = None,
        before_rebuild: Callable[[Sequence[Sequence[Tensor]]], None] = lambda _: None,
    ) -> None:
        self._root, self._devices = root, list(devices)
        self._rules = rules or ReplicaRules()
        self._before_rebuild = before_rebuild
        self._build()

    def _build(self) -> None:
        self._are_lost = self._has_failed = self._share = False
        with torch.inference_mode(False), torch.no_grad():
            self._structure = structure = ModuleStructure(self._root, self._rules)
            self.attributes = structure.attributes
            self.limited = _limited(structure)
            self._weights = Parameters(structure.parameters)
            self.compiled = Compilations(self._root, len(self._devices))
            self._others = [
                Replica(structure, k, device, self._rules, self._weights.on(device))
                for k, device in enumerate(self._devices)
                if k > 0
            ]
            self._copy_buffers(self._others)
            for replica in self._others:
                replica.copy_attributes()
                replica.wrap_compiled()
            self._note_attributes()
        self.modules = [self._root, *(replica.module for replica in self._others)]
        self.submodules = [structure.modules, *(r.submodules for r in self._others)]

    def lose(self) -> None:
        """Has the next refresh make new replicas: a thread may still use these."""
        self._are_lost = True

    def drop(self) -> None:
        """Lets go of the replicas, and of graphs that they hold; the next refresh makes new ones.

        Python's garbage collector does not see through a graph that reaches a tensor of ours.
        """
        self.lose()
        self._others, self._contents = [], Contents([])
        self.modules, self.submodules = self.modules[:1], self.submodules[:1]

    def fail(self) -> None:
        """Has the next refresh compare and copy everything: a step has ended with an error."""
        self._has_failed = True

    def expect_change(self) -> None:
        """Has the next refresh copy trained parameters, which are about to be updated."""
        self._weights.expect_change()

    @property
    def parameters(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of every replica; equal positions correspond, tied ones appear once.

        Left out are replicas whose gradients are all in the root's, see `share_parameters`.
        """
        rows: list[Sequence[Tensor]] = [self._structure.parameters]
        for replica in self._others:
            # A parameter may be in the graph of an earlier step, or a step may have bound a
            # gradient.
            if not replica.shares or {*map(_GRAD, replica.parameters)} != {None}:
                rows.append(replica.parameters)
        return rows

    @property
    def root_parameters(self) -> Sequence[Tensor]:
        """The first of `parameters`."""
        return self._structure.parameters

    def parameters_of(self, k: int) -> Sequence[Tensor]:
        """The parameters that a backward of replica k fills: the root's where it shares them."""
        if k == 0 or self._others[k - 1].shares:
            return self._structure.parameters
        return self._others[k - 1].parameters

    @property
    def packing(self) -> Packing:
        """How parameters, and gradients of their kinds, are packed when they travel."""
        return self._weights.packing

    @property
    def root_buffers(self) -> list[Tensor | None]:
        """The root's buffers."""
        return entries(self._structure.buffer_tables)

    @property
    def buffers_of_steps(self) -> list[list[Tensor | None]]:
        """Every replica's buffers, but for those of modules that are apart."""
        places = [
            i for i, m in enumerate(self._structure.modules) if id(m) not in self._structure.apart
        ]
        rows = [self._structure.buffer_tables, *(r.buffer_tables for r in self._others)]
        return [entries(tables[i] for i in places) for tables in rows]

    def keep(self, k: int, position: int, name: str) -> None:
        """Lets a submodule of replica k keep what it has bound, until the root's is bound anew."""
        self._others[k - 1].keep(position, name)

    def refresh(
        self,
        active: Collection[int] | None = None,
        *,
        parameters: ParameterCopies = "changed",
        buffers: BufferCopies = "changed",
    ) -> None:
        """Brings replicas, all or those that are active in this step, up to date with the root.

        A root with other parameters or submodules than before gets new replicas. Copied are
        parameters that are known to have changed; "frozen", also those that are not trained, to
        which writing through `.data` leaves no trace. Of buffers "read" means all, but none if the
        forward only writes to them, as batch norm does in training.
        """
        has_failed, self._has_failed = self._has_failed, True  # until this has ended
        # An inference tensor could never be trained, and evaluation often comes before training.
        with torch.inference_mode(False), torch.no_grad():
            if (
                self._are_lost
                or self._structure.tables.differ()
                or self._weights.have_other_kinds()
            ):
                # Tensors that a functional call puts in place of parameters accumulate nothing.
                if not self._are_lost and all([p.is_leaf for p in self._structure.parameters]):
                    self._before_rebuild(self.parameters)
                self._build()
            elif self._others:
                others = self._others
                if active and not has_failed:
                    others = [self._others[k - 1] for k in active if k > 0]
                everything = has_failed or parameters == "all"
                self._follow_attributes(everything=has_failed)
                self._weights.refresh(
                    [replica.weights for replica in others],
                    everything=everything,
                    frozen=parameters == "frozen",
                )
                if buffers != "read" or everything or self._structure.reads_buffers():
                    if buffers == "changed" and not everything:
                        now = BufferState(self._structure.buffer_tables)
                        others = [r for r in others if r.has_other_buffers(now)]
                    self._copy_buffers(others)
            for replica in self._others:
                if replica.generators.own:
                    replica.generators.follow(alone=bool(active and 0 not in active))
        self._has_failed = False

    def _copy_buffers(self, others: Sequence[Replica]) -> None:
        """Gives replicas new buffers, with the root's values."""
        present = self._structure.present_buffers()
        state, changed = BufferState(self._structure.buffer_tables), False
        arrived: dict[torch.device, list[Tensor]] = {}
        for replica in others:
            if replica.device not in arrived:
                arrived[replica.device] = to_device_coalesced(present, replica.device)
            changed |= replica.take_buffers(present, copies_of(arrived[replica.device]), state)
        if changed:
            self._note_attributes()

    def _follow_attributes(self, *, everything: bool) -> None:
        """Copies the attributes of all modules anew if one of the root's or replicas' changed."""
        if (
            everything
            or self.attributes.look() != self._versions
            or list(map(len, self._own)) != self._sizes
            or self._contents.differ()
            or (self._moved and versions_of(self._moved) != self._moved_versions)
        ):
            for replica in self._others:
                replica.copy_attributes()
            self._note_attributes()

    def _note_attributes(self) -> None:
        """Notes what shows that attributes have changed."""
        self._versions = list(self.attributes.look())
        self._own = [vars(module) for r in self._others for module in r.submodules]
        self._sizes = list(map(len, self._own))
        copiers = [replica.copier for replica in self._others]
        self._contents = Contents(list(chain.from_iterable(c.containers for c in copiers)))
        self._moved = [tensor for copier in copiers for tensor in copier.moved]
        self._moved_versions = versions_of(self._moved)
        self.compiled.are_known |= any([copier.compiles for copier in copiers])

    def share_parameters(self, share: bool) -> None:
        """Has replicas on the root's device compute with the root's own parameters, or no longer.

        Their backwards then accumulate into the root's `.grad`, and there is nothing to sum. Called
        after every refresh; `share` only where replicas and their backwards run one after another.
        They do not share parameters to which a forward writes.
        """
        share = share and not self.limited
        for device, replica in zip(self._devices[1:], self._others, strict=True):
            if not replica.weights.shares_memory:
                if torch.is_grad_enabled():
                    # Now, and not in the midst of a backward that has little memory left.
                    self.packing.sums.prepare([self._devices[0], device])
            elif replica.shares != share and replica.share(share):
                self._note_attributes()

    def connect(self, active: Iterable[int], after_backward: Callable[[], None]) -> None:
        """Has replicas compute with functions of the root's parameters, see `Replica.connect`.

        A backward through them calls `after_backward` at its end.
        """
        connected = [self._others[k - 1].connect(after_backward) for k in active if k > 0]
        if any(connected):
            self._note_attributes()

    def refuse_trained_buffers(self) -> None:
        """Raises a ValueError about buffers that are trained: replicas would give them nothing.

        One that a step has computed, and left with its graph, is read as a value.
        """
        if any([b.requires_grad for b in self.root_buffers if b is not None]):
            buffers = self._root.named_buffers()
            names = [name for name, b in buffers if b.requires_grad and b.is_leaf]
            if names:
                raise ValueError(
                    f"Expected buffers without gradients, got {names}, of which a step on several "
                    "devices would lose those of all devices but the first. Make them parameters, "
                    'or use DataParallelStrategy(mode="forward").'
                )

    @torch.no_grad()
    def adopt_rows(self, active: Iterable[int]) -> None:
        """Gives the root the rows of `limited` embeddings that a forward has shortened elsewhere.

        They are written without a trace: graphs that have saved the weight stay usable.
        """
        others = [self._others[k - 1] for k in active if k > 0]
        for replica in others:
            for i, norm_type in self.limited.items():
                own, other = self._structure.parameters[i].data, replica.parameters[i].data
                other = other.to(own.device)
                norms = [rows.norm(norm_type, dim=1, keepdim=True) for rows in (own, other)]
                own.copy_(torch.where(norms[1] < norms[0], other, own))


def _limited(structure: ModuleStructure) -> dict[int, float]:
    """Positions of the weights of embeddings with `max_norm`, and the kinds of their norms."""
    places = {id(parameter): i for i, parameter in enumerate(structure.parameters)}
    return {
        places[id(module.weight)]: module.norm_type
        for module in structure.modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


class Replica:
    """Replica k, on a device other than the first entry of the devices.

    Its own tensors are `parameters` and buffers. For a while it may compute with other tensors in
    their place: the root's own parameters, or functions of these.
    """

    def __init__(
        self,
        source: ModuleStructure,
        k: int,
        device: torch.device,
        rules: ReplicaRules,
        weights: ReplicaParameters,
    ) -> None:
        self._source, self.device, self.weights = source, device, weights
        self.parameters = weights.parameters
        self.shares = False  # whether it computes with the root's own parameters
        self._root_buffers: list[Tensor] = []
        self._buffers: list[Tensor] = []  # its own, one for each of the root's
        self._in_place: list[Tensor] = [*self.parameters]  # of its parameters and buffers
        self._held: dict[tuple[int, str], Any] = {}  # root's values of attributes that it keeps
        root_device = source.device or device
        self.generators = OwnGenerators(k, root_device, device)
        self._new_copier = partial(
            Copier, source=root_device, device=device, generators=self.generators
        )
        self.copier = self._new_copier({})  # with which attributes were copied
        twins: dict[int, Any] = {id(m): object.__new__(type(m)) for m in source.modules}
        twins.update((id(m), copy.deepcopy(m).to(device)) for m in source.scripted)
        self.submodules: list[nn.Module] = [twins[id(m)] for m in source.modules]
        self.module, self._twins = self.submodules[0], twins
        parts = {**twins, **dict(zip(map(id, source.parameters), self.parameters, strict=True))}
        self.buffer_tables: list[dict[str, Tensor | None]] = [{} for _ in source.modules]
        self._tables = [*self.buffer_tables]
        self._kept: list[Set[str]] = []  # names of attributes that it has for itself
        for original, twin, table in zip(
            source.modules, self.submodules, self.buffer_tables, strict=True
        ):
            weights_of, children = (
                {name: parts.get(id(part), part) for name, part in tables(original).items()}
                for tables in (parameter_table, child_table)
            )
            self._tables.append(weights_of)
            buffers = buffer_table(original) if id(original) in source.staying else table
            own = tables_as_attributes(weights_of, buffers, children)
            own.update(rules.own_attributes(original, twin, k, device))
            hooks = {name: type(vars(original)[name])() for name in HOOK_TABLES}
            vars(twin).update({**vars(original), **hooks, **own})
            self._kept.append((FIXED_NAMES - _HOOK_TABLES) | own.keys())
        self._kept += [frozenset(["__deepcopy__"])] * len(self.parameters)  # see `broadcast`

    def wrap_compiled(self) -> None:
        """Compiles its modules for themselves where the root's are `torch.compile(module)`."""
        for j, (original, twin) in enumerate(
            zip(self._source.modules, self.submodules, strict=True)
        ):
            compiled = compiled_attributes(original, twin)
            vars(twin).update(compiled)
            self._kept[j] |= compiled.keys()

    # Parameters and buffers

    def compute_with(self, tensors: Sequence[Tensor]) -> bool:
        """Puts tensors in the place of its parameters and buffers; True if attributes changed."""
        before, self._in_place = self._in_place, [*tensors]
        pairs = zip(before, tensors, strict=True)
        replaced = {id(old): new for old, new in pairs if old is not new}
        for table in self._tables if replaced else ():
            table.update({n: replaced[id(t)] for n, t in table.items() if id(t) in replaced})
        if replaced and self.copier.holds_tensors:
            self.copy_attributes()
            return True
        return False

    def share(self, shares: bool) -> bool:
        """Computes with the root's own parameters, or no longer; True if attributes changed."""
        self.shares = shares
        parameters = self._source.parameters if shares else self.parameters
        return self.compute_with([*parameters, *self._buffers])

    def connect(self, on_backward: Callable[[], None]) -> bool:
        """Computes with functions of the root's parameters, and of its buffers with gradients.

        A backward goes through them to the root, and calls `on_backward`. Without gradients the
        replica computes with its own tensors, or with those of the latest call that had gradients:
        its backward may still recompute a part of it (reentrant checkpoints). Attributes that are
        tensors with a graph are inside of it, too. True if attributes changed.
        """
        roots, own = (
            [*self._source.parameters, *self._root_buffers],
            [*self.parameters, *self._buffers],
        )
        tensors, has_graphs = own, torch.is_grad_enabled()
        if has_graphs and any(map(_REQUIRES_GRAD, roots)):
            tensors = broadcast(roots, own, partial(at_end_of_backward, on_backward))
        elif not has_graphs and pointers_of(own) == pointers_of(self._in_place):
            tensors = self._in_place
        changed = self.compute_with(tensors)
        if self.copier.has_graphs:
            self.copy_attributes(with_graphs=has_graphs)
        return changed or self.copier.has_graphs

    def has_other_buffers(self, roots: BufferState) -> bool:
        """Whether the root's are not those that it has copies of, or a step changed its own."""
        own = BufferState(self.buffer_tables)
        return roots.differs(self._seen_buffers) or own.differs(self._own_buffers)

    def take_buffers(self, roots: list[Tensor], copies: list[Tensor], state: BufferState) -> bool:
        """Takes copies of the root's buffers as its own; True if attributes changed."""
        # A parameter may be a buffer as well.
        own = {
            id(p): twin for p, twin in zip(self._source.parameters, self._in_place, strict=False)
        }
        own.update(zip(map(id, roots), copies, strict=True))
        for table, root_table in zip(self.buffer_tables, self._source.buffer_tables, strict=True):
            table.clear()
            table.update({name: own.get(id(buffer)) for name, buffer in root_table.items()})
        self._root_buffers, self._buffers = roots, copies
        self._in_place[len(self.parameters) :] = copies
        self._seen_buffers, self._own_buffers = state, BufferState(self.buffer_tables)
        if self.copier.holds_tensors:
            self.copy_attributes()
        return self.copier.holds_tensors

    # Attributes

    def copy_attributes(self, *, with_graphs: bool = False) -> None:
        """Copies all attributes of the root's modules and parameters anew.

        Tensors come first, which containers may hold; hooks last, which may know containers.
        """
        roots = [*self._source.parameters, *self._root_buffers]
        parts: dict[int, Any] = dict(zip(map(id, roots), self._in_place, strict=True))
        self.copier = copier = self._new_copier({**parts, **self._twins})
        tensors, others, hooks = [], [], []
        owners = zip(self._source.owners, [*self.submodules, *self._in_place], strict=False)
        for j, (original, twin) in enumerate(owners):
            root, own, kept = vars(original), vars(twin), self._kept[j]
            if root is own:  # a parameter that is the root's own
                continue
            for name in own.keys() - root.keys() - kept:
                del own[name]
            for name, value in root.items():
                if name in kept or self._held.get((j, name), _ABSENT) is value:
                    continue
                if type(value) in ATOMS:
                    own[name] = value
                elif isinstance(value, Tensor):
                    tensors.append((own, name, value))
                elif name not in _HOOK_TABLES:
                    others.append((own, name, value))
                elif value or own[name]:
                    hooks.append((own, name, value))
        # Inference tensors could not be used in training.
        with torch.inference_mode(False), torch.set_grad_enabled(with_graphs):
            for own, name, value in tensors:
                own[name] = copier.tensor(value)
            for own, name, value in others + hooks:
                own[name] = copier.copy(value)

    def keep(self, j: int, name: str) -> None:
        """Keeps the value of an attribute of owner j until the root's is bound anew."""
        self._held[j, name] = vars(self._source.owners[j]).get(name)


def broadcast(
    roots: Sequence[Tensor], twins: Sequence[Tensor], on_backward: Callable[[], None]
) -> list[Tensor]:
    """The root's tensors inside a replica's graph: functions of them in the twins' memory.

    What requires no gradient is its twin. Any backward, `torch.autograd.grad` and second
    derivatives reach the root's tensors, whose hooks see one sum; each calls `on_backward`.
    """
    tensors: list[Tensor] = list(twins)
    for group in _groups(roots):
        aliases = _aliases([twins[i] for i in group], on_backward, *(roots[i] for i in group))
        for i, alias in zip(group, aliases, strict=True):
            # Tensors with a graph refuse to be copied; what a forward copies are the parameters.
            vars(alias).update(vars(twins[i]), __deepcopy__=twins[i].__deepcopy__)
            tensors[i] = alias
    return tensors


def _groups(roots: Sequence[Tensor]) -> list[list[int]]:
    """Which trained tensors share a node: all, but those with hooks or a graph stand alone.

    A node hands None to the tensors that a step did not use. Autograd passes that over where it
    accumulates; but it calls hooks with it, and it uses up the graph of a computed tensor.
    """
    trained = [i for i, root in enumerate(roots) if root.requires_grad]
    alone = [i for i in trained if gradient_hooks(roots[i]) or not roots[i].is_leaf]
    together = [i for i in trained if i not in alone]
    return [*([i] for i in alone), *([together] if together else [])]


class _Broadcast(torch.autograd.Function):
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


_aliases: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
