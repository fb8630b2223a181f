"""The tree of modules that a state dict's keys are paths in."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lightning_dp.keys.renaming import check_levels

Wrapper = tuple[str, ...]
"""A wrapper's prefix as the steps of a path: ("module",)."""


class Node:
    """A module in the tree: the modules in it and, by their last step, its own keys."""

    __slots__ = ("children", "leaves", "paths", "size")

    def __init__(self, path: str) -> None:
        self.children: dict[str, Node] = {}
        self.leaves: dict[str, tuple[str, ...]] = {}
        self.paths: tuple[str, ...] = (path,)
        self.size = 0  # how many keys end here or below

    @property
    def only_holds_one(self) -> bool:
        """Whether there is a single module in it and nothing beside that."""
        return len(self.children) == 1 and not self.leaves


class Inner(NamedTuple):
    """A node without the wrapper below it, and whether there was nothing beside the wrapper."""

    node: Node
    alone: bool


def tree_of(keys: Collection[str]) -> Node:
    """The tree that the keys are paths in."""
    check_levels(keys)
    root = Node("")
    nodes = {"": root}
    for key in keys:
        path, _, leaf = key.rpartition(".")
        node = nodes.get(path) or _grow(nodes, path)
        node.leaves[leaf] = (key,)
    _count(root)
    return root


def _grow(nodes: dict[str, Node], path: str) -> Node:
    above, _, name = path.rpartition(".")
    node = nodes[path] = Node(path)
    (nodes.get(above) or _grow(nodes, above)).children[name] = node
    return node


def _count(node: Node) -> int:
    node.size = len(node.leaves) + sum(map(_count, node.children.values()))
    return node.size


def only_modules(node: Node) -> list[Node]:
    """The nodes below that hold all of a node's keys, outermost first."""
    found: list[Node] = []
    while node.only_holds_one:
        (node,) = node.children.values()
        found.append(node)
    return found


def without(node: Node, wrapper: Wrapper) -> Inner | None:
    """The node without the wrapper below it: `{a, module: {b}}` becomes `{a, b}`."""
    inner = node
    for step in wrapper:
        if step not in inner.children or not (inner is node or inner.only_holds_one):
            return None
        inner = inner.children[step]
    if node.only_holds_one:
        return Inner(inner, alone=True)
    outer = Node("")
    outer.leaves, outer.paths, outer.size = node.leaves, node.paths, node.size - inner.size
    outer.children = {name: child for name, child in node.children.items() if name != wrapper[0]}
    return Inner(_merged(outer, inner), alone=False)


def _merged(one: Node, other: Node) -> Node:
    merged = Node("")
    merged.paths = one.paths + other.paths
    merged.size = one.size + other.size
    merged.children = {**one.children, **other.children}
    for name in one.children.keys() & other.children.keys():
        merged.children[name] = _merged(one.children[name], other.children[name])
    merged.leaves = {**one.leaves, **other.leaves}
    for leaf in one.leaves.keys() & other.leaves.keys():
        merged.leaves[leaf] = (*one.leaves[leaf], *other.leaves[leaf])
    return merged
