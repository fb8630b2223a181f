"""Items of containers: copied, given back, and which of them a list still has after a step."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from operator import is_
from typing import Any

_CONTAINERS = (list, dict, tuple, deque)
_INTERNED = (bool, int, str, type(None))
"""Of these, two items may be one object."""


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
    if container is items:
        return
    keys = list(items) if isinstance(items, dict) else range(len(items))
    kept = {key: items[key] for key in keys}
    for key, item in kept.items():
        now = container[key] if has(container, key) else None
        if is_container(item) and type(now) is type(item):
            refill(now, item)
            kept[key] = now
    if isinstance(container, dict):
        container.clear()
        container.update(kept)
    elif not isinstance(container, tuple):
        container.clear()
        container.extend(kept.values())


def has(container: Any, key: Any) -> bool:
    """Whether a container has an entry."""
    return key in container if isinstance(container, dict) else key < len(container)


def places_of_containers(items: Any) -> list[int]:
    """Where there are containers among the items.

    Example:
        >>> places_of_containers([0.5, [], (1, 2), ({},)])
        [1, 3]
    """
    kinds = {kind for kind in set(map(type, items)) if issubclass(kind, _CONTAINERS)}
    if not kinds:
        return []  # nearly always
    return [i for i, item in enumerate(items) if type(item) in kinds and is_container(item)]


def survivors(before: Any, after: Any) -> Sequence[int]:
    """The places of the old items with which a list begins now, in their old order.

    Example:
        >>> a, b, c, x = 0.1, 0.2, 0.3, 0.4
        >>> [list(survivors([a, b, c], after)) for after in ([a, b, c, x], [c, x], [a, c, x], [x])]
        [[0, 1, 2], [2], [0, 2], []]
    """
    if len(before) <= len(after) and all(map(is_, before, after)):
        return range(len(before))  # nearly always
    old, new = list(before), list(after)
    for n in range(len(old) if new else 0):
        fits = len(old) - n <= len(new) and _same(old[n], new[0])
        if fits and all(map(_same, old[n:], new)):
            return range(n, len(old))
    return _places(old, new)


def _places(old: list[Any], new: list[Any]) -> list[int]:
    """Of items that are themselves alone, and not just equal."""
    places: list[int] = []
    start = 0
    for item in new:
        found = () if isinstance(item, _INTERNED) else range(start, len(old))
        place = next((i for i in found if old[i] is item), None)
        if place is None:
            break
        places.append(place)
        start = place + 1
    return places


def has_other_entries(before: Any, after: Any) -> bool:
    """Whether a list has the length that it had, and other items in some of its places."""
    if len(before) != len(after) or all(map(is_, before, after)):
        return False
    same = list(map(_same, before, after))
    is_window = isinstance(kept := survivors(before, after), range) and len(kept) > 0
    return any(same) and not all(same) and not is_window


def is_reordered(before: Any, places: Sequence[int], new: Sequence[Any]) -> bool:
    """Whether old items stand among the new ones: a list was sorted, or something put into it.

    Example:
        >>> a, b, x = 0.1, 0.2, 0.3
        >>> is_reordered([a, b], [0], [x, b]), is_reordered([a, b], [0], [x])
        (True, False)
    """
    if len(places) == len(before):
        return False  # nearly always
    kept = set(places)
    gone = {id(x) for i, x in enumerate(before) if i not in kept and not isinstance(x, _INTERNED)}
    return any(id(item) in gone for item in new)


def overflows(before: Any, tails: Sequence[list[Any]]) -> bool:
    """Whether a deque got as many items in one step as it holds: those are one per sample."""
    limit = before.maxlen if isinstance(before, deque) else None
    return limit is not None and limit > 1 and all(len(tail) == limit for tail in tails)


def is_for_counting(node: dict[Any, Any]) -> bool:
    """Whether a dict is for counting: a `Counter`, or a `defaultdict` of numbers."""
    is_default = isinstance(node, defaultdict) and node.default_factory in (int, float)
    return isinstance(node, Counter) or is_default


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same; copied containers are, if they are of one type."""
    return a is b or (is_container(a) and type(a) is type(b))
