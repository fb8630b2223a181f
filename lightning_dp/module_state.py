"""What a step leaves on `self`: items in lists and dicts, and attributes bound anew."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel import tree
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.shards import Shards
from lightning_dp.parallel.split import Order, batch_order
from lightning_dp.parallel.transfer import to_device

Path: TypeAlias = tuple[Any, ...]
Attributes: TypeAlias = dict[str, Any]

_OF_TORCH = frozenset(nn.Module().__dict__)
_ABSENT = object()


class StateMemory:
    """What is known from earlier steps.

    Attributes:
        per_sample: which lists get one item per sample (True) or per batch (False); shards of one
            sample cannot tell.
        warned: attributes that were warned about.
    """

    def __init__(self) -> None:
        self.per_sample: dict[Path, bool] = {}
        self.warned: set[tuple[int, str]] = set()


class ModuleState:
    """The attributes of the user's modules before a step, to be settled after it.

    Items: replica 0, which is the module, appends to its own list, the others to copies; that
    holds for lists in dicts and lists too. Afterwards the k-th new items of all replicas are
    gathered into the one item that one device would have appended. Where the replicas appended one
    item per sample, or different numbers of items, the items follow each other in shard order.
    Values under new keys of a dict are gathered. Entries that were changed stay as replica 0 left
    them.

    Attributes bound anew keep the value of the first replica that worked; if the values differ,
    a warning names the attribute, once. Where they are tensors (the state of a recurrent network,
    a mask that is made once), every replica goes on from its own.

    Args:
        replicas: the replicas; looked at are the attributes of all modules that are not torch's.
        shards: the step's shards.
        output_device: where the items end up.
        args: what the step was called with besides its shard.
        memory: carried from step to step.
    """

    def __init__(
        self,
        replicas: Replicas,
        shards: Shards,
        output_device: torch.device,
        args: tuple[Any, ...],
        memory: StateMemory,
    ) -> None:
        self._memory = memory
        self._replicas = replicas
        self._active = shards.active
        self._join = _Join(output_device, args, shards, memory)
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
                self._join.merge((module.number, name), before, after, module.root[name])
            for name, differs in module.rebound():
                for k in self._active if module.holds_tensors(name) else ():
                    self._replicas.keep(k, module.number, name)
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

    def _warn(self, module: _ModuleAttributes, name: str) -> None:
        key = (module.number, name)
        if key not in self._memory.warned:
            self._memory.warned.add(key)
            warnings.warn(
                f"A step binds {module.type_name}.{name} to different values on different "
                "replicas; self keeps the first replica's, and with tensors every replica goes on "
                "from its own. That is all right for values that only the step itself reads, such "
                "as a recurrent state. To collect over the batch, append to a list on self, log "
                "the value or update a metric.",
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
            name: _copied(value)
            for name, value in self._bound.items()
            if isinstance(value, list | dict)
            and all(replica.get(name) is value for replica in self._replicas)
        }
        for replica in self._others():
            replica.update({name: _copied(items) for name, items in self._items.items()})

    def containers(self) -> list[tuple[str, Any, list[Any]]]:
        """Name, items before, and the replicas' containers after the step."""
        return [
            (name, before, [replica.get(name) for replica in self._replicas])
            for name, before in self._items.items()
            if self.root.get(name) is self._bound[name]
        ]

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
            (name, any(not _agree(first[name], replica.get(name)) for replica in others))
            for name in rebound
        ]

    def undo(self) -> None:
        for name in self.root.keys() - self._bound.keys() - _OF_TORCH:
            del self.root[name]
        self.root.update(self._bound)
        for name, items in self._items.items():
            _refill(self.root[name], items)

    def holds_tensors(self, name: str) -> bool:
        """Whether every replica that worked has tensors there, on its own device."""
        return all(
            name in replica and any(isinstance(leaf, Tensor) for leaf in tree.leaves(replica[name]))
            for replica in self._replicas
        )

    def release(self) -> None:
        for replica in self._others():
            replica.update({name: self._bound[name] for name in self._items})

    def _is_own(self, name: str, replica: Attributes) -> bool:
        """Whether a replica's attribute was set by the step, and not by being a replica."""
        return not callable(replica[name]) and name != "_device"

    def _others(self) -> list[Attributes]:
        return [replica for replica in self._replicas if replica is not self.root]


