"""State dicts under other names: `normalize_state_dict`."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.keys.matching import bare, match_keys
from lightning_dp.keys.renaming import Renaming, shared_prefix, strip_prefix
from lightning_dp.parallel.checks import told
from lightning_dp.parallel.torch_private import format_versions, set_format_versions

log = logging.getLogger(__name__)

PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")
"""What wrappers put before keys: nn.DataParallel and DDP, torch.compile, Lightning, FSDP."""


def normalize_state_dict(
    state_dict: Mapping[str, Any],
    reference: nn.Module | Mapping[str, Any] | Iterable[str] | None = None,
    *,
    prefixes: Sequence[str] = PREFIXES,
) -> OrderedDict[str, Any]:
    """Renames keys that went through a wrapper, such as `module.fc.weight`.

    With a reference the answer is the renaming by which the keys match, at any depth and in both
    directions: `module.fc.weight` becomes `fc.weight` for a bare module, and the other way round
    for one in `nn.DataParallel`. A submodule that is really called `module` keeps its name. The
    weights of a bare module also match those of a module that holds it alone (`net.fc.weight`).
    Keys that the reference does not have stay, for `load_state_dict` to tell.

    Without a reference only wrappers around all of it are taken away, and a line in the log says
    so: that is a guess, as a module may hold all of its layers in a submodule called `module`.

    Args:
        state_dict: the state; it is not modified. Values are passed on as they are: nothing is
            copied, and tied weights stay tied.
        reference: what the keys should be: a module, a state dict of one, or the keys.
        prefixes: what wrappers put before keys, each with its dot.

    Returns:
        The state under its new names, in the same order, with its `_metadata`.

    Raises:
        TypeError: `state_dict` or `reference` is of another type.
        ValueError: two keys with different values become one, a key fits in two places equally
            well, or a prefix has no dot at its end.

    Example:
        >>> list(normalize_state_dict({"net.module.fc.weight": 0}, ["net.fc.weight"]))
        ['net.fc.weight']
        >>> list(normalize_state_dict({"module.module.w": 0, "module.b": 1}, ["module.w", "b"]))
        ['module.w', 'b']
    """
    _check_state_dict(state_dict)
    _check_prefixes(prefixes)
    if reference is None:
        prefix = shared_prefix(state_dict, prefixes)
        if prefix:
            log.warning(
                "normalize_state_dict: took %s from all %d keys. Without a reference that is a "
                "guess: give the module that they are for to be certain.",
                told(prefix),
                len(state_dict),
            )
        return renamed(state_dict, strip_prefix(state_dict, prefix))
    return renamed(state_dict, renaming_like(state_dict, keys_of(reference), prefixes))


def renaming_like(
    keys: Collection[str], reference: Collection[str], prefixes: Sequence[str] = PREFIXES
) -> Renaming:
    """The renaming that `normalize_state_dict` does with a reference."""
    return _with_duplicates(match_keys(keys, reference, prefixes), reference, prefixes)


def renamed(state_dict: Mapping[str, Any], renaming: Renaming) -> OrderedDict[str, Any]:
    """The same values under other names, with `_metadata`; a ValueError if two fall together."""
    found: OrderedDict[str, Any] = OrderedDict()
    sources: dict[str, str] = {}
    for key, value in state_dict.items():
        name = renaming.keys[key]
        if name in found and not _is_same(found[name], value):
            raise ValueError(
                f"normalize_state_dict: expected each parameter once, got both {sources[name]!r} "
                f"and {key!r} for {name!r}, with different values. Remove one of them."
            )
        found.setdefault(name, value)
        sources.setdefault(name, key)
    versions = format_versions(state_dict)
    if versions is not None:
        # A wrapper's own comes first.
        named = OrderedDict((renaming.module(path), value) for path, value in versions.items())
        set_format_versions(found, named)
    return found


def with_ties(state_dict: Mapping[str, Any], module: nn.Module) -> OrderedDict[str, Any]:
    """Adds the names that a file left out because the module ties their weights to others.

    The module holds such a weight once, so that its other names can get no other value.
    """
    own = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    told_of = {id(value): name for name, value in own.items() if name in state_dict}
    missing = [name for name, v in own.items() if name not in state_dict and id(v) in told_of]
    found = OrderedDict(state_dict)
    found.update({name: state_dict[told_of[id(own[name])]] for name in missing})
    versions = format_versions(state_dict)
    if versions is not None:
        set_format_versions(found, versions)
    return found


def keys_of(reference: nn.Module | Mapping[str, Any] | Iterable[str]) -> list[str]:
    """The keys that a reference asks for."""
    if isinstance(reference, nn.Module):
        return list(reference.state_dict())
    keys = [] if isinstance(reference, str | Tensor) else list(reference)
    if isinstance(reference, str | Tensor) or not all(isinstance(key, str) for key in keys):
        raise TypeError(
            "reference: expected a module, a state dict or its keys, got "
            f"{type(reference).__qualname__}. Give the module that the state is for."
        )
    return keys


def _check_prefixes(prefixes: Sequence[str]) -> None:
    wrong = [p for p in prefixes if not isinstance(p, str) or not p.endswith(".") or p[0] == "."]
    if isinstance(prefixes, str) or wrong:
        raise ValueError(
            f"prefixes: expected names with a dot at their end, such as ('module.',), got "
            f"{prefixes!r}. Write them so."
        )


def _check_state_dict(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a dict of tensors, got {type(state_dict).__qualname__}. Call "
            "state_dict() of a module, or load a file."
        )
    other = next((key for key in state_dict if not isinstance(key, str)), None)
    if other is not None:
        raise TypeError(f"state_dict: expected names as keys, got {other!r}. Pass the weights.")


def _with_duplicates(renaming: Renaming, own: Collection[str], prefixes: Sequence[str]) -> Renaming:
    """Gives a key that matched nothing the name of one that is the same but for wrappers.

    Such are `fc.weight` and `module.fc.weight` in one state: they have to be equal.
    """
    reference = set(own)
    left = {key: name for key, name in renaming.keys.items() if name not in reference}
    if not left:
        return renaming
    wrappers = [tuple(prefix.split(".")[:-1]) for prefix in prefixes]
    taken = {name for name in renaming.keys.values() if name in reference}
    places = {name: key for key, name in bare(taken, wrappers).items()}
    bared = bare(left.values(), wrappers)
    same = {key: places.get(bared[name], name) for key, name in left.items()}
    # With more wrappers, that is: with fewer it is another parameter.
    names = {key: name for key, name in same.items() if name.count(".") < left[key].count(".")}
    return Renaming({**renaming.keys, **names}, renaming.modules)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _is_same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):  # extra state of a module may be anything
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return (one == other) is True


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN is what it is, as in weights that have diverged."""
    kinds = [(t.shape, t.dtype, t.layout, t.is_meta) for t in (one, other)]
    if kinds[0] != kinds[1] or one.is_meta:
        return kinds[0] == kinds[1]
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)
