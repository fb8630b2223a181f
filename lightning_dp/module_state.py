"""What a step leaves on self: items in lists and dicts, and attributes that it binds anew.

[Note: the rule for state]
1. Items that a step appends to a list or deque are joined. Where every replica has appended as many
   as it has samples, or replicas have appended different numbers, they belong to samples and follow
   each other in shard order; else the k-th new items of all replicas are joined as outputs are.
2. Whatever else a step binds, an attribute or an entry of a list or dict, keeps the value of the
   first replica that has bound it, and is named once if the replicas differ.

The first rule also holds for lists in lists, tuples and dicts, and for a list that is a new
attribute or under a new key of a dict. A list that is changed in another way than by appending
falls under the second rule, as does a deque of a longest length that lets items go.

Every replica begins a step with its own containers, which hold the root's items. They are compared
with copies from before the step, item by item and by identity. What steps change inside other
objects is not looked at.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.lightning_private import running_hook
from lightning_dp.parallel.gather import Join
from lightning_dp.parallel.replicate import Contents, Replicas
from lightning_dp.parallel.scatter import Shards, to_device, to_device_together, tree
from lightning_dp.parallel.torch_private import hook_tables

Path: TypeAlias = tuple[Any, ...]
"""The number of a module, the name of an attribute, and the keys that lead into it."""

_ABSENT = object()
_OF_TORCH = frozenset(vars(nn.Module()))


def warn_of_step(module: nn.Module, text: str) -> None:
    """Warns at the file and line of the user's step, which is no longer on the stack."""
    hook: Any = getattr(type(module), running_hook(module) or "forward")
    code = getattr(inspect.unwrap(hook), "__code__", None)
    if code is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


class ModuleState:
    """The attributes of the user's modules, from `begin` before a step to `settle` after it.

    Modules that `skips` names are not looked at, nor are torch's own layers.
    """

    def __init__(self, output_device: torch.device, skips: Callable[[nn.Module], bool]) -> None:
        self._skips, self._merge = skips, Merge(output_device)
        self._warned: set[Path] = set()
        self._submodules: list[list[nn.Module]] = []
        self._watched: list[int] = []  # the numbers of modules
        self._modules: list[_Module] = []
        self._active: Sequence[int] = []
        self._seen = Contents([])  # of the modules' attributes, and of the containers in them

    def begin(self, replicas: Replicas, active: Sequence[int]) -> None:
        """Notes what the modules of all replicas, which have just followed the root, have."""
        if replicas.submodules is not self._submodules:
            self._submodules, self._active = replicas.submodules, []
            root = enumerate(replicas.submodules[0])
            self._watched = [n for n, m in root if _is_watched(m) and not self._skips(m)]
        if active != self._active or self._seen.differ():
            self._active = active
            columns = [[vars(own[n]) for own in self._submodules] for n in self._watched]
            self._modules = [_Module(own[0], [own[k] for k in active]) for own in columns]
            self._seen = Contents([view for module in self._modules for view in module.views()])

    def settle(self, shards: Shards, *, keeps_items: bool = True) -> None:
        """Gives the module what the replicas' steps left on them.

        Without `keeps_items` containers get their former items back: the samples count in another
        process. Attributes that were bound anew stay, which may be counts of steps.
        """
        if not self._seen.differ():
            return
        self._merge.begin(shards)
        for number, module in zip(self._watched, self._modules, strict=True):
            if not keeps_items:
                module.take_items_back()
                continue
            after = list(map(_own, module.replicas))
            for path in self._merge.into((number,), module.before, after, module.root):
                self._warn(path)

    def undo(self) -> None:
        """Gives the module what it had before the step."""
        for module in self._modules:
            for name in _own(module.root).keys() - module.bound.keys():
                del module.root[name]
            module.root.update(module.bound)
            module.take_items_back()

    def _warn(self, path: Path) -> None:
        number, name, *keys = path
        if path[:2] in self._warned:
            return
        self._warned.add(path[:2])
        root, module = self._submodules[0][0], self._submodules[0][number]
        place = next((place for place, m in root.named_modules() if m is module), "")
        label = ".".join(filter(None, (type(root).__qualname__, place, name)))
        warn_of_step(
            root,
            f"A step binds {tree.name(tuple(keys), label)} to different values on different "
            "replicas; self keeps the first replica's. To collect over the batch, append to a list "
            "on self, log the value or update a metric. A state that belongs to samples, as that "
            "of a recurrent network from batch to batch, needs one device.",
        )