class _Join:
    """Brings what the replicas added to their containers into the root's."""

    def __init__(
        self,
        output_device: torch.device,
        args: tuple[Any, ...],
        shards: Shards,
        memory: StateMemory,
    ) -> None:
        self._output_device = output_device
        self._args = args
        self._sizes = shards.active_sizes
        self._order = shards.active_order
        self._memory = memory

    def merge(self, path: Path, before: Any, after: list[Any], root: Any) -> None:
        """Extends `root` by what `after` has and `before` had not."""
        if any(type(other) is not type(before) for other in [*after, root]):
            return
        if isinstance(before, dict):
            self._merge_dicts(path, before, after, root)
        elif isinstance(before, list) and all(len(other) >= len(before) for other in after):
            for i, item in enumerate(before):
                if isinstance(item, list | dict):
                    self.merge((*path, i), item, [other[i] for other in after], root[i])
            tails = [other[len(before) :] for other in after]
            if any(tails):
                root[len(before) :] = self._appended(path, tails, self._sizes, self._order)

    def _merge_dicts(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> None:
        for key, item in before.items():
            if isinstance(item, list | dict):
                self.merge((*path, key), item, [other.get(key) for other in after], root.get(key))
        for key in dict.fromkeys(k for other in after for k in other if k not in before):
            present = [i for i, other in enumerate(after) if key in other]
            values = [after[i][key] for i in present]
            sizes = [self._sizes[i] for i in present]
            order = None if self._order is None else [self._order[i] for i in present]
            if all(type(value) is list for value in values):
                root[key] = self._appended((*path, key), values, sizes, order)
            else:
                root[key] = self._gathered(values, sizes, order)

    def _gathered(self, values: list[Any], sizes: list[int], order: Order | None) -> Any:
        device, args = self._output_device, self._args
        return gather(values, device, sizes=sizes, constants=args, order=order)

    def _appended(
        self, path: Path, tails: list[list[Any]], sizes: list[int], order: Order | None
    ) -> list[Any]:
        counts = [len(tail) for tail in tails]
        known = self._memory.per_sample
        if max(sizes) > 1:
            known[path] = counts == sizes or len(set(counts)) > 1
        if known.get(path, len(set(counts)) > 1 or _are_labels(tails)):
            appended = [to_device(item, self._output_device) for tail in tails for item in tail]
            places = None if order is None or counts != sizes else batch_order(order)
            return appended if places is None else [appended[i] for i in places]
        return [self._gathered(list(items), sizes, order) for items in zip(*tails, strict=True)]


def _agree(a: Any, b: Any) -> bool:
    """Whether two replicas have bound equal values, each on its device."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=False))
    return len(tree.leaves(b)) == len(pairs) == len(tree.leaves(a)) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in pairs
    )


def _are_labels(tails: Sequence[list[Any]]) -> bool:
    """Integers and strings of shards of one sample: each belongs to its sample."""
    return all(isinstance(item, int | str) for tail in tails for item in tail)


def _refill(container: Any, items: Any) -> None:
    """Gives a container, and those in it, the items back that it had when these were copied."""
    if container is items:
        return
    keys = list(items) if isinstance(items, dict) else range(len(items))
    kept = {key: items[key] for key in keys}
    for key, item in kept.items():
        here = key in container if isinstance(container, dict) else key < len(container)
        now = container[key] if here else None
        if isinstance(item, list | dict) and type(now) is type(item):
            _refill(now, item)
            kept[key] = now
    if isinstance(container, dict):
        container.clear()
        container.update(kept)
    else:
        container[:] = kept.values()


def _copied(node: Any) -> Any:
    """Containers anew, with the same items."""
    if isinstance(node, dict):
        clone = copy.copy(node)
        clone.update({key: _copied(item) for key, item in node.items()})
        return clone
    return [_copied(item) for item in node] if type(node) is list else node
