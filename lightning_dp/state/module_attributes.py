"""The attributes of one module on all replicas: what a step binds, writes to and leaves there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_dp.parallel.scatter import tree
from lightning_dp.state.containers import agree
from lightning_dp.state.copied_containers import Attributes, CopiedContainer, have_same_items
from lightning_dp.state.items import is_container

_ABSENT = object()


class ModuleAttributes:
    """The attributes of one module, on the root and on all other replicas."""

    def __init__(
        self,
        number: int,
        replicas: list[Attributes],
        label: str,
        apart: frozenset[str],
    ) -> None:
        self.number = number
        self.apart = apart
        self.label = label  # in messages
        self.replicas = replicas
        self.root = replicas[0]
        self.containers: dict[str, CopiedContainer] = {}
        self.examine()

    def examine(self) -> None:
        """Looks at all attributes, and gives the replicas containers of their own."""
        self.bound = {n: v for n, v in self.root.items() if n not in self.apart}
        containers = {n: self._container(n, v) for n, v in self.bound.items() if is_container(v)}
        self.containers = {name: c for name, c in containers.items() if c is not None}
        self.tensors = [
            (replica, name, value)
            for replica in self.replicas[1:]
            for name, value in replica.items()
            if isinstance(value, Tensor) and not value.is_inference() and name not in self.apart
        ]

    def _container(self, name: str, value: Any) -> CopiedContainer | None:
        """None where a replica refers to its own layers, and the root to the root's."""
        if not all(have_same_items(value, replica.get(name)) for replica in self.replicas[1:]):
            return None
        new = CopiedContainer(value, self.replicas, (self.number, name))
        if (old := self.containers.get(name)) is not None:
            new.collects, new.is_busy = old.collects, old.is_busy
        return new

    def places(self) -> Iterator[tuple[ModuleAttributes, Attributes, str, Any]]:
        """Where replicas have something of their own: attributes, the name and the value."""
        for replica, name, value in self.tensors:
            yield self, replica, name, value
        for name, container in self.containers.items():
            for replica, own in zip(self.replicas[1:], container.copies, strict=True):
                yield self, replica, name, own

    def of(self, active: Sequence[int]) -> list[Attributes]:
        """Those of the replicas that work."""
        return [self.replicas[k] for k in active]

    def written(self, active: Sequence[int], tensors: set[int]) -> set[str]:
        """Tensors that the step wrote to in place: one that replicas share, or different copies."""
        first, *others = self.of(active)
        names = {name for _, name, value in self.tensors if id(value) in tensors}
        return {
            name
            for name in names
            if any(
                (value := replica.get(name)) is first.get(name) or not agree(first[name], value)
                for replica in others
            )
        }

    def containers_bound(self, first: int, before: Attributes) -> Iterator[CopiedContainer]:
        """Those in whose place the first replica has another one than it had."""
        own = self.replicas[first]
        for name, container in self.containers.items():
            if own.get(name) is not before.get(name):
                yield container

    def rebound(self, active: Sequence[int], before: Attributes) -> list[tuple[str, bool]]:
        """Attributes that the step bound anew, and whether the replicas disagree on them."""
        first, *others = self.of(active)
        rebound = [
            name
            for name, value in first.items()
            if value is not before.get(name, _ABSENT)
            and name not in self.apart
            and (name not in self.containers or self.containers[name].is_replaced(active))
            and not isinstance(value, nn.Module)
        ]
        if first is not self.root:
            rebound = [name for name in rebound if not callable(first[name])]
            self.root.update({name: first[name] for name in rebound})
        return [
            (name, any(not agree(first[name], replica.get(name)) for replica in others))
            for name in rebound
        ]

    def undo(self) -> None:
        """Gives the root what it had before the step."""
        for name in self.root.keys() - self.bound.keys() - self.apart:
            del self.root[name]
        self.root.update(self.bound)
        for container in self.containers.values():
            container.take_back()

    def holds_tensors(self, name: str, active: Sequence[int]) -> bool:
        """Whether every replica that worked has tensors there, on its own device."""
        return all(
            name in replica and any(isinstance(leaf, Tensor) for leaf in tree.leaves(replica[name]))
            for replica in self.of(active)
        )