def _is_watched(module: nn.Module) -> bool:
    """Whether code of the user's may put something on a module; on layers of torch a hook may.

    Not where torch's own hooks (the older weight norm, spectral norm and pruning) bind a weight
    anew in every forward.
    """
    package = f"{type(module).__module__}."
    hooks = [type(hook).__module__ for table in hook_tables(module) for hook in table.values()]
    are_torchs = any(of.startswith("torch.") for of in hooks)
    return not package.startswith(("torch.", "torchmetrics.")) or (bool(hooks) and not are_torchs)


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are neither torch's nor modules."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_TORCH and not isinstance(value, nn.Module)
    }


class _Module:
    """The attributes of one module, of the root's and of the active replicas', as a step begins."""

    def __init__(self, root: dict[str, Any], replicas: Sequence[dict[str, Any]]) -> None:
        self.root, self.replicas = root, replicas
        self.bound = _own(root)
        self._items = {n: copied(v) for n, v in self.bound.items() if is_container(v)}
        self.before = [{n: copied(v) for n, v in _own(own).items()} for own in replicas]

    def views(self) -> Iterator[Collection[Any]]:
        """Live views of the attributes, and of the items of containers, for `Contents`."""
        for attributes in (self.root, *self.replicas):
            yield attributes.values()
            for value in _own(attributes).values():
                yield from _live(value)

    def take_items_back(self) -> None:
        """Gives the root's containers the items that they had."""
        for name, items in self._items.items():
            self.root[name] = self.bound[name]
            refill(self.bound[name], items)


# Containers


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
    now, kept = dict(_entries(container)), dict(_entries(items))
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


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _live(node: Any) -> Iterator[Collection[Any]]:
    """Live views of the items of a container, and of containers in it."""
    if not is_container(node):
        return
    if isinstance(node, dict):
        yield node.keys()
        node = node.values()
    if not isinstance(node, tuple):
        yield node
    for item in node:
        yield from _live(item)


