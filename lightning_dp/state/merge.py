"""Lists, deques and dicts on `self`: what the replicas did to them becomes what one device does.

[Note: the rule for lists]
Items at the end of a list or deque that were not there before the step are new. If a replica has as
many new items as samples, or replicas have different numbers of them, they belong to samples, and
follow each other in shard order. Else the k-th new items of all replicas are joined into one, as
outputs are. Items that are gone from the front go; a list that every replica has cut to one length
keeps that length. In dicts, values under new keys are joined; numbers in a `Counter` or a
`defaultdict` of numbers are added up, if they count samples. An entry that only some replicas have
written is theirs. Everything else (entries that all replicas have written, a list of the same
length with other items, a list that was sorted) keeps the first replica's value, and a warning
names it once if the replicas differ.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together, tree
from lightning_dp.parallel.split import batch_order

Path: TypeAlias = tuple[Any, ...]

_INTERNED = (bool, int, str, type(None))
"""Of these, two items may be one object."""

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
    if isinstance(node, dict):
        clone = copy.copy(node)
        for key, item in node.items():
            clone[key] = copied(item)
        return clone
    if type(node) is deque:
        return deque(map(copied, node), node.maxlen)
    if type(node) is list or (type(node) is tuple and is_container(node)):
        return type(node)(map(copied, node))
    return node


def refill(container: Any, items: Any) -> None:
    """Gives a container, and those in it, the items back that it had when these were copied."""
    keys = list(items) if isinstance(items, dict) else range(len(items))
    kept = {key: items[key] for key in keys}
    for key, item in kept.items():
        now = container[key] if _has(container, key) else None
        if is_container(item) and type(now) is type(item):
            refill(now, item)
            kept[key] = now
    if isinstance(container, dict):
        container.clear()
        container.update(kept)
    elif not isinstance(container, tuple):
        container.clear()
        container.extend(kept.values())


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
    """What shows the items of a container, and of those in it, whenever it is looked at."""
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


def agree(a: Any, b: Any) -> bool:
    """Whether two replicas have equal values, each on its device."""
    of_a, of_b = tree.leaves(a), tree.leaves(b)
    return len(of_a) == len(of_b) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in zip(of_a, of_b, strict=True)
    )


class Merge:
    """Brings what the replicas did to their containers into the root's, see the note above."""

    def __init__(self, output_device: torch.device, shards: Shards) -> None:
        self._output_device = output_device
        self._sizes = shards.active_sizes
        self._order = shards.active_order
        self._row_rules = shards.row_rules
        self._by_class: set[Path] = set()  # lists of samples, in a dict by class
        self._done: set[int] = set()  # ids of the root's: one container may have several names

    def into(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        """Makes `root` of what it was `before` and is `after` the step on every replica.

        The root is the container of the first replica, or one that the step has not changed.

        Yields:
            The paths of what keeps the first replica's value, where the replicas differ.
        """
        if id(root) in self._done:
            return
        self._done.add(id(root))
        if any(type(other) is not type(before) for other in [*after, root]):
            yield path
        elif isinstance(before, tuple):
            yield from self._entries(path, before, after, root, range(len(before)))
        elif not isinstance(before, dict):
            yield from self._into_list(path, before, after, root)
        elif _counts(before):
            self._count(path, before, after, root)
        else:
            yield from self._into_dict(path, before, after, root)

    def _of(self, present: list[int]) -> Merge:
        """The same for some of the replicas."""
        part = copy.copy(self)
        part._sizes = [self._sizes[i] for i in present]
        part._order = None if self._order is None else [self._order[i] for i in present]
        return part

    def _into_list(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        n = len(before)
        gone = [_gone(before, other) for other in after]  # from the front
        tails = [list(other)[n - d :] for other, d in zip(after, gone, strict=True)]
        has_length = type(before) is list and all(len(other) == n for other in after)
        if has_length and n in gone and n > 0:
            yield from self._entries(path, before, after, root, range(n))
            return
        if any(_has_old(list(before)[:d], tail) for d, tail in zip(gone, tails, strict=True)):
            first = to_device(list(after[0]), self._output_device)
            root.clear()
            root.extend(first)
            if not all(agree(after[0], other) for other in after):
                yield path
            return
        most, of_root = max(gone), gone[0] if root is after[0] else 0
        for i in range(most, n):
            if is_container(before[i]):
                others = [other[i - d] for other, d in zip(after, gone, strict=True)]
                yield from self.into((*path, i), before[i], others, root[i - of_root])
        if any(tails) or most:
            stay = list(root)[most - of_root : n - of_root]
            items = [*stay, *self._appended(path, tails, in_turn=_overflows(before, tails))]
            lengths = set(map(len, after))
            is_window = all(gone) and min(gone) < n and len(lengths) == 1
            root.clear()
            root.extend(items[-lengths.pop() :] if is_window else items)

    def _entries(
        self, path: Path, before: Any, after: list[Any], root: Any, keys: Iterable[Any]
    ) -> Iterator[Path]:
        """Entries that were there before the step."""
        for key in keys:
            old = before[key]
            values = [other[key] if _has(other, key) else _ABSENT for other in after]
            if is_container(old):
                now = root[key] if _has(root, key) else None
                yield from self.into((*path, key), old, values, now)
                continue
            written = [value for value in values if value is not old]
            if not written:
                continue
            by_all = len(written) == len(values)
            new = written[0] if by_all else written[-1]
            if new is _ABSENT:
                root.pop(key, None)
            else:
                root[key] = to_device(new, self._output_device)
            if by_all and not all(agree(new, value) for value in written):
                yield (*path, key)

    def _into_dict(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> Iterator[Path]:
        self._look_for_classes(path, after)
        yield from self._entries(path, before, after, root, before)
        for key in dict.fromkeys(k for other in after for k in other if k not in before):
            present = [i for i, other in enumerate(after) if key in other]
            values, part, own = [after[i][key] for i in present], self._of(present), (*path, key)
            if isinstance(values[0], list | dict | deque):
                empty = copied(values[0])
                empty.clear()
                root[key] = copied(empty)
                yield from part.into(own, empty, values, root[key])
            else:
                root[key] = part._gathered(own, values)

    def _look_for_classes(self, path: Path, after: list[dict[Any, Any]]) -> None:
        """Lists under integers, to which replicas append differently often, are of samples."""
        keys = {key for other in after for key in other}
        lists = [[other.get(key, []) for other in after] for key in keys]
        are_lists = all(isinstance(own, list) for row in lists for own in row)
        if are_lists and all(type(key) is int for key in keys):
            differ = any(len(set(map(len, row))) > 1 for row in lists)
            self._by_class.update((*path, key) for key in keys if differ)

    def _count(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> None:
        """Samples are counted by each replica, batches by all of them."""
        keys = dict.fromkeys(key for other in after for key in other)
        added = [{k: other[k] - before.get(k, 0) for k in keys if k in other} for other in after]
        totals = [sum(counts.values()) for counts in added]
        differ = any(counts != added[0] for counts in added)
        counted = added if differ or self._are_of_samples(path, totals, ()) else added[:1]
        for key in keys:
            root[key] = before.get(key, 0) + sum(counts.get(key, 0) for counts in counted)

    def _are_of_samples(self, path: Path, counts: list[int], items: Sequence[Any]) -> bool:
        """Whether as many new items of every replica belong to samples, and not to the batch."""
        if len(counts) == 1 or not any(counts):
            return any(counts)
        if counts != self._sizes or max(counts) > 1:
            are = len(set(counts)) > 1 or counts == self._sizes
            self._row_rules.of_samples[path] = are
            return are
        known = self._row_rules.of_samples.get(path)  # one item of a sample, or of the batch
        if known is not None or not items:
            return bool(known)
        if all(isinstance(item, int | str) for item in items):  # labels, which have no mean
            return True
        name = tree.name((tree.Attribute(path[1]), *path[2:]), "self")
        self._row_rules.warn_once(
            path,
            f"{name}: one more on every replica, each of one sample, is taken for one of the "
            "batch, not one per sample. Batches of more samples would tell.",
        )
        return False

    def _appended(self, path: Path, tails: list[list[Any]], *, in_turn: bool) -> list[Any]:
        """The items that one device would have appended."""
        counts, items = list(map(len, tails)), [item for tail in tails for item in tail]
        if not items:
            return []
        if in_turn := in_turn or path in self._by_class:
            self._row_rules.of_samples[path] = True
        if in_turn or self._are_of_samples(path, counts, items):
            appended = to_device_together(items, self._output_device)
            is_cut = self._order is not None and counts == self._sizes
            places = batch_order(self._order or ()) if is_cut else None
            return appended if places is None else [appended[i] for i in places]
        return [
            self._gathered(path, list(row), i) for i, row in enumerate(zip(*tails, strict=True))
        ]

    def _gathered(self, path: Path, values: list[Any], i: int = 0) -> Any:
        """What is new at a path, the i-th of several that are."""
        number, name, *keys = path
        return gather(
            values,
            self._output_device,
            sizes=self._sizes,
            order=self._order,
            row_rules=self._row_rules,
            where=("self", number, i),
            at=(tree.Attribute(name), *keys),
        )


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same; copied containers are, if they are of one type."""
    return a is b or (is_container(a) and type(a) is type(b))


def _gone(before: Any, after: Any) -> int:
    """How many of the old items are gone from the front of a list: the others stand there now.

    Example:
        >>> a, b, c, x = 0.1, 0.2, 0.3, 0.4
        >>> [_gone([a, b, c], after) for after in ([a, b, c, x], [c, x], [a, c, x], [x])]
        [0, 2, 3, 3]
    """
    if len(before) <= len(after) and all(map(is_, before, after)):
        return 0  # nearly always
    old, new = list(before), list(after)
    for n in range(len(old) if new else 0):
        fits = len(old) - n <= len(new) and _same(old[n], new[0])
        if fits and all(map(_same, old[n:], new)):
            return n
    return len(old)


def _has_old(gone: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether old items stand among the new ones: a list was sorted, or filtered."""
    ids = {id(item) for item in gone if not isinstance(item, _INTERNED)}
    return bool(ids) and any(id(item) in ids for item in new)


def _overflows(before: Any, tails: Sequence[list[Any]]) -> bool:
    """Whether a deque got as many items in one step as it holds: those are one per sample."""
    limit = before.maxlen if isinstance(before, deque) else None
    return limit is not None and limit > 1 and all(len(tail) == limit for tail in tails)


def _counts(node: dict[Any, Any]) -> bool:
    """Whether a dict is for counting: a `Counter`, or a `defaultdict` of numbers."""
    is_default = isinstance(node, defaultdict) and node.default_factory in (int, float)
    return isinstance(node, Counter) or is_default
