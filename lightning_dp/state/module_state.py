"""What a step leaves on the modules of the user: items in containers, attributes bound anew.

Every replica begins a step with copies of the root's containers, as the copier of replicas makes
them. After the step they are merged into the root's by the rule for state, see `merge`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.lightning_private import running_hook
from lightning_dp.parallel.replicate import Contents, Replicas
from lightning_dp.parallel.scatter import Shards, tree
from lightning_dp.parallel.torch_private import hook_tables
from lightning_dp.state.merge import (
    Merge,
    Path,
    agree,
    copied,
    have_same_items,
    is_container,
    refill,
)

Attributes: TypeAlias = dict[str, Any]

_ABSENT = object()


def warn_of_step(module: nn.Module, text: str) -> None:
    """Warns of what the step that runs does, at the user's own code: no frame of it is left."""
    hook: Any = getattr(type(module), running_hook(module) or "forward")
    code = getattr(inspect.unwrap(hook), "__code__", None)
    if code is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


class ModuleState:
    """The attributes of the user's modules, from `begin` before a step to `settle` after it.

    Args:
        output_device: where items of lists end up.
        apart: names the attributes of a module that are not looked at.
    """

    def __init__(
        self,
        output_device: torch.device,
        apart: Callable[[nn.Module], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        self._merge, self._apart = Merge(output_device), apart
        self._warned: set[Path] = set()
        self._submodules: list[list[nn.Module]] = []
        self._modules: list[ModuleAttributes] = []
        self._active: Sequence[int] = []
        self._versions: list[int] = []
        self._contents = Contents([])

    def begin(self, replicas: Replicas, active: Sequence[int]) -> None:
        """Notes what the modules of all replicas, which have just followed the root, have."""
        now, first = replicas.attributes.versions, active[0]
        if replicas.submodules is not self._submodules:
            self._submodules, self._modules = replicas.submodules, list(self._watched(replicas))
            self._active = []
        if active != self._active or now != self._versions or self._contents.differ():
            self._active, self._versions = active, list(now)
            for module in self._modules:
                module.look(active)
            self._contents = Contents([live for module in self._modules for live in module.live])
        # A replica that stands for an idle root may bind what the root is to get.
        self._before = [dict(module.replicas[first]) for module in self._modules] if first else []

    def settle(self, replicas: Replicas, shards: Shards, *, keeps_items: bool = True) -> None:
        """Gives the module what the replicas' steps left on them.

        Without `keeps_items` containers get their former items back: the samples count in another
        process. Attributes that were bound anew stay, which may be counts of steps.
        """
        now = replicas.attributes.look()
        if not self._before and now == self._versions and not self._contents.differ():
            return
        self._merge.start(shards)
        before = self._before or [module.bound for module in self._modules]
        for module, own in zip(self._modules, before, strict=True):
            if not keeps_items:
                module.take_items_back()
            else:
                for path in module.merge(self._merge, shards.active):
                    self._warn(module, path)
            for name, differs in module.rebind(own, shards.active):
                if module.has_tensors(name, shards.active):  # each continues from its own
                    for k in filter(None, shards.active):
                        replicas.keep(k, module.number, name)
                if differs:
                    self._warn(module, (module.number, name))

    def undo(self) -> None:
        """Gives the module what it had before the step."""
        for module in self._modules:
            module.undo()

    def _watched(self, replicas: Replicas) -> Iterator[ModuleAttributes]:
        root = replicas.modules[0]
        places = {id(module): place for place, module in root.named_modules()}
        for number, modules in enumerate(zip(*replicas.submodules, strict=True)):
            own = modules[0]
            if _is_watched(own):
                label = ".".join(filter(None, (type(root).__qualname__, places.get(id(own), ""))))
                apart = _torchs_own(own) | self._apart(own)
                yield ModuleAttributes(number, list(map(vars, modules)), label, apart)

    def _warn(self, module: ModuleAttributes, path: Path) -> None:
        if path[:2] in self._warned:
            return
        self._warned.add(path[:2])
        name = f"{module.label}.{tree.name(path[2:], path[1])}"
        warn_of_step(
            self._submodules[0][0],
            f"A step binds {name} to different values on different replicas; self keeps the first "
            "replica's, and with tensors every replica continues from its own. That is right for a "
            "recurrent state, which only the same code reads again, if batches are of one size and "
            "split is 'even'. In forward mode that code is forward, and the step reads the "
            "first shard's. To collect over the batch, append to a list on self, log the value or "
            "update a metric.",
        )


class ModuleAttributes:
    """The attributes of one module on all replicas, as a step begins.

    Attributes:
        bound: the root's attributes.
        containers: copies of the containers among them.
        live: what shows the items of these, and of the replicas' copies, at any time.
    """

    def __init__(
        self, number: int, replicas: list[Attributes], label: str, apart: frozenset[str]
    ) -> None:
        self.number, self.label, self._apart = number, label, apart
        self.replicas, self._root = replicas, replicas[0]

    def look(self, active: Sequence[int]) -> None:
        """Notes what is there now; replicas that are not active lag behind."""
        self.bound = {n: v for n, v in self._root.items() if n not in self._apart}
        self.containers: Attributes = {}
        self._own: dict[str, list[Any]] = {}  # the containers of all replicas
        self.live: list[Collection[Any]] = []
        for name, value in self.bound.items():
            if is_container(value):
                own = [replica.get(name) for replica in self.replicas]
                # A replica may refer to its own layers there.
                if all(have_same_items(value, own[k]) for k in active if k):
                    self.containers[name], self._own[name] = copied(value), own
                    for container in own:
                        self.live.extend(_live(container))

    def merge(self, merge: Merge, active: Sequence[int]) -> Iterator[Path]:
        """Merges the replicas' containers into the root's; yields where replicas differ."""
        for name, before in self.containers.items():
            after = [self.replicas[k].get(name) for k in active]
            if all(new is self._own[name][k] for new, k in zip(after, active, strict=True)):
                yield from merge.into((self.number, name), before, after, self._root[name])

    def rebind(self, before: Attributes, active: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """Gives the root what the first replica has bound anew; yields whether the others differ.

        Args:
            before: what the first replica had.
            active: the replicas that have worked.
        """
        first, *others = [self.replicas[k] for k in active]
        for name, value in list(first.items()):
            is_copy = first is not self._root and callable(value)  # of something that is bound
            old = before.get(name, _ABSENT)
            if value is old or name in self._apart or isinstance(value, nn.Module) or is_copy:
                continue
            self._root[name] = value
            yield name, any(not agree(value, other.get(name)) for other in others)

    def has_tensors(self, name: str, active: Sequence[int]) -> bool:
        """Whether every replica that worked has tensors there, on its own device."""
        values = [self.replicas[k].get(name) for k in active]
        return all(any(isinstance(x, Tensor) for x in tree.leaves(value)) for value in values)

    def take_items_back(self) -> None:
        """Gives the root's containers the items that they had."""
        for name, items in self.containers.items():
            self._root[name] = self.bound[name]
            refill(self.bound[name], items)

    def undo(self) -> None:
        """Gives the root what it had before the step."""
        for name in self._root.keys() - self.bound.keys() - self._apart:
            del self._root[name]
        self._root.update(self.bound)
        self.take_items_back()


def _live(node: Any) -> Iterator[Collection[Any]]:
    """What shows the items of a container, and of those in it, whenever it is looked at."""
    if isinstance(node, dict):
        yield dict.keys(node)
        yield dict.values(node)
        node = dict.values(node)
    elif is_container(node):
        if not isinstance(node, tuple):
            yield node
    else:
        return
    for item in node:
        if is_container(item):
            yield from _live(item)


_OF_TORCH = frozenset(nn.Module().__dict__)


def _is_watched(module: nn.Module) -> bool:
    """Whether code of the user's may put something on a module; on layers of torch a hook may.

    Not where torch's own hooks (the older weight norm, spectral norm and pruning) bind a weight
    anew in every forward.
    """
    package = f"{type(module).__module__}."
    if not package.startswith(("torch.", "torchmetrics.")):
        return True
    hooks = [hook for table in hook_tables(module) for hook in table.values()]
    are_torchs = any(type(hook).__module__.startswith("torch.") for hook in hooks)
    return package.startswith("torch.nn.") and bool(hooks) and not are_torchs


def _torchs_own(module: nn.Module) -> frozenset[str]:
    """The names of a module's attributes that are torch's: on layers, all private ones it has."""
    if not type(module).__module__.startswith("torch.nn."):
        return _OF_TORCH
    return _OF_TORCH | {name for name in vars(module) if name.startswith("_")}
