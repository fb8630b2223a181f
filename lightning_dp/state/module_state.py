"""What a step leaves on `self`: items in containers, and attributes bound anew."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import Shards, judge, tree
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.state.containers import Merge, Path, agree, copied, is_container, refill

Attributes: TypeAlias = dict[str, Any]

_OF_TORCH = frozenset(nn.Module().__dict__)
_ABSENT = object()
_DIFFERENT = (
    "A step binds {} to different values on different replicas; self keeps the first replica's"
)
_OF_ATTRIBUTES = (
    ", and with tensors every replica goes on from its own. That is all right for values that only "
    "the step itself reads, such as a recurrent state."
)
_IN_PLACE = (
    "A step writes in place to {}, once on every replica: where replicas share it, each of them "
    "does so, and elsewhere self keeps the first one's."
)
_OF_ENTRIES = (
    ". Bind a recurrent state to an attribute of its own: then every replica goes on from its own."
)


class StateMemory:
    """What is known from earlier steps.

    Attributes:
        warned: attributes that were warned about.
    """

    def __init__(self) -> None:
        self.warned: set[tuple[int, str]] = set()


class ModuleState:
    """The attributes of the user's modules before a step, to be settled after it.

    Items: replica 0, which is the module, appends to its own list, deque or dict, the others to
    copies; afterwards they are merged into what one device would have, see `containers`. Where the
    replicas have written different values to one entry, it is as an attribute that they bound.

    Attributes bound anew keep the value of the first replica that worked; if the values differ,
    a warning names the attribute, once. Where they are tensors (the state of a recurrent network,
    a mask that is made once), every replica goes on from its own.

    Args:
        replicas: the replicas; looked at are the attributes of all modules that are not torch's.
        shards: the step's shards.
        output_device: where the items end up.
        memory: carried from step to step.
    """

    def __init__(
        self,
        replicas: Replicas,
        shards: Shards,
        output_device: torch.device,
        memory: StateMemory,
    ) -> None:
        self._memory = memory
        self._replicas = replicas
        self._active = shards.active
        self._shards = shards
        self._merge = Merge(output_device, shards)
        modules = replicas.submodules
        self._modules = [
            _ModuleAttributes(root, j, [modules[k][j] for k in shards.active])
            for j, root in enumerate(modules[0])
            if not type(root).__module__.startswith("torch.")
        ]

    def settle(self) -> None:
        """Gives the module what the replicas' steps left on them."""
        for module in self._modules:
            for name, before, after in module.containers():
                path = (module.number, name)
                for entry in self._merge.into(path, before, after, module.root[name]):
                    self._warn(module, name, entry[2:])
            for name in module.written():
                self._warn(module, name, text=_IN_PLACE)
            for name, differs in module.rebound():
                for k in self._active if module.holds_tensors(name) else ():
                    self._replicas.keep(k, module.number, name)
                if module.holds_samples(name, self._shards):
                    self._shards.dims.keep_sizes()
                if differs:
                    self._warn(module, name)

    def undo(self) -> None:
        """Gives the module what it had before the step."""
        for module in self._modules:
            module.undo()

    def release(self) -> None:
        """Lets the replicas share the module's containers again, also after an error."""
        for module in self._modules:
            module.release()

    def _warn(
        self, module: _ModuleAttributes, name: str, path: Path = (), text: str | None = None
    ) -> None:
        key = (module.number, name)
        if key in self._memory.warned:
            return
        self._memory.warned.add(key)
        text = text or _DIFFERENT + (_OF_ENTRIES if path else _OF_ATTRIBUTES)
        what = f"{module.type_name}.{tree.name(path, name)}"
        warnings.warn(
            f"{text.format(what)} To collect over the batch, append to a list on self, log the "
            "value or update a metric.",
            stacklevel=2,
        )


class _ModuleAttributes:
    """The attributes of one module, on the root and on the replicas that work."""

    def __init__(self, root: nn.Module, number: int, replicas: list[nn.Module]) -> None:
        self.number = number
        self.type_name = type(root).__qualname__
        self.root: Attributes = root.__dict__
        self._replicas: list[Attributes] = [replica.__dict__ for replica in replicas]
        self._bound = {n: v for n, v in self.root.items() if n not in _OF_TORCH}
        # A replica that refers to its own layers where the root refers to the root's is left out.
        self._items = {
            name: copied(value)
            for name, value in self._bound.items()
            if is_container(value) and all(replica.get(name) is value for replica in self._replicas)
        }
        for replica in self._others():
            replica.update({name: copied(items) for name, items in self._items.items()})
        self._tensors = [
            (name, value, value._version)
            for replica in self._others()
            for name, value in replica.items()
            if isinstance(value, Tensor) and not value.is_inference()
        ]

    def containers(self) -> list[tuple[str, Any, list[Any]]]:
        """Name, items before, and the replicas' containers after the step."""
        return [
            (name, before, [replica.get(name) for replica in self._replicas])
            for name, before in self._items.items()
            if self.root.get(name) is self._bound[name]
        ]

    def written(self) -> set[str]:
        """Tensors that the step wrote to in place: one that replicas share, or different copies."""
        names = {name for name, value, version in self._tensors if value._version != version}
        first, *others = self._replicas
        return {
            name
            for name in names
            if any(
                (value := replica.get(name)) is first.get(name) or not agree(first[name], value)
                for replica in others
            )
        }

    def rebound(self) -> list[tuple[str, bool]]:
        """Attributes that the step bound anew, and whether the replicas disagree on them."""
        first = self._replicas[0]
        rebound = [
            name
            for name, value in first.items()
            if name not in _OF_TORCH
            and name not in self._items
            and value is not self._bound.get(name, _ABSENT)
            and not isinstance(value, nn.Module)
        ]
        if first is not self.root:
            rebound = [name for name in rebound if self._is_own(name, first)]
            self.root.update({name: first[name] for name in rebound})
        others = self._replicas[1:]
        return [
            (name, any(not agree(first[name], replica.get(name)) for replica in others))
            for name in rebound
        ]

    def undo(self) -> None:
        for name in self.root.keys() - self._bound.keys() - _OF_TORCH:
            del self.root[name]
        self.root.update(self._bound)
        for name, items in self._items.items():
            refill(self.root[name], items)

    def holds_tensors(self, name: str) -> bool:
        """Whether every replica that worked has tensors there, on its own device."""
        return all(
            name in replica and any(isinstance(leaf, Tensor) for leaf in tree.leaves(replica[name]))
            for replica in self._replicas
        )

    def holds_samples(self, name: str, shards: Shards) -> bool:
        """Whether every replica that worked has rows of its own samples there."""
        if shards.dims.keeps_sizes or not self.holds_tensors(name):
            return False
        values = [tree.leaves(replica[name]) for replica in self._replicas]
        rows = [leaves for leaves in zip(*values, strict=False) if isinstance(leaves[0], Tensor)]
        sizes = tuple(shards.active_sizes)
        shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in rows]
        return any(judge(own, sizes, 0, None).how == "rows" for own in shapes if own[0])

    def release(self) -> None:
        for replica in self._others():
            replica.update({name: self._bound[name] for name in self._items})

    def _is_own(self, name: str, replica: Attributes) -> bool:
        """Whether a replica's attribute was set by the step, and not by being a replica."""
        return not callable(replica[name]) and name != "_device"

    def _others(self) -> list[Attributes]:
        return [replica for replica in self._replicas if replica is not self.root]