def _agree(a: Any, b: Any) -> bool:
    """Whether two replicas have equal values, each on its device."""
    if isinstance(a, type) and isinstance(b, type):  # every call may make its own named tuple
        return a.__qualname__ == b.__qualname__
    of_a, of_b = tree.leaves(a), tree.leaves(b)
    return len(of_a) == len(of_b) and all(
        tree.equal(x, y.to(x.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else y)
        for x, y in zip(of_a, of_b, strict=True)
    )


def _new_items(before: Any, after: Any) -> list[Any] | None:
    """What was appended; None if a list was changed in another way."""
    if len(after) < len(before) or any(map(_is_other, before, after)):
        return None
    return list(islice(after, len(before), None))


class Merge:
    """Brings what a step did to the replicas' containers into the root's, on the output device."""

    def __init__(self, output_device: torch.device) -> None:
        self._output_device = output_device
        # Of lists, as steps have shown:
        self._are_of_samples: dict[Path, bool] = {}  # in the latest step that decided it
        self._uneven: set[Path] = set()  # replicas have appended different numbers

    def begin(self, shards: Shards) -> None:
        """Begins the merge of a step."""
        self._sizes, self._row_rules = shards.active_sizes, shards.row_rules
        self._done: set[int] = set()  # ids of the root's: one container may have several names

    def into(self, path: Path, before: list[Any], after: list[Any], root: Any) -> Iterator[Path]:
        """Merges the replicas' changes of a container (copies `before`, now `after`) into `root`.

        `root` is the user's container: `after[0]`, or unchanged if the root device was idle.

        Yields:
            The paths of values that differ between replicas; the first replica's is kept.
        """
        if id(root) in self._done:
            return
        self._done.add(id(root))
        if isinstance(root, dict):
            for key in dict.fromkeys(key for own in (*before, *after) for key in own):
                yield from self._entry((*path, key), key, before, after, root)
        else:
            yield from self._list(path, before, after, root)

    def _entry(
        self, path: Path, key: Any, before: list[Any], after: list[Any], root: dict[Any, Any]
    ) -> Iterator[Path]:
        """An attribute of a module, or an entry of a dict."""
        old, new = ([own.get(key, _ABSENT) for own in owners] for owners in (before, after))
        written = [b for a, b in zip(old, new, strict=True) if _is_other(a, b)]
        if not written and not is_container(old[0]):
            return
        first = written[0] if written else new[0]
        if old[0] is _ABSENT and isinstance(first, list | dict | deque):  # begun in this step
            empty = copy.copy(first)
            empty.clear()
            old = [empty] * len(new)
            new = [empty if value is _ABSENT else value for value in new]
            root.setdefault(key, copy.copy(empty))
        if is_container(old[0]) and len({*map(type, [*old, *new, root.get(key)])}) == 1:
            yield from self.into(path, old, new, root[key])
            return
        is_attribute = len(path) == 2
        if first is _ABSENT:
            root.pop(key, None)
        else:
            root[key] = first if is_attribute else to_device(first, self._output_device)
        if not all(_agree(first, value) for value in (new if is_attribute else written)):
            yield path

    def _list(self, path: Path, before: list[Any], after: list[Any], root: Any) -> Iterator[Path]:
        """A list or deque, or a tuple of such."""
        found = [_new_items(old, now) for old, now in zip(before, after, strict=True)]
        tails = [tail for tail in found if tail is not None]
        if len(tails) < len(found):
            first = to_device(list(after[0]), self._output_device)
            root.clear()
            root.extend(first)
            if not all(_agree(after[0], own) for own in after):
                yield path
            return
        kept = {len(now) - len(tail) for now, tail in zip(after, tails, strict=True)}
        if kept == {len(before[0])}:
            for i, item in enumerate(before[0]):
                if is_container(item):
                    old, new = [own[i] for own in before], [own[i] for own in after]
                    yield from self.into((*path, i), old, new, root[i])
        if any(tails):
            for _ in tails[0] if root is after[0] else ():
                root.pop()
            root.extend(self._joined(path, tails))

    def _joined(self, path: Path, tails: list[list[Any]]) -> list[Any]:
        """The items that one device would have appended."""
        items = [item for tail in tails for item in tail]
        if self._belong_to_samples(path, list(map(len, tails))):
            return to_device_together(items, self._output_device)
        number, name, *keys = path
        join = Join(tuple(self._sizes), self._output_device, self._row_rules)
        path = (tree.Attribute(name), *keys)
        return [
            replace(join, where=("self", number, i)).gather(row, path)
            for i, row in enumerate(zip(*tails, strict=True))
        ]

    def _belong_to_samples(self, path: Path, counts: list[int]) -> bool:
        """Whether new items, as many on each replica, belong to samples and not to the batch."""
        if len(counts) == 1:
            return True
        if len(set(counts)) > 1:
            self._uneven.add(path)
        elif counts[0] > 1 or counts != self._sizes:
            self._are_of_samples[path] = counts == self._sizes
        if path not in self._uneven and path not in self._are_of_samples:
            name = tree.name((tree.Attribute(path[1]), *path[2:]), "self")
            self._row_rules.warn_once(
                path,
                f"{name}: each replica appended one item for one sample. They are joined as one "
                "item of the batch. Whether it is one per sample shows only in larger batches.",
            )
        return path in self._uneven or self._are_of_samples.get(path, False)


def _is_other(old: Any, new: Any) -> bool:
    """Whether a value was bound anew; copied containers are the same if they are of one type."""
    return old is not new and not (is_container(old) and type(old) is type(new))
