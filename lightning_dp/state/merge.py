"""Lists, deques and dicts on `self`: what the replicas did to them becomes what one device does.

[Note: the rule for state]
1. Items that a step appends to a list or deque are joined. Where every replica has appended as many
   as it has samples, or replicas have appended different numbers, they belong to samples and follow
   each other in shard order; else the k-th new items of all replicas are joined as outputs are.
2. Whatever else a step binds, an attribute or an entry of a list or dict, keeps the value of the
   first replica that has bound it, and is named once if the replicas differ.

The first rule also holds for lists in lists, tuples and dicts, and for a list under a new key of a
dict. A deque with a longest length lets its oldest items go. A list that is bound anew, or changed
in another way than by appending, falls under the second rule.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.gather import Join
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together, tree
from lightning_dp.parallel.split import batch_order

Path: TypeAlias = tuple[Any, ...]
"""The number of a module, the name of an attribute, and the keys that lead into it."""

_ABSENT = object()


def is_container(value: Any) -> bool:
    """Whether steps may put something into a value, or into what is in it."""
    if type(value) is tuple:
        return any(map(is_container, value))
    return isinstance(value, list | dict) or type(value) is deque


def copied(node: Any) -> Any:
    """Containers anew, with the same items.

    Example:
        >>> before = ([1], deque([2], maxlen=3))
        >>> after = copied(before)
        >>> after, after[0] is before[0]
        (([1], deque([2], maxlen=3)), False)
    """
    if not is_container(node):
        return node
    if isinstance(node, tuple):
        return tuple(map(copied, node))
    clone = copy.copy(node)
    for key, item in list(_entries(clone)):
        if is_container(item):
            clone[key] = copied(item)
    return clone


def refill(container: Any, items: Any) -> None:
    """Gives a container, and those in it, the items back that it had when these were copied."""
    now = dict(_entries(container))
    kept = dict(_entries(items))
    for key, item in kept.items():
        own = now.get(key)
        if is_container(item) and type(own) is type(item):
            refill(own, item)
            kept[key] = own
    if isinstance(container, dict):
        container.clear()
        container.update(kept)
    elif not isinstance(container, tuple):
        container.clear()
        container.extend(kept.values())


def have_same_items(node: Any, other: Any) -> bool:
    """Whether a copy of a container has the same items, and copies of the containers in it."""
    if node is other or not is_container(node):
        return node is other
    if type(node) is not type(other) or len(node) != len(other):
        return False
    if isinstance(node, dict):
        return node.keys() == other.keys() and all(
            have_same_items(item, other[key]) for key, item in node.items()
        )
    return all(map(is_, node, other)) or all(map(have_same_items, node, other))


def agree(a: Any, b: Any) -> bool:
    """Whether two replicas have equal values, each on its device."""
    of_a, of_b = tree.leaves(a), tree.leaves(b)
    return len(of_a) == len(of_b) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in zip(of_a, of_b, strict=True)
    )


class Merge:
    """Brings what the replicas did to their containers into the root's, see the note above.

    Args:
        output_device: where items end up.
    """

    def __init__(self, output_device: torch.device) -> None:
        self._output_device = output_device
        self._of_samples: dict[Path, bool] = {}  # of each list, in the latest batch that decided it
        self._differed: set[Path] = set()  # lists to which replicas appended different numbers

    def start(self, shards: Shards) -> None:
        """A step with these shards has ended."""
        self._sizes, self._order = shards.active_sizes, shards.active_order
        self._row_rules = shards.row_rules
        self._done: set[int] = set()  # ids of the root's: one container may have several names

    def into(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        """Makes `root` of what it was `before` and is `after` the step on every replica.

        The root is the container of the first replica, or one that the step has not changed.

        Yields:
            The paths of what keeps the first value, where the replicas differ.
        """
        if id(root) in self._done:
            return
        self._done.add(id(root))
        if isinstance(before, list | deque):
            yield from self._list(path, before, after, root)
        elif isinstance(before, tuple):
            for i, old in enumerate(before):
                if is_container(old):
                    yield from self.into((*path, i), old, [own[i] for own in after], root[i])
        else:
            for key in dict.fromkeys(key for own in (before, *after) for key in own):
                yield from self._entry((*path, key), key, before, after, root)

    def _entry(
        self, path: Path, key: Any, before: Any, after: list[Any], root: dict[Any, Any]
    ) -> Iterator[Path]:
        """An entry of a dict."""
        old, values = before.get(key, _ABSENT), [own.get(key, _ABSENT) for own in after]
        written = [value for value in values if value is not old]
        if not written:
            return
        first = written[0]
        if old is _ABSENT and isinstance(first, list | dict | deque):  # it was begun in this step
            old = copy.copy(first)
            old.clear()
            values = [copy.copy(old) if value is _ABSENT else value for value in values]
            root.setdefault(key, copy.copy(old))
        if is_container(old) and all(type(value) is type(old) for value in [*values, root[key]]):
            yield from self.into(path, old, values, root[key])
            return
        if first is _ABSENT:
            root.pop(key, None)
        else:
            root[key] = to_device(first, self._output_device)
        if not all(agree(first, value) for value in written):
            yield path

    def _list(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        gone = [_dropped(before, own) for own in after]
        kept = [len(before) - n for n in gone]
        if not all(_ends_with(before, n, own) for n, own in zip(kept, after, strict=True)):
            first = to_device(list(after[0]), self._output_device)
            root.clear()
            root.extend(first)
            if not all(agree(after[0], own) for own in after):
                yield path
            return
        if not any(gone):
            for i, old in enumerate(before):
                if is_container(old):
                    yield from self.into((*path, i), old, [own[i] for own in after], root[i])
        tails = [list(islice(own, n, None)) for n, own in zip(kept, after, strict=True)]
        if any(tails):
            if root is after[0]:
                for _ in tails[0]:
                    root.pop()
            root.extend(self._joined(path, tails, getattr(before, "maxlen", None)))

    def _joined(self, path: Path, tails: list[list[Any]], maxlen: int | None) -> list[Any]:
        """The items that one device would have appended."""
        counts, items = list(map(len, tails)), [item for tail in tails for item in tail]
        if self._are_of_samples(path, counts, items, maxlen):
            items = to_device_together(items, self._output_device)
            is_cut = self._order is not None and counts == self._sizes
            places = batch_order(self._order or ()) if is_cut else range(len(items))
            return [items[i] for i in places or ()]
        number, name, *keys = path
        join = Join(tuple(self._sizes), self._output_device, self._row_rules, order=self._order)
        path = (tree.Attribute(name), *keys)
        return [
            replace(join, where=("self", number, i)).gather(row, path)
            for i, row in enumerate(zip(*tails, strict=True))
        ]

    def _are_of_samples(
        self, path: Path, counts: list[int], items: list[Any], maxlen: int | None
    ) -> bool:
        """Whether new items belong to samples, and not to the batch."""
        if len(counts) == 1:
            return True
        if len(set(counts)) > 1:
            self._differed.add(path)
        if path in self._differed:
            return True
        if max(counts) > 1 or counts != self._sizes:
            is_full = max(counts) > 1 and set(counts) == {maxlen}
            self._of_samples[path] = is_full or counts == self._sizes
        if path in self._of_samples:
            return self._of_samples[path]
        if all(isinstance(item, int | str) for item in items):  # labels, which have no mean
            return True
        name = tree.name((tree.Attribute(path[1]), *path[2:]), "self")
        self._row_rules.warn_once(
            path,
            f"{name}: one more on every replica, each of one sample, is taken for one of the "
            "batch, not one per sample. Batches of more samples would tell.",
        )
        return False


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same; copied containers are, if they are of one type."""
    return a is b or (is_container(a) and type(a) is type(b))


def _ends_with(before: Any, n: int, after: Any) -> bool:
    """Whether a list begins with the last n items that it had before."""
    old = islice(before, len(before) - n, None)
    return len(after) >= n and all(map(_same, old, islice(after, n)))


def _dropped(before: Any, after: Any) -> int:
    """How many of its oldest items a deque with a longest length has let go.

    Example:
        >>> a, b, c, x = 0.1, 0.2, 0.3, 0.4
        >>> [_dropped(deque([a, b, c], 3), own) for own in ([a, b, c], [c, x, x], [x, x, x])]
        [0, 2, 3]
    """
    if getattr(before, "maxlen", None) is None:
        return 0
    return next(
        (gone for gone in range(len(before)) if _ends_with(before, len(before) - gone, after)),
        len(before),
    )
