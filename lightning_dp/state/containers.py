"""What steps do to containers on `self`: the replicas' copies become what one device would have."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.batch import Shards, gather, to_device, to_device_together, tree
from lightning_dp.parallel.split import batch_order

Path: TypeAlias = tuple[Any, ...]

_ABSENT = object()


class Merge:
    """Brings what the replicas did to their containers into the root's.

    The k-th new items of all replicas' lists are gathered into the one item that one device would
    have appended. Where they appended one item per sample, or different numbers of items, the items
    follow each other in shard order. Items that went from the front of a list or deque go. Values
    under new keys of a dict are gathered; an entry that only some replicas have written is theirs,
    that of the last samples; counts are added up. Tuples and containers in containers are entered.

    Which of the two it is, shards of unequal sizes tell, see `StepDims`.
    """

    def __init__(self, output_device: torch.device, shards: Shards) -> None:
        self._output_device = output_device
        self._sizes = shards.active_sizes
        self._order = shards.active_order
        self._dims = shards.dims

    def _of(self, present: list[int]) -> Merge:
        """The same for some of the replicas."""
        part = copy.copy(self)
        part._sizes = [self._sizes[i] for i in present]
        part._order = None if self._order is None else [self._order[i] for i in present]
        return part

    def into(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        """Makes `root` of what it was `before` and is `after` the step on every replica.

        Yields:
            The paths of entries that all replicas have written, with different values: the
            first one's stays.
        """
        if any(type(other) is not type(before) for other in [*after, root]):
            return
        if isinstance(before, tuple):
            yield from self._entries(path, before, after, root, range(len(before)))
        elif isinstance(before, dict):
            yield from self._into_dict(path, before, after, root)
        else:
            yield from self._into_list(path, before, after, root)

    def _into_list(self, path: Path, before: Any, after: list[Any], root: Any) -> Iterator[Path]:
        if any(_has_other_entries(before, other) for other in after):
            yield from self._entries(path, before, after, root, range(len(before)))
            return
        gone = [_gone(before, other) for other in after]
        count = len(before) - gone[0]  # of items that stay
        kept = list(root)[:count] if root is after[0] else list(root)[gone[0] :]
        for i, item in enumerate(kept):
            if is_container(item):
                others = [other[i] for other in after]
                yield from self.into((*path, i), before[gone[0] + i], others, item)
        tails = [list(other)[len(before) - n :] for other, n in zip(after, gone, strict=True)]
        if any(tails) or gone[0]:
            in_turn = _overflows(before, tails)
            new = self._appended(path, tails, in_turn=in_turn)
            root.clear()
            root.extend([*kept, *new])

    def _entries(
        self, path: Path, before: Any, after: list[Any], root: Any, keys: Iterator[Any] | range
    ) -> Iterator[Path]:
        """Entries that were there before the step."""
        for key in keys:
            old = before[key]
            values = [other[key] if _has(other, key) else _ABSENT for other in after]
            if is_container(old):
                now = root[key] if _has(root, key) else None
                yield from self.into((*path, key), old, values, now)
            elif not all(value is old for value in values):
                yield from self._entry((*path, key), old, values, root)

    def _entry(self, path: Path, old: Any, values: list[Any], root: Any) -> Iterator[Path]:
        written = [value for value in values if value is not old]
        by_all = len(written) == len(values)
        new = written[0] if by_all else written[-1]
        if new is _ABSENT:
            root.pop(path[-1], None)
        else:
            root[path[-1]] = to_device(new, self._output_device)
        if by_all and not all(agree(new, value) for value in written):
            yield path

    def _into_dict(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> Iterator[Path]:
        if _counts(before):
            self._count(path, before, after, root)
            return
        self._look_for_labels(path, after)
        yield from self._entries(path, before, after, root, iter(before))
        for key in dict.fromkeys(k for other in after for k in other if k not in before):
            present = [i for i, other in enumerate(after) if key in other]
            values = [after[i][key] for i in present]
            if all(type(value) is list for value in values):
                root[key] = self._of(present)._appended((*path, key), values)
            elif len(values) == len(after) and isinstance(values[0], defaultdict | Counter):
                empty = copied(values[0])
                empty.clear()
                root[key] = copied(empty)
                yield from self.into((*path, key), empty, values, root[key])
            else:
                root[key] = self._of(present)._gathered((*path, key), values)

    def _count(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> None:
        """Samples are counted by each replica, batches by all of them."""
        keys = dict.fromkeys(key for other in after for key in other)
        added = [{k: other[k] - before.get(k, 0) for k in keys if k in other} for other in after]
        totals = [sum(counts.values()) for counts in added]
        differ = any(counts != added[0] for counts in added)
        counts = differ or (any(totals) and self._are_of_samples(path, totals))
        # Of batches, one replica's count is right; the root's own, where it had no samples, is not.
        counted = added if counts else added[:1]
        for key in keys:
            root[key] = before.get(key, 0) + sum(counts.get(key, 0) for counts in counted)

    def _look_for_labels(self, path: Path, after: list[dict[Any, Any]]) -> None:
        """Lists under integers, to which replicas append differently often, are of samples."""
        keys = {key for other in after for key in other}
        lists = [other.get(key, []) for key in keys for other in after]
        if all(type(key) is int for key in keys) and all(isinstance(x, list) for x in lists):
            lengths = [[len(other.get(key, ())) for other in after] for key in keys]
            differing = next((row for row in lengths if len(set(row)) > 1), None)
            for key in keys if differing else ():
                self._are_of_samples((*path, key), differing or [])

    def _are_of_samples(self, path: Path, numbers: list[int], may_be: bool = True) -> bool:
        """Whether as many new items of every replica belong to samples, and not to the batch."""
        known = self._dims.counts(path, numbers, self._sizes)
        if known is None and may_be and numbers == self._sizes:
            self._dims.say(
                path,
                f"{tree.name((tree.Attribute(path[1]), *path[2:]), 'self')}: {numbers[0]} more on "
                "every replica, as many as it has samples, are taken for one per sample. Shards of "
                "unequal sizes would tell.",
                quietly=set(self._sizes) == {1},
            )
            return True
        return bool(known)

    def _gathered(self, path: Path, values: list[Any], i: int = 0) -> Any:
        """What is new at a path, the i-th of several that are."""
        number, name, *keys = path
        return gather(
            values,
            self._output_device,
            sizes=self._sizes,
            order=self._order,
            dims=self._dims,
            where=("self", number, i),
            at=(tree.Attribute(name), *keys),
        )

    def _appended(self, path: Path, tails: list[list[Any]], *, in_turn: bool = False) -> list[Any]:
        """The items that one device would have appended; in turn, if they are surely samples'."""
        counts = [len(tail) for tail in tails]
        # Integers and strings of shards of one sample: each belongs to its sample.
        are_labels = all(isinstance(item, int | str) for tail in tails for item in tail)
        may_be = max(self._sizes) > 1 or are_labels
        if in_turn or (any(counts) and self._are_of_samples(path, counts, may_be)):
            items = [item for tail in tails for item in tail]
            appended = to_device_together(items, self._output_device)
            is_in_order = self._order is None or counts != self._sizes
            places = None if is_in_order else batch_order(self._order or ())
            return appended if places is None else [appended[i] for i in places]
        rows = enumerate(zip(*tails, strict=True))
        return [self._gathered(path, list(items), i) for i, items in rows]


