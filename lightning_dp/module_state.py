"""What a step leaves on `self`: items appended to lists, wherever in its containers they are."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_dp.parallel.data_parallel import Shards
from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.transfer import to_device

Path: TypeAlias = tuple[Any, ...]
PerSample: TypeAlias = dict[Path, bool]
"""Which lists are known to get one item per sample (True) or one per batch (False)."""

_OF_TORCH = frozenset(nn.Module().__dict__)


class AppendedLists:
    """Lists to which a step appends, the usual way to collect an epoch's outputs.

    Replica 0, which is the module, appends to the list itself, the others to copies; that holds
    for lists in dicts and in lists too, and for those that a step adds to them. Afterwards the
    k-th items of all replicas are gathered into the one item that one device would have appended.
    Where the replicas appended one item per sample, or different numbers of items, the items
    follow each other in shard order. A container that was changed in other ways stays as replica 0
    left it.

    Args:
        replicas: the replicas; containers are looked for among the attributes of all modules
            that are not torch's own.
        shards: the step's shards.
        output_device: where the items end up.
        args: what the step was called with besides its shard.
        per_sample: what earlier steps told about each list; shards of one sample tell nothing.
    """

    def __init__(
        self,
        replicas: Replicas,
        shards: Shards,
        output_device: torch.device,
        args: tuple[Any, ...],
        per_sample: PerSample,
    ) -> None:
        self._join = _Join(output_device, args, per_sample)
        self._sizes = shards.active_sizes
        modules = replicas.submodules
        self._watched = [
            _Watched(j, name, root.__dict__, [modules[k][j].__dict__ for k in shards.active])
            for j, root in enumerate(modules[0])
            if not type(root).__module__.startswith("torch.")
            for name, value in root.__dict__.items()
            if isinstance(value, list | dict) and name not in _OF_TORCH
        ]

    def collect(self) -> None:
        """Gives the module's lists the items that the replicas appended."""
        for watched in self._watched:
            after = watched.after()
            if after is not None:
                named = list(zip(self._sizes, after, strict=True))
                self._join.merge(watched.path, watched.before, named, watched.root())


class _Watched:
    """One attribute that is a container, on the root and on the active replicas."""

    def __init__(
        self, j: int, name: str, root: dict[str, Any], replicas: list[dict[str, Any]]
    ) -> None:
        self.path: Path = (j, name)
        self.before = _copied(root[name])
        self._name = name
        self._root = root
        self._replicas = replicas
        # A replica that refers to its own layers where the root refers to the root's: not ours.
        self._is_shared = all(other.get(name) is root[name] for other in replicas)
        for other in replicas:
            if self._is_shared and other is not root:
                other[name] = _copied(self.before)

    def after(self) -> list[Any] | None:
        """The replicas' containers; None if they are not what they were with something added."""
        after = [other.get(self._name) for other in self._replicas]
        extended = self._is_shared and all(_extends(other, self.before) for other in after)
        return after if extended and _extends(self.root(), self.before) else None

    def root(self) -> Any:
        return self._root.get(self._name)


class _Join:
    """Brings what the replicas added to their containers into the root's."""

    def __init__(
        self, output_device: torch.device, args: tuple[Any, ...], per_sample: PerSample
    ) -> None:
        self._output_device = output_device
        self._args = args
        self._per_sample = per_sample

    def merge(self, path: Path, before: Any, after: list[tuple[int, Any]], root: Any) -> None:
        """Extends `root`, given (samples, container) of each replica."""
        for key, item in before.items() if isinstance(before, dict) else enumerate(before):
            if isinstance(item, list | dict):
                inner = [(size, other[key]) for size, other in after]
                self.merge((*path, key), item, inner, root[key])
        if isinstance(before, list):
            tails = [(size, other[len(before) :]) for size, other in after]
            if any(tail for _, tail in tails):
                root[len(before) :] = self._appended(path, tails)
        else:
            self._add_keys(path, before, after, root)

    def _add_keys(
        self, path: Path, before: dict[Any, Any], after: list[tuple[int, Any]], root: dict[Any, Any]
    ) -> None:
        for key in dict.fromkeys(k for _, other in after for k in other if k not in before):
            values = [(size, other[key]) for size, other in after if key in other]
            if all(type(value) is list for _, value in values):
                root[key] = self._appended((*path, key), values)
            else:
                root.setdefault(key, to_device(values[0][1], self._output_device))

    def _appended(self, path: Path, tails: list[tuple[int, list[Any]]]) -> list[Any]:
        sizes = [size for size, _ in tails]
        counts = [len(tail) for _, tail in tails]
        if max(sizes) > 1:
            self._per_sample[path] = counts == sizes or len(set(counts)) > 1
        if self._per_sample.get(path, len(set(counts)) > 1):
            return [to_device(item, self._output_device) for _, tail in tails for item in tail]
        return [
            gather(list(items), self._output_device, sizes, constants=self._args)
            for items in zip(*(tail for _, tail in tails), strict=True)
        ]


def _copied(node: Any) -> Any:
    """Containers anew, with the same items."""
    if isinstance(node, dict):
        clone = copy.copy(node)
        clone.update({key: _copied(item) for key, item in node.items()})
        return clone
    return [_copied(item) for item in node] if type(node) is list else node


def _extends(after: Any, before: Any) -> bool:
    """Whether `after` is `before` with something added, and nothing else changed."""
    if isinstance(before, dict):
        keys = isinstance(after, dict) and before.keys() <= after.keys()
        return keys and all(_extends(after[key], item) for key, item in before.items())
    if type(before) is list:
        longer = isinstance(after, list) and len(after) >= len(before)
        return longer and all(map(_extends, after, before))
    return after is before
