"""What a step leaves on the modules of the user: items in containers, attributes bound anew.

Every replica begins a step with copies of the root's containers, as the copier of replicas makes
them. After the step they are merged into the root's, see `merge`. An attribute that was bound anew
keeps the value of the first replica that worked. In most steps nothing has changed, which is seen
by comparing identities, for all modules at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicate import Contents, Replicas
from lightning_dp.parallel.scatter import Shards, tree
from lightning_dp.parallel.torch_private import hook_tables, version
from lightning_dp.state.merge import (
    Merge,
    Path,
    agree,
    copied,
    have_same_items,
    is_container,
    live,
    refill,
)

Attributes: TypeAlias = dict[str, Any]

_DIFFERENT = (
    "A step binds {} to different values on different replicas; self keeps the first replica's, "
    "and with tensors every replica goes on from its own. That is all right for what only the same "
    "code reads again, as a recurrent state, if batches are of one size and split is 'even'. "
    "In forward mode that code is forward, and the step reads the first shard's."
)
_IN_PLACE = (
    "A step writes in place to {}, once on every replica: where replicas share it, each of them "
    "does so, and elsewhere self keeps the first one's."
)
_ABSENT = object()


class ModuleState:
    """The attributes of the user's modules, from `begin` before a step to `settle` after it.

    Looked at are the attributes of all modules, but for those that are torch's or torchmetrics' own
    and those that `apart` names for a module.
    """

    def __init__(
        self,
        output_device: torch.device,
        apart: Callable[[nn.Module], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        self._output_device = output_device
        self._apart = apart
        self._warned: set[tuple[int, str]] = set()
        self._submodules: list[list[nn.Module]] = []
        self._active: Sequence[int] = ()

    def begin(self, replicas: Replicas, active: Sequence[int]) -> None:
        """Notes what the modules of all replicas, which have just followed the root, have."""
        now = replicas.attributes.versions
        if replicas.submodules is not self._submodules or active != self._active:
            self._active = active
            self._modules = list(self._watched(replicas))
            self._submodules, self._versions = replicas.submodules, list(now)
            self._list()
        elif stale := self._stale(now):
            for module in stale:
                module.look()
            self._versions = list(now)
            self._list()
        self._written = list(map(version, self._tensors))
        first = active[0]  # what the root has bound is known
        self._before = [dict(m.replicas[first]) for m in self._modules] if first else []

    def settle(self, replicas: Replicas, shards: Shards, *, keeps_items: bool = True) -> None:
        """Gives the module what the replicas' steps left on them.

        Without `keeps_items` containers have afterwards what was in them before: of samples that
        count elsewhere. Attributes that were bound anew stay, which may be counts of steps.
        """
        if self._written != (versions := list(map(version, self._tensors))):
            pairs = zip(self._tensors, self._written, versions, strict=True)
            written = {id(tensor) for tensor, old, new in pairs if old != new}
            for module in self._modules:
                for name in module.written(shards.active, written):
                    self._warn(module, (name,), _IN_PLACE)
        merge, merged = Merge(self._output_device, shards), set[int]()
        for module, before in self._changed(replicas, shards.active[0]):
            for container in list(module.containers.values()):
                if id(container.value) in merged or not module.goes_on(container, shards.active):
                    continue
                merged.add(id(container.value))  # it may have several names
                if keeps_items:
                    self._merge(module, container, merge, shards.active)
                else:
                    module.take_back(container)
            for name, differs in module.rebound(shards.active, before):
                if module.has_tensors(name, shards.active):  # each continues from its own
                    for k in filter(None, shards.active):
                        replicas.keep(k, module.number, name)
                if differs:
                    self._warn(module, (name,))

    def undo(self) -> None:
        """Gives the module what it had before the step."""
        for module in self._modules:
            module.undo()

    def _watched(self, replicas: Replicas) -> Iterator[ModuleAttributes]:
        root = replicas.modules[0]
        places = {id(module): place for place, module in root.named_modules()}
        for number, modules in enumerate(zip(*replicas.submodules, strict=True)):
            own = modules[0]
            if _has_users_attributes(own):
                label = (type(root).__qualname__, places.get(id(own), ""))
                apart = _torchs_own(own) | self._apart(own)
                dicts = [vars(module) for module in modules]
                yield ModuleAttributes(
                    number, dicts, self._active, ".".join(filter(None, label)), apart
                )

    def _list(self) -> None:
        """Finds what is compared in every step."""
        self._holding = [m for m in self._modules if m.places]
        self._tensors = [tensor for m in self._modules for _, _, tensor in m.tensors]

    def _changed(self, replicas: Replicas, first: int) -> list[tuple[ModuleAttributes, Attributes]]:
        """Modules that the step may have changed, with what the first replica had before it."""
        if first:
            return list(zip(self._modules, self._before, strict=True))
        return [(module, module.bound) for module in self._stale(replicas.attributes.look())]

    def _stale(self, now: Sequence[int]) -> list[ModuleAttributes]:
        """Modules with attributes of other versions than were seen, or with other items."""
        stale = {module for module in self._holding if module.has_changed()}
        if now != self._versions:
            versions = self._versions
            stale.update(m for m in self._modules if now[m.number] != versions[m.number])
        return sorted(stale, key=attrgetter("number"))

    def _merge(
        self,
        module: ModuleAttributes,
        container: Container,
        merge: Merge,
        active: Sequence[int],
    ) -> None:
        name, after = container.name, module.of(container.name, active)
        root = module.root.get(name)
        if root is container.value or root is after[0]:
            for path in merge.into((module.number, name), container.items, after, root):
                self._warn(module, path[1:])

    def _warn(self, module: ModuleAttributes, path: Path, text: str = _DIFFERENT) -> None:
        key = (module.number, path[0])
        if key not in self._warned:
            self._warned.add(key)
            what = f"{module.label}.{tree.name(path[1:], path[0])}"
            warnings.warn(
                f"{text.format(what)} To collect over the batch, append to a list on self, log the "
                "value or update a metric.",
                stacklevel=2,
            )


class Container(NamedTuple):
    """A container on a module: the root's own, a copy of its items, and the replicas' copies."""

    name: str
    value: Any
    items: Any
    own: list[Any]


class ModuleAttributes:
    """The attributes of one module, on the root and on all other replicas, as a step begins."""

    def __init__(
        self,
        number: int,
        replicas: list[Attributes],
        active: Sequence[int],
        label: str,
        apart: frozenset[str],
    ) -> None:
        self.number, self.label, self.apart, self.active = number, label, apart, active
        self.replicas, self.root = replicas, replicas[0]
        self.look()

    def look(self) -> None:
        """Notes what is there now."""
        self.bound = {n: v for n, v in self.root.items() if n not in self.apart}
        self.containers: dict[str, Container] = {}
        for name, value in self.bound.items():
            if is_container(value):
                own = [replica.get(name) for replica in self.replicas]
                # A replica may refer to its own layers there. Those without samples lag behind.
                if all(have_same_items(value, own[k]) for k in self.active if k):
                    self.containers[name] = Container(name, value, copied(value), own)
        self.tensors = [
            (replica, name, value)
            for replica in self.replicas[1:]
            for name, value in replica.items()
            if isinstance(value, Tensor) and not value.is_inference() and name not in self.apart
        ]
        self.places = [*self.tensors]  # where replicas have something of their own
        for container in self.containers.values():
            for replica, copy in zip(self.replicas, container.own, strict=True):
                self.places.append((replica, container.name, copy))
        owned = chain.from_iterable(c.own for c in self.containers.values())
        self._contents = Contents([part for own in owned for part in live(own)])

    def has_changed(self) -> bool:
        """Whether a container, or what a replica has in place of one, is not as it was."""
        for replica, name, own in self.places:
            if replica.get(name) is not own:
                return True
        return self._contents.differ()

    def of(self, name: str, active: Sequence[int]) -> list[Any]:
        """An attribute of the replicas that work."""
        return [self.replicas[k].get(name) for k in active]

    def goes_on(self, container: Container, active: Sequence[int]) -> bool:
        """Whether what replicas have in place of a container continues it.

        If they have bound others, these have some of its items, or another number of them: a state
        that is bound anew has as many.
        """
        pairs = zip(active, self.of(container.name, active), strict=True)
        bound = [new for k, new in pairs if new is not container.own[k]]
        old = container.items
        if any(type(new) is not type(old) for new in bound):
            return False
        lengths = {len(new) for new in bound}
        return not old or lengths != {len(old)} or any(_has_kept(old, new) for new in bound)

    def rebound(self, active: Sequence[int], before: Attributes) -> list[tuple[str, bool]]:
        """Attributes that the step bound anew, and whether the replicas disagree on them."""
        first, *others = [self.replicas[k] for k in active]
        found = []
        for name, value in list(first.items()):
            container = self.containers.get(name)
            if (
                value is before.get(name, _ABSENT)
                or name in self.apart
                or isinstance(value, nn.Module)
                or (container is not None and self.goes_on(container, active))
                or (first is not self.root and callable(value))
            ):
                continue
            self.root[name] = value
            found.append((name, any(not agree(value, other.get(name)) for other in others)))
        return found

    def written(self, active: Sequence[int], tensors: set[int]) -> set[str]:
        """Tensors that the step wrote to in place: one that replicas share, or different copies."""
        first, *others = [self.replicas[k] for k in active]
        names = {name for _, name, value in self.tensors if id(value) in tensors}
        return {
            name
            for name in names
            if any(
                (value := replica.get(name)) is first.get(name) or not agree(first[name], value)
                for replica in others
            )
        }

    def has_tensors(self, name: str, active: Sequence[int]) -> bool:
        """Whether every replica that worked has tensors there, on its own device."""
        return all(
            any(isinstance(leaf, Tensor) for leaf in tree.leaves(value))
            for value in self.of(name, active)
        )

    def take_back(self, container: Container) -> None:
        """Gives the root the container and the items that it had."""
        self.root[container.name] = container.value
        refill(container.value, container.items)

    def undo(self) -> None:
        """Gives the root what it had before the step."""
        for name in self.root.keys() - self.bound.keys() - self.apart:
            del self.root[name]
        self.root.update(self.bound)
        for container in self.containers.values():
            self.take_back(container)


def _has_kept(old: Any, new: Any) -> bool:
    """Whether a container has an item of another one, or containers in the place of its own."""
    if isinstance(new, tuple):
        return True  # containers, which are looked at for themselves
    if isinstance(new, dict):
        common = [key for key in old if key in new]
        return any(new[key] is old[key] or is_container(old[key]) for key in common)
    return any(a is b for a in old for b in new)


_LAYERS = "torch.nn."
_OF_TORCH = frozenset(nn.Module().__dict__)


def _has_users_attributes(module: nn.Module) -> bool:
    """Whether code of the user's may put something on a module.

    On layers of torch a hook may do so; not where torch's own hooks (the older weight norm,
    spectral norm and pruning) bind a weight anew in every forward.
    """
    package = f"{type(module).__module__}."
    if package.startswith(_LAYERS):
        hooks = [hook for table in hook_tables(module) for hook in table.values()]
        return not any(type(hook).__module__.startswith(_LAYERS) for hook in hooks)
    return not package.startswith(("torch.", "torchmetrics."))


def _torchs_own(module: nn.Module) -> frozenset[str]:
    """The names of a module's attributes that are torch's: on layers, all private ones it has."""
    if not f"{type(module).__module__}.".startswith(_LAYERS):
        return _OF_TORCH
    return _OF_TORCH | {name for name in vars(module) if name.startswith("_")}
