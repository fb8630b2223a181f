"""Which keys of two state dicts mean the same: pure strings, no tensor.

Keys are paths in a tree of modules. A wrapper (`nn.DataParallel`, `torch.compile`, FSDP) stands in
such a tree as a step of its own, `module` or `_orig_mod`; so does a submodule that somebody called
`module`. No key alone can tell the two apart: the trees can. Of all ways to step over wrappers in
either tree, the one by which the most keys match is right; among those, the one that steps over
fewest, where a step with nothing beside it, as wrappers are, is the likelier wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_dp.keys.renaming import Renaming, as_they_are, beginnings, join
from lightning_dp.keys.tree import Inner, Node, Wrapper, only_modules, tree_of, without


class Score(NamedTuple):
    """How good a match is; the greater the better, the first number first."""

    matched: int
    unlikely: int = 0  # less one for each wrapper that has something beside it
    wrappers: int = 0  # less one for each wrapper


class _Move(NamedTuple):
    """A wrapper stepped over: the pair of nodes to go on with. None: their children are paired."""

    source: Node
    target: Node
    added: bool
    name: str = ""  # what the reference's wrapper adds to a path


def match_keys(
    keys: Collection[str], reference: Collection[str], prefixes: Sequence[str]
) -> Renaming:
    """Names the keys as the reference does, wherever a match can be found.

    Two keys may get the same name. Keys that the reference does not have lose the wrappers that
    those beside them lose. One that fits in two places equally well raises a ValueError.
    """
    own = set(reference)
    if set(keys) == own:
        return as_they_are(keys)
    matcher = _Matcher([tuple(prefix.split(".")[:-1]) for prefix in prefixes])
    return matcher.renaming(*_where_to_begin(matcher, tree_of(keys), tree_of(own)))


def bare(keys: Iterable[str], wrappers: Sequence[Wrapper]) -> dict[str, str]:
    """Every key without any step that a wrapper may have put there."""
    steps = {step for wrapper in wrappers for step in wrapper}
    paths: dict[str, str] = {}
    found: dict[str, str] = {}
    for key in keys:
        path, _, leaf = key.rpartition(".")
        if path not in paths:
            paths[path] = ".".join(step for step in path.split(".") if step not in steps)
        found[key] = f"{paths[path]}.{leaf}"
    return found


def _where_to_begin(matcher: _Matcher, source: Node, target: Node) -> tuple[Node, Node]:
    """The roots; or, if nothing matches there, the module that one tree is all in.

    Such are the weights of a bare module and those of a LightningModule that holds it as
    `self.net`. They begin there if most keys of the smaller side then match.
    """
    if matcher.score(source, target).matched or not (source.size and target.size):
        return source, target
    pairs = [(node, target) for node in only_modules(source)]
    pairs += [(source, node) for node in only_modules(target)]
    best = max(pairs, key=lambda pair: matcher.score(*pair), default=(source, target))
    enough = 2 * matcher.score(*best).matched > min(source.size, target.size)
    return best if enough else (source, target)


class _Matcher:
    """Finds the best match of two trees; every pair of nodes is looked at once."""

    def __init__(self, wrappers: Sequence[Wrapper]) -> None:
        self._wrappers = wrappers
        self._found: dict[tuple[int, int, bool], tuple[Score, list[_Move | None]]] = {}
        self._pairs: dict[tuple[int, int, bool], dict[str, str]] = {}
        # Holds on to what it has made: ids of nodes are keys above.
        self._without: dict[tuple[int, Wrapper], Inner | None] = {}

    def score(self, source: Node, target: Node, added: bool = False) -> Score:
        """How well two nodes match at best."""
        return self._best(source, target, added)[0]

    def _best(self, source: Node, target: Node, added: bool) -> tuple[Score, list[_Move | None]]:
        """The best score and all moves that reach it.

        Wrappers of the source are stepped over first, and none any more once one of the reference
        was `added`: so the same is not found in several orders.
        """
        key = (id(source), id(target), added)
        if key not in self._found:
            self._found[key] = self._search(source, target, added)
        return self._found[key]

    def _search(self, source: Node, target: Node, added: bool) -> tuple[Score, list[_Move | None]]:
        score = self._score_pair(source, target)
        if score.matched == min(source.size, target.size) and not score.wrappers:
            return score, [None]  # nothing is better
        options: list[tuple[Score, _Move | None]] = [(score, None)]
        for wrapper in self._wrappers:
            if not added and (found := self._step_over(source, wrapper)):
                score = _worse(self.score(found.node, target), found.alone)
                options.append((score, _Move(found.node, target, False)))
            if found := self._step_over(target, wrapper):
                score = _worse(self.score(source, found.node, True), found.alone)
                options.append((score, _Move(source, found.node, True, ".".join(wrapper))))
        best = max(score for score, _ in options)
        return best, [move for score, move in options if score == best]

    def _score_pair(self, source: Node, target: Node) -> Score:
        matched = len(source.leaves.keys() & target.leaves.keys())
        unlikely = wrappers = 0
        for name in source.children.keys() & target.children.keys():
            score = self.score(source.children[name], target.children[name])
            matched += score.matched
            unlikely += score.unlikely
            wrappers += score.wrappers
        return Score(matched, unlikely, wrappers)

    def _step_over(self, node: Node, wrapper: Wrapper) -> Inner | None:
        if wrapper[0] not in node.children:
            return None
        key = (id(node), wrapper)
        if key not in self._without:
            self._without[key] = without(node, wrapper)
        return self._without[key]

    def renaming(self, source: Node, target: Node) -> Renaming:
        """The names that the best moves give to everything below two nodes."""
        above = beginnings(source.paths[0])
        found = Renaming(modules=dict.fromkeys(["", *(path[:-1] for path in above)], ""))
        self._rename(source, target, False, target.paths[0], found)
        return found

    def _rename(self, source: Node, target: Node, added: bool, name: str, found: Renaming) -> None:
        move, *others = self._best(source, target, added)[1]
        if others:
            _check_same([self._pairs_by(source, target, m) for m in (move, *others)])
        found.modules.update(dict.fromkeys(source.paths, name))
        if move is None:
            self._rename_children(source, target, name, found)
        else:
            self._rename(move.source, move.target, move.added, join(name, move.name), found)

    def _rename_children(self, source: Node, target: Node, name: str, found: Renaming) -> None:
        for leaf, keys in source.leaves.items():
            places = target.leaves.get(leaf) or (join(name, leaf),)
            _check_one_place(keys[0], places)
            found.keys.update(dict.fromkeys(keys, places[0]))
        for step, child in source.children.items():
            other = target.children.get(step)
            if other is None:
                _name(child, join(name, step), found)
            else:
                self._rename(child, other, False, other.paths[0], found)

    def _pairs_by(self, source: Node, target: Node, move: _Move | None) -> dict[str, str]:
        """Which key matches which, after a move and the best ones that follow it."""
        if move is not None:
            return self._pairs_of(move.source, move.target, move.added)
        pairs: dict[str, str] = {}
        for leaf in source.leaves.keys() & target.leaves.keys():
            pairs.update(dict.fromkeys(source.leaves[leaf], target.leaves[leaf][0]))
        for step in source.children.keys() & target.children.keys():
            pairs |= self._pairs_of(source.children[step], target.children[step], False)
        return pairs

    def _pairs_of(self, source: Node, target: Node, added: bool) -> dict[str, str]:
        key = (id(source), id(target), added)
        if key not in self._pairs:
            move = self._best(source, target, added)[1][0]
            self._pairs[key] = self._pairs_by(source, target, move)
        return self._pairs[key]


def _worse(score: Score, alone: bool) -> Score:
    """The score with one more wrapper."""
    return Score(score.matched, score.unlikely - (not alone), score.wrappers - 1)


def _name(node: Node, name: str, found: Renaming) -> None:
    """Names what is below a node after the node alone."""
    found.modules.update(dict.fromkeys(node.paths, name))
    for leaf, keys in node.leaves.items():
        found.keys.update(dict.fromkeys(keys, join(name, leaf)))
    for step, child in node.children.items():
        _name(child, join(name, step), found)


def _check_same(ways: list[dict[str, str]]) -> None:
    """Raises a ValueError if equally good ways put a key in different places."""
    first, *others = ways
    for way in others:
        for key in first.keys() & way.keys():
            _check_one_place(key, [first[key], way[key]])


def _check_one_place(key: str, places: Sequence[str]) -> None:
    if len(set(places)) > 1:
        raise ValueError(
            f"normalize_state_dict: expected one place for {key!r}, found two that fit equally "
            f"well: {places[0]!r} and {places[1]!r}. Rename it yourself before."
        )
