"""Keys of state dicts: `normalize_state_dict` takes away what wrappers put into them.

A wrapper (`nn.DataParallel`, `torch.compile`, FSDP) adds a step to the path of every key inside it:
`fc.weight` becomes `module.fc.weight`. Keys match if they are equal without such steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_dp.parallel.checks import expected, short_repr
from lightning_dp.parallel.torch_private import copy_format_versions

PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")
"""What nn.DataParallel and DDP, torch.compile, Lightning, and FSDP put before keys."""


def normalize_state_dict(
    state_dict: Mapping[str, Any],
    reference: nn.Module | Mapping[str, Any] | Iterable[str] | None = None,
    *,
    prefixes: Sequence[str] = PREFIXES,
    strict: bool = True,
) -> OrderedDict[str, Any]:
    """Renames keys that went through a wrapper, such as `module.fc.weight`.

    With a reference the keys become the reference's: wrappers are taken away or added, at any
    depth. A submodule that is really called `module` keeps its name. The weights of a bare module
    also fit a module that holds it alone (`net.fc.weight`), and the other way round. Without a
    reference only wrappers around all keys are taken away.

    Args:
        state_dict: the state; it is not modified, and no tensor is copied.
        reference: what the keys should be: a module, a state dict of one, or the keys.
        prefixes: what wrappers put before keys, one step with its dot each. To load the keys
            `model.fc.weight` of a LightningModule into its `model`: `(*PREFIXES, "model.")`.
        strict: whether a key that fits nothing in the reference is an error. False keeps it as it
            is, for `load_state_dict(..., strict=False)` to report.

    Returns:
        The state under its new names, in the same order, with its `_metadata`.

    Raises:
        TypeError: `state_dict` or `reference` is of another type.
        ValueError: two keys would become one, a key fits in two places or in none, or a prefix is
            not one step with a dot.

    Example:
        >>> list(normalize_state_dict({"net.module.fc.weight": 0}, ["net.fc.weight"]))
        ['net.fc.weight']
        >>> list(normalize_state_dict({"module.module.w": 0, "module.b": 1}, ["module.w", "b"]))
        ['module.w', 'b']
    """
    keys = keys_of(state_dict if isinstance(state_dict, Mapping) else None)
    if isinstance(prefixes, str) or any(p.find(".") != len(p) - 1 or len(p) < 2 for p in prefixes):
        wanted = "names of one step with a dot at their end, such as ('module.',)"
        raise expected("prefixes", wanted, prefixes, "")
    if reference is None:
        return rename(state_dict, without_outer(keys, prefixes))
    return rename(state_dict, match_keys(keys, keys_of(reference), prefixes, strict=strict))


def keys_of(state: Any) -> list[str]:
    """The keys of a module, a state dict or a list of keys."""
    keys = state.state_dict() if isinstance(state, nn.Module) else state
    is_keys = isinstance(keys, Iterable) and not isinstance(keys, str | Tensor)
    found: list[Any] = list(keys) if is_keys else [None]
    if not all(isinstance(key, str) for key in found):
        raise TypeError(f"Expected a module's state dict or its keys, got {short_repr(state)}.")
    return found


def match_keys(
    keys: Collection[str],
    reference: Collection[str],
    prefixes: Sequence[str] = PREFIXES,
    *,
    strict: bool = False,
) -> dict[str, str]:
    """Returns the new name of each key; one that fits nothing is an error, or keeps its name.

    A ValueError names keys that fit two places, or fall together.
    """
    wanted = set(reference)
    # Where a submodule is really called `module`, wrappers around all keys alone are looked at.
    for outer in _outer_prefixes(keys, prefixes):
        names = {key: key.removeprefix(outer) for key in keys}
        if wanted.issuperset(names.values()):
            return names
    groups, places = _by_bare_name(keys, prefixes), _by_bare_name(reference, prefixes)
    if not groups.keys() & places.keys():
        inner = _without_holder(groups)
        if inner.keys() & places.keys():
            groups = inner
        else:
            places = _without_holder(places)
    names = {key: key for key in keys}
    for bare in groups.keys() & places.keys():
        group, fitting = groups[bare], places[bare]
        if set(group) <= set(fitting):
            continue
        if len(fitting) > 1 or len(group) > 1:
            found, others = (group, fitting) if len(fitting) > 1 else (fitting, group)
            raise ValueError(
                f"normalize_state_dict: expected one key and one place for it, got {found[0]!r} "
                f"for both {others[0]!r} and {others[1]!r}. Rename or remove one of them before."
            )
        names[group[0]] = fitting[0]
    extra = [key for key, name in names.items() if name not in wanted]
    if strict and extra:
        missing = sorted(wanted.difference(names.values()))
        raise ValueError(
            f"state_dict: expected the reference's keys, got {len(extra)} of {len(names)} that fit "
            f"none of them: {extra[:4]}; the reference has {len(missing)} others: {missing[:4]}. "
            "Give the module that was saved, prefixes=... if it was a part of another, or "
            "strict=False."
        )
    return names


def without_outer(keys: Collection[str], prefixes: Sequence[str] = PREFIXES) -> dict[str, str]:
    """New names without the wrappers that are around all keys."""
    prefix = _outer_prefixes(keys, prefixes)[-1]
    return {key: key.removeprefix(prefix) for key in keys}


def rename(state_dict: Mapping[str, Any], names: Mapping[str, str]) -> OrderedDict[str, Any]:
    """The same values under other names, and the format versions of modules with such keys."""
    found = OrderedDict((names[key], value) for key, value in state_dict.items())
    paths = {k.rpartition(".")[0]: name.rpartition(".")[0] for k, name in names.items()}
    copy_format_versions(state_dict, found, paths)
    return found


def _outer_prefixes(keys: Collection[str], prefixes: Sequence[str]) -> list[str]:
    """What wrappers put before all keys, from none of them to all: `["", "module.", ...]`."""
    found = [""]
    while keys:
        longer = [found[-1] + prefix for prefix in prefixes]
        shared = next((p for p in longer if all(key.startswith(p) for key in keys)), None)
        if shared is None:
            break
        found.append(shared)
    return found


def _by_bare_name(keys: Iterable[str], prefixes: Sequence[str]) -> dict[str, list[str]]:
    """The keys, grouped by what they are without wrappers; the last step is a parameter's."""
    steps = {prefix[:-1] for prefix in prefixes}
    groups: dict[str, list[str]] = {}
    for key in keys:
        *path, leaf = key.split(".")
        bare = ".".join([*(step for step in path if step not in steps), leaf])
        groups.setdefault(bare, []).append(key)
    return groups


def _without_holder(groups: dict[str, list[str]]) -> dict[str, list[str]]:
    """The groups by their names in the one submodule (`net.`) that holds all of them, if any."""
    paths = {bare: bare.partition(".") for bare in groups}
    if len({first for first, _, _ in paths.values()}) != 1:
        return groups
    return {paths[bare][2]: group for bare, group in groups.items()}