def is_container(value: Any) -> bool:
    """Whether steps may put something into a value, or into what is in it."""
    if type(value) is tuple:
        return any(map(is_container, value))
    return isinstance(value, list | dict) or type(value) is deque


def agree(a: Any, b: Any) -> bool:
    """Whether two replicas have equal values, each on its device."""
    of_a, of_b = tree.leaves(a), tree.leaves(b)
    return len(of_a) == len(of_b) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in zip(of_a, of_b, strict=True)
    )


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
    if container is items:
        return
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


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _has_other_entries(before: Any, after: Any) -> bool:
    """Whether a list has the length that it had, and other items in some of its places."""
    if len(before) != len(after) or all(map(is_, before, after)):
        return False
    same = list(map(_same, before, after))
    return any(same) and not all(same) and _gone(before, after) == len(before)


def _gone(before: Any, after: Any) -> int:
    """How many items a step has taken from the front: with the others the list begins now.

    Example:
        >>> [_gone(list("ab"), list(after)) for after in ("abc", "bc", "c", "")]
        [0, 1, 2, 2]
    """
    if len(before) <= len(after) and all(map(is_, before, after)):
        return 0  # nearly always
    items, new = list(before), list(after)
    for n in range(len(items) if new else 0):
        fits = len(items) - n <= len(new) and _same(items[n], new[0])
        if fits and all(map(_same, items[n:], new)):
            return n
    return len(items)


def _overflows(before: Any, tails: Sequence[list[Any]]) -> bool:
    """Whether a deque got as many items in one step as it holds: those are one per sample."""
    limit = before.maxlen if isinstance(before, deque) else None
    return limit is not None and limit > 1 and all(len(tail) == limit for tail in tails)


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same; copied containers are, if they are of one type."""
    return a is b or (is_container(a) and type(a) is type(b))


def _counts(node: dict[Any, Any]) -> bool:
    """Whether a dict is for counting: a `Counter`, or a `defaultdict` of numbers."""
    is_default = isinstance(node, defaultdict) and node.default_factory in (int, float)
    return isinstance(node, Counter) or is_default
