"""What a step leaves on `self`: items in containers, and attributes bound anew.

Looked at before and after a step is only whether anything has changed: values and items by
identity, all at once. What has changed is looked at closely, attribute by attribute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, is_not, ne
from typing import NamedTuple

import torch
from torch import nn

from lightning_dp.parallel.replicate import Contents, Replicas
from lightning_dp.parallel.scatter import Shards, tree
from lightning_dp.parallel.torch_private import hook_tables, version
from lightning_dp.state.containers import Merge, Path
from lightning_dp.state.copied_containers import Attributes, CopiedContainer
from lightning_dp.state.module_attributes import ModuleAttributes

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


class Changes(NamedTuple):
    """What the steps of the replicas have left: other items, tensors written to, other values.

    Of attributes that are bound anew it is told whether the replicas disagree.
    """

    containers: list[CopiedContainer]
    written: list[tuple[ModuleAttributes, str]]
    rebound: list[tuple[ModuleAttributes, str, bool]]


class ModuleState:
    """The attributes of the user's modules, from `begin` before a step to `settle` after it.

    Items: replica 0, which is the module, appends to its own list, deque or dict, the others to
    copies; afterwards they are merged into what one device would have, see `containers`. Where the
    replicas have written different values to one entry, it is as an attribute that they bound.

    Attributes bound anew keep the value of the first replica that worked; if the values differ,
    a warning names the attribute, once. Where they are tensors (the state of a recurrent network,
    a mask that is made once), every replica goes on from its own.

    Looked at are the attributes of all modules, but for those that are torch's or torchmetrics' own
    and those that `apart` names for a module.
    """

    _seen: list[int]

    def __init__(
        self,
        output_device: torch.device,
        apart: Callable[[nn.Module], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        self._output_device = output_device
        self._apart = apart
        self._warned: set[tuple[int, str]] = set()
        self._submodules: list[list[nn.Module]] = []

    def begin(self, replicas: Replicas, active: Sequence[int]) -> None:
        """Notes what the modules of all replicas, which have just followed the root, have."""
        if replicas.submodules is self._submodules:
            self._look_again()
        else:
            self._begin_with(replicas)
        self._is_settled = False
        self._versions = list(map(version, self._tensors))
        if first := active[0]:  # what the root has bound is known
            self._of_first = [dict(module.replicas[first]) for module in self._modules]

    def changes(self, active: Sequence[int]) -> Changes:
        """What the replicas' steps have changed: to be asked before metrics are called for all."""
        first = active[0]
        anew = list(self._rebound(first))
        containers = self._changed_containers(self._of_all)
        containers |= {m.containers[name] for m, name in self._strays() if name in m.containers}
        rebound: list[tuple[ModuleAttributes, str, bool]] = []
        for module, before in anew:  # in most steps there is none
            containers.update(module.containers_bound(first, before))
            rebound.extend((module, *found) for found in module.rebound(active, before))
            values = {(module.number, name) for module, name, _ in rebound}
            containers = {c for c in containers if c.place not in values}
        versions = map(version, self._tensors)
        written = set(map(id, compress(self._tensors, map(ne, versions, self._versions))))
        modules = self._modules if written else ()
        ordered = sorted(containers, key=attrgetter("place"), reverse=True)
        return Changes(
            # One container may have several names.
            list(reversed({id(c.value): c for c in ordered}.values())),
            [(module, name) for module in modules for name in module.written(active, written)],
            rebound,
        )

    def settle(
        self, changes: Changes, replicas: Replicas, shards: Shards, *, keeps_items: bool = True
    ) -> None:
        """Gives the module what the replicas' steps left on them.

        Without `keeps_items` containers have afterwards what was in them before: of samples that
        count elsewhere. Attributes that were bound anew stay, which may be counts of steps.
        """
        if any(changes):
            if not keeps_items:
                for container in changes.containers:
                    container.take_back()
                changes = changes._replace(containers=[])
            self._settle(changes, replicas, shards)
        self._is_settled = True

    def _settle(self, changes: Changes, replicas: Replicas, shards: Shards) -> None:
        active = shards.active
        merge = Merge(self._output_device, shards)
        for container in changes.containers:
            number, name = path = container.place
            module = self._by_number[number]
            after, root = container.of(active), module.root.get(name)
            if root is container.value or root is after[0]:
                is_new = root is not container.value
                for entry, text in merge.into(path, container.items, after, root, is_new=is_new):
                    self._warn(module, name, entry[2:], text)
                container.bind(root)
        for module, name in changes.written:
            self._warn(module, name, text=_IN_PLACE)
        for module, name, differs in changes.rebound:
            holds_tensors = module.holds_tensors(name, active)
            for k in filter(None, active if holds_tensors else ()):
                replicas.keep(k, module.number, name)
            if name in module.containers and not holds_tensors:
                module.containers[name].bind(module.root[name])
            if differs:
                self._warn(module, name)

    def undo(self) -> None:
        """Gives the module what it had before the step."""
        for module in self._modules:
            module.undo()

    def _begin_with(self, replicas: Replicas) -> None:
        self._submodules = replicas.submodules
        root = replicas.modules[0]
        places = {id(module): place for place, module in root.named_modules()}
        self._modules = [
            ModuleAttributes(
                j,
                [module.__dict__ for module in modules],
                ".".join(filter(None, (type(root).__qualname__, places.get(id(modules[0]), "")))),
                _torchs_own(modules[0]) | self._apart(modules[0]),
            )
            for j, modules in enumerate(zip(*replicas.submodules, strict=True))
            if _has_users_attributes(modules[0])
        ]
        self._by_number = {module.number: module for module in self._modules}
        self._looks = replicas.attributes
        self._seen = list(self._looks.versions)
        self._list()

    def _look_again(self) -> None:
        """Brings what is known up to date with what anybody, or the latest step, has changed."""
        # What replicas have of their own only steps change, and those that ended are known.
        changed = self._changed_containers(self._of_root if self._is_settled else self._of_all)
        modules = {module for module, _ in self._strays()}
        modules.update(self._bound_anew(self._looks.versions))
        for module in modules:
            module.examine()
        self._seen = list(self._looks.versions)
        if modules:
            self._list()
        for container in changed:
            number, name = container.place
            if self._by_number[number].containers.get(name) is container:
                container.renew()

    def _list(self) -> None:
        """Puts everything into flat lists, which are quick to compare."""
        containers = [c for m in self._modules for c in m.containers.values()]
        self._busy = [c for c in containers if c.is_busy]
        self._quiet = [c for c in containers if not c.is_busy]
        self._of_root = Contents([part for c in self._quiet for part in c.of_root])
        self._of_all = Contents([part for c in self._quiet for part in c.live])
        self._tensors = [value for m in self._modules for _, _, value in m.tensors]
        places = [place for module in self._modules for place in module.places()]
        self._owners = [(module, name) for module, _, name, _ in places]
        self._attributes = [attributes for _, attributes, _, _ in places]
        self._names = [name for _, _, name, _ in places]
        self._values = [value for _, _, _, value in places]

    def _strays(self) -> set[tuple[ModuleAttributes, str]]:
        """Where a replica has something else in the place of a container or a tensor."""
        values = map(dict.get, self._attributes, self._names)
        return set(compress(self._owners, map(is_not, values, self._values)))

    def _changed_containers(self, contents: Contents) -> set[CopiedContainer]:
        """Those of which the items are others than they were.

        Some change in nearly every step. The others are looked at all at once.
        """
        changed = {container for container in self._busy if container.differs()}
        if contents.differ():
            found = [container for container in self._quiet if container.differs()]
            for container in found:
                container.is_busy = True
            changed.update(found)
            self._list()
        return changed

    def _rebound(self, first: int) -> Iterable[tuple[ModuleAttributes, Attributes]]:
        """Modules on which the first replica may have bound something, and what it had before."""
        if first:
            return zip(self._modules, self._of_first, strict=True)
        return ((module, module.bound) for module in self._bound_anew(self._looks.look()))

    def _bound_anew(self, versions: list[int]) -> list[ModuleAttributes]:
        """The modules of the root that have attributes of other versions than were seen."""
        if versions == self._seen:
            return []
        return [m for m in self._modules if versions[m.number] != self._seen[m.number]]

    def _warn(
        self, module: ModuleAttributes, name: str, path: Path = (), text: str = _DIFFERENT
    ) -> None:
        key = (module.number, name)
        if key in self._warned:
            return
        self._warned.add(key)
        what = f"{module.label}.{tree.name(path, name)}"
        warnings.warn(
            f"{text.format(what)} To collect over the batch, append to a list on self, log the "
            "value or update a metric.",
            stacklevel=2,
        )


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
