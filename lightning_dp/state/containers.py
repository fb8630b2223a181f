"""What steps do to containers on `self`: the replicas' copies become what one device would have."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import ne
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.gather import add_up, gather
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together, tree
from lightning_dp.parallel.split import batch_order
from lightning_dp.state.items import (
    copied,
    has,
    has_other_entries,
    is_container,
    is_for_counting,
    is_reordered,
    overflows,
    places_of_containers,
    survivors,
)

Path: TypeAlias = tuple[Any, ...]
Doubt: TypeAlias = tuple[Path, str]
"""Where, and what of it self has that one device may not have."""

DIFFERENT = (
    "A step binds {} to different values on different replicas; self keeps the first replica's. "
    "Bind a recurrent state to an attribute of its own: then every replica goes on from its own."
)
REORDERED = (
    "A step sorts {}, or puts items before those that were there; self keeps the first replica's."
)

_ABSENT = object()


class Merge:
    """Brings what the replicas did to their containers into the root's.

    The k-th new items of all replicas' lists are gathered into the one item that one device would
    have appended. Where they appended one item per sample, or different numbers of items, the items
    follow each other in shard order. Items that went from the front of a list or deque go. Values
    under new keys of a dict are gathered; an entry that only some replicas have written is theirs,
    that of the last samples; counts are added up. Tuples and containers in containers are entered.

    Which of the two it is follows from the shards' sizes: as many items as samples are of samples.
    """

    def __init__(self, output_device: torch.device, shards: Shards) -> None:
        self._output_device = output_device
        self._sizes = shards.active_sizes
        self._order = shards.active_order
        self._row_rules = shards.row_rules
        self._by_label: set[Path] = set()  # lists of which replicas appended differently many

    def _of(self, present: list[int]) -> Merge:
        """The same for some of the replicas."""
        part = copy.copy(self)
        part._sizes = [self._sizes[i] for i in present]
        part._order = None if self._order is None else [self._order[i] for i in present]
        return part

    def into(
        self, path: Path, before: Any, after: list[Any], root: Any, *, is_new: bool = False
    ) -> Iterator[Doubt]:
        """Makes `root` of what it was `before` and is `after` the step on every replica.

        If it is new, the step has bound another one: it has not written to entries of the old one.

        Yields:
            The paths of what may not be one device's, and why: entries that all replicas have
            written, with different values, of which the first one's stays, say.
        """
        if any(type(other) is not type(before) for other in [*after, root]):
            yield path, DIFFERENT
            return
        if isinstance(before, tuple):
            yield from self._entries(path, before, after, root, range(len(before)))
        elif isinstance(before, dict):
            yield from self._into_dict(path, before, after, root)
        else:
            writes = not is_new and any(map(partial(has_other_entries, before), after))
            if writes and len({len(before), *map(len, after)}) == 1:
                yield from self._entries(path, before, after, root, range(len(before)))
            else:
                yield from self._into_list(path, before, after, root, is_new)

    def _into_list(
        self, path: Path, before: Any, after: list[Any], root: Any, is_new: bool
    ) -> Iterator[Doubt]:
        kept = [survivors(before, other) for other in after]
        tails = [list(other)[len(places) :] for other, places in zip(after, kept, strict=True)]
        if any(map(partial(is_reordered, before), kept, tails)):
            yield from self._reordered(path, after, root)
            return
        stay, of_root = kept[0], root
        if any(map(ne, map(len, kept), repeat(len(before)))):  # in most steps all stay
            stay = sorted(set(kept[0]).intersection(*kept))
            of_root = dict(zip(kept[0], root, strict=False)) if root is after[0] else root
        for i in places_of_containers(before):
            if i in stay:
                others = [other[own.index(i)] for other, own in zip(after, kept, strict=True)]
                yield from self.into((*path, i), before[i], others, of_root[i])
        if any(tails) or len(stay) < len(before):
            new = self._appended(
                path, tails, in_turn=overflows(before, tails) or path in self._by_label
            )
            items = [*map(of_root.__getitem__, stay), *new]
            limit = len(after[0]) if self._slides(path, before, kept, after) else len(items)
            root.clear()
            root.extend(items[-limit:] if limit else [])

    def _slides(self, path: Path, before: Any, kept: list[Sequence[int]], after: list[Any]) -> bool:
        """Whether each replica took items from the front, to keep no more than a certain number."""
        taken = [len(before) - len(places) for places in kept]
        are_first = [list(range(n, len(before))) for n in taken] == list(map(list, kept))
        if not all(taken) or not are_first or not any(after):
            return False
        are_longer = add_up(list(map(len, after)), self._sizes)
        return any(kept) if are_longer is None else not are_longer

    def _reordered(self, path: Path, after: list[Any], root: Any) -> Iterator[Doubt]:
        if root is not after[0]:
            items = to_device(list(after[0]), self._output_device)
            root.clear()
            root.extend(items)
        if not all(agree(after[0], other) for other in after):
            yield (path, REORDERED)

    def _entries(
        self, path: Path, before: Any, after: list[Any], root: Any, keys: Iterator[Any] | range
    ) -> Iterator[Doubt]:
        """Entries that were there before the step."""
        for key in keys:
            old = before[key]
            values = [other[key] if has(other, key) else _ABSENT for other in after]
            if is_container(old):
                now = root[key] if has(root, key) else None
                yield from self.into((*path, key), old, values, now)
            elif not all(value is old for value in values):
                yield from self._entry((*path, key), old, values, root)

    def _entry(self, path: Path, old: Any, values: list[Any], root: Any) -> Iterator[Doubt]:
        written = [value for value in values if value is not old]
        by_all = len(written) == len(values)
        new = written[0] if by_all else written[-1]
        if new is _ABSENT:
            root.pop(path[-1], None)
        else:
            root[path[-1]] = to_device(new, self._output_device)
        if by_all and not all(agree(new, value) for value in written):
            yield (path, DIFFERENT)

    def _into_dict(
        self, path: Path, before: dict[Any, Any], after: list[dict[Any, Any]], root: dict[Any, Any]
    ) -> Iterator[Doubt]:
        if is_for_counting(before):
            self._count(path, before, after, root)
            return
        self._look_for_labels(path, after)
        yield from self._entries(path, before, after, root, iter(before))
        for key in dict.fromkeys(k for other in after for k in other if k not in before):
            present = [i for i, other in enumerate(after) if key in other]
            values = [after[i][key] for i in present]
            if all(type(value) is list for value in values):
                own = (*path, key)
                in_turn = own in self._by_label
                root[key] = self._of(present)._appended(own, values, in_turn=in_turn)
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
            if differing:
                self._by_label.update((*path, key) for key in keys)

    def _are_of_samples(self, path: Path, numbers: list[int], may_be: bool = True) -> bool:
        """Whether as many new items of every replica belong to samples, and not to the batch."""
        known = add_up(numbers, self._sizes)
        if known is False and numbers[0] > 1:
            self._row_rules.warn_once(
                path,
                f"{self._named(path)}: {numbers[0]} more on every replica, for shards of "
                f"{list(self._sizes)} samples, are taken for as many of the batch. If they are of "
                "some samples only, which are as many by chance, say of which: with an item or a "
                "row for each sample, or in a dict by sample.",
            )
        if known is None and max(self._sizes) == 1:  # one item of a sample, or of the batch
            known = self._row_rules.of_samples.get(path)
            if known is None and not may_be:
                self._row_rules.warn_once(
                    path,
                    f"{self._named(path)}: one more on every replica, each of one sample, is taken "
                    "for one of the batch, not one per sample. Batches of more samples would tell.",
                )
            return may_be and numbers == self._sizes if known is None else known
        known = numbers == self._sizes if known is None else known
        self._row_rules.of_samples[path] = known
        return known

    @staticmethod
    def _named(path: Path) -> str:
        return tree.name((tree.Attribute(path[1]), *path[2:]), "self")

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


def agree(a: Any, b: Any) -> bool:
    """Whether two replicas have equal values, each on its device."""
    of_a, of_b = tree.leaves(a), tree.leaves(b)
    return len(of_a) == len(of_b) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in zip(of_a, of_b, strict=True)
    )
