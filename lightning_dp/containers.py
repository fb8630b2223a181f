"""Containers on `self` that a step changes: what it does on all replicas becomes the module's."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.shards import Shards
from lightning_dp.parallel.split import Order, batch_order
from lightning_dp.parallel.transfer import to_device

Path: TypeAlias = tuple[Any, ...]
CONTAINERS = (list, dict, deque)
_ABSENT = object()


def copied(node: Any) -> Any:
    """Containers anew, those in them too, with the same items."""
    if isinstance(node, dict):
        clone = copy.copy(node)
        clone.update({key: copied(item) for key, item in node.items()})
        return clone
    if type(node) is deque:
        return deque(map(copied, node), node.maxlen)
    return [copied(item) for item in node] if type(node) is list else node


def refill(container: Any, items: Any) -> None:
    """Gives a container, and those in it, the items back that it had when these were copied."""
    if container is items:
        return
    keys = list(items) if isinstance(items, dict) else range(len(items))
    kept = {key: items[key] for key in keys}
    for key, item in kept.items():
        here = key in container if isinstance(container, dict) else key < len(container)
        now = container[key] if here else None
        if isinstance(item, CONTAINERS) and type(now) is type(item):
            refill(now, item)
            kept[key] = now
    container.clear()
    container.update(kept) if isinstance(container, dict) else container.extend(kept.values())


class ContainerJoin:
    """Brings what the replicas did to their copies of a container into the module's own.

    The k-th new items of all replicas are gathered into the one item that one device would have
    appended. Where the replicas appended one item per sample, or different numbers of items, the
    items follow each other in shard order. Values under new keys of a dict are gathered. Items that
    went from the front of a list or deque go. Entries that were changed get the value of the first
    replica that worked.

    Args:
        output_device: where the items end up.
        args: what the step was called with besides its shard.
        shards: the step's shards.
        per_sample: carried from step to step: which containers get one item per sample (True) or
            per batch (False); shards of one sample cannot tell.
        agree: whether two replicas' values are the same.

    Attributes:
        differs: whether replicas have changed an entry to different values.
    """

    def __init__(
        self,
        output_device: torch.device,
        args: tuple[Any, ...],
        shards: Shards,
        per_sample: dict[Path, bool],
        agree: Callable[[Any, Any], bool],
    ) -> None:
        self.differs = False
        self._output_device = output_device
        self._args = args
        self._sizes = shards.active_sizes
        self._order = shards.active_order
        self._per_sample = per_sample
        self._agree = agree

    def merge(self, path: Path, before: Any, after: Sequence[Any], own: Any) -> None:
        """Does to the module's own container what was done to the replicas'.

        Args:
            path: where it is, for `per_sample`.
            before: what was in it before the step.
            after: the replicas' after the step; the root's, if it worked, is the module's own.
            own: the module's own.
        """
        if any(type(other) is not type(before) for other in (*after, own)):
            return
        if isinstance(before, dict):
            self._merge_dicts(path, before, after, own)
        elif any(_has_other_entries(before, other) for other in after):
            for i, item in enumerate(before):
                self._merge_entry((*path, i), item, [other[i] for other in after], own, i)
        else:
            self._merge_items(path, before, after, own)

    def _merge_items(self, path: Path, before: Any, after: Sequence[Any], own: Any) -> None:
        gone = [_gone(before, other) for other in after]
        count = len(before) - gone[0]  # of items that stay
        kept = list(own)[:count] if own is after[0] else list(own)[gone[0] :]
        for i, item in enumerate(kept):
            if isinstance(item, CONTAINERS):
                others = [other[i] for other in after]
                self.merge((*path, i), before[gone[0] + i], others, item)
        tails = [list(other)[len(before) - n :] for other, n in zip(after, gone, strict=True)]
        if any(tails) or gone[0]:
            new = self._appended(path, tails, self._sizes, self._order, _overflown(before, tails))
            own.clear()
            own.extend([*kept, *new])

    def _merge_dicts(
        self, path: Path, before: dict[Any, Any], after: Sequence[Any], own: dict[Any, Any]
    ) -> None:
        for key, item in before.items():
            values = [other.get(key, _ABSENT) for other in after]
            self._merge_entry((*path, key), item, values, own, key)
        for key in dict.fromkeys(k for other in after for k in other if k not in before):
            present = [i for i, other in enumerate(after) if key in other]
            values = [after[i][key] for i in present]
            sizes = [self._sizes[i] for i in present]
            order = None if self._order is None else [self._order[i] for i in present]
            if all(type(value) is list for value in values):
                own[key] = self._appended((*path, key), values, sizes, order)
            else:
                own[key] = self._gathered(values, sizes, order)

    def _merge_entry(
        self, path: Path, item: Any, values: Sequence[Any], own: Any, key: Any
    ) -> None:
        if isinstance(item, CONTAINERS):
            self.merge(path, item, values, own.get(key) if isinstance(own, dict) else own[key])
        elif any(value is not item for value in values):
            self.differs |= any(not self._agree(values[0], other) for other in values[1:])
            if values[0] is _ABSENT:
                own.pop(key, None)
            else:
                own[key] = values[0]

    def _gathered(self, values: list[Any], sizes: list[int], order: Order | None) -> Any:
        device, args = self._output_device, self._args
        return gather(values, device, sizes=sizes, constants=args, order=order)

    def _appended(
        self,
        path: Path,
        tails: list[list[Any]],
        sizes: list[int],
        order: Order | None,
        in_turn: bool = False,
    ) -> list[Any]:
        """The items that one device would have appended; in turn, if they are surely samples'."""
        counts = [len(tail) for tail in tails]
        known = self._per_sample
        if max(sizes) > 1 and any(counts):
            known[path] = counts == sizes or len(set(counts)) > 1
        if in_turn or known.get(path, len(set(counts)) > 1 or _are_labels(tails)):
            appended = [to_device(item, self._output_device) for tail in tails for item in tail]
            places = None if order is None or counts != sizes else batch_order(order)
            return appended if places is None else [appended[i] for i in places]
        return [self._gathered(list(items), sizes, order) for items in zip(*tails, strict=True)]


def _has_other_entries(before: Any, after: Any) -> bool:
    """Whether a list has the length that it had, and other items in some of its places."""
    if len(before) != len(after) or all(map(is_, before, after)):
        return False
    same = list(map(_is_same, before, after))
    return any(same) and not all(same) and _gone(before, after) == len(before)


def _gone(before: Any, after: Any) -> int:
    """How many items have gone from the front; with the others `after` begins."""
    if len(before) <= len(after) and all(map(is_, before, after)):
        return 0
    items, new = list(before), list(after)
    for n in range(len(items) if new else 0):
        fits = len(items) - n <= len(new) and _is_same(items[n], new[0])
        if fits and all(map(_is_same, items[n:], new)):
            return n
    return len(items)


def _overflown(before: Any, tails: Sequence[list[Any]]) -> bool:
    """Whether a deque got more items in one step than it holds: these were one per sample."""
    limit = before.maxlen if isinstance(before, deque) else None
    return limit is not None and limit > 1 and all(len(tail) == limit for tail in tails)


def _is_same(before: Any, after: Any) -> bool:
    """Whether it is the same item; of a container in a container there are copies."""
    return before is after or (isinstance(before, CONTAINERS) and type(before) is type(after))


def _are_labels(tails: Sequence[list[Any]]) -> bool:
    """Integers and strings of shards of one sample: each belongs to its sample."""
    return all(isinstance(item, int | str) for tail in tails for item in tail)
