"""Containers on a module, and the replicas' copies of them: whether a step has changed any."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from lightning_dp.parallel.replicate import Contents
from lightning_dp.state.items import copied, is_container, refill, survivors

Attributes: TypeAlias = dict[str, Any]


class CopiedContainer:
    """A container on a module: the root's own, and a copy for each other replica.

    Its place is the number of the module and the name of the attribute. It is busy if steps change
    it. `items` is what is in it, copied; `of_root` and `live` are the containers themselves and
    those in them, the root's and all replicas', as they are whenever they are looked at.
    """

    def __init__(self, value: Any, replicas: Sequence[Attributes], place: tuple[int, str]) -> None:
        self.value, self.place, self._replicas = value, place, replicas
        self.is_busy = self.collects = False
        self.copies = [attributes[place[1]] for attributes in replicas[1:]]
        self.renew()

    def renew(self) -> None:
        """Takes note of what the root has now."""
        self.items = copied(self.value)
        self.of_root = list(live(self.value))
        self.live = [*self.of_root, *chain.from_iterable(map(live, self.copies))]
        self._contents = Contents(self.live)

    def differs(self) -> bool:
        """Whether the root or a replica has other items than it had."""
        return self._contents.differ()

    def take_back(self) -> None:
        """Gives the root the container and the items that it had."""
        self._replicas[0][self.place[1]] = self.value
        refill(self.value, self.items)

    def bind(self, value: Any) -> None:
        """Has all replicas, those without samples too, refer to what the root has bound anew."""
        if value is not self.value:
            for attributes in self._replicas:
                attributes[self.place[1]] = value

    def of(self, active: Sequence[int]) -> list[Any]:
        """What the replicas that work have in its place."""
        return [self._replicas[k].get(self.place[1]) for k in active]

    def is_replaced(self, active: Sequence[int]) -> bool:
        """Whether a step has bound other values than containers that go on from it.

        Those that go on have some of its items, if there were any, or another number of them, be it
        on one replica: another one's samples may have driven all out.
        """
        own = [self.value, *self.copies]
        bound = [new for k, new in zip(active, self.of(active), strict=True) if new is not own[k]]
        if any(type(new) is not type(self.items) for new in bound):
            return True
        if not self.items:
            return False
        self.collects = self.collects or any(map(self._has_kept, bound))
        others = [new for new in bound if len(new) == len(self.items)]
        return len(others) == len(bound) > 0 and not self.collects

    def _has_kept(self, new: Any) -> bool:
        old = self.items
        if isinstance(new, tuple):
            return True  # containers, which are looked at for themselves
        if isinstance(new, dict):
            common = [key for key in old if key in new]
            return any(new[key] is old[key] or is_container(old[key]) for key in common)
        return len(survivors(old, new)) > 0 or any(a is b for a in old for b in new)


def have_same_items(node: Any, other: Any) -> bool:
    """Whether a copy of a container has the same items, and copies of the containers in it."""
    if not is_container(node):
        return node is other
    if type(node) is not type(other) or len(node) != len(other):
        return False
    if isinstance(node, dict):
        return node.keys() == other.keys() and all(
            have_same_items(item, other[key]) for key, item in node.items()
        )
    return all(map(have_same_items, node, other))


def live(node: Any) -> Iterator[Collection[Any]]:
    """What shows the items of a container, and of those in it, of all that a copy has anew."""
    if isinstance(node, dict):
        yield dict.keys(node)
        yield dict.values(node)
        node = dict.values(node)
    elif type(node) in (list, deque):
        yield node
    elif type(node) is not tuple:
        return
    for item in node:
        yield from live(item)
