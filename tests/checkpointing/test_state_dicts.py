"""`normalize_state_dict`: keys of wrapped modules become those of the module, and only they."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_dp import normalize_state_dict
from lightning_dp.checkpointing.state_keys import PREFIXES

WRAPPERS = [prefix[:-1] for prefix in PREFIXES]
quiet = settings(deadline=None, max_examples=60)

# Random trees of modules, also with children called `module`, in random wrappers

Tree = dict[str, Any]  # None for a parameter

LEAVES = st.dictionaries(st.sampled_from(["weight", "bias", "w"]), st.none(), max_size=3)


def trees(names: list[str]) -> st.SearchStrategy[Tree]:
    children = lambda tree: st.builds(
        lambda leaves, modules: {**leaves, **modules},
        LEAVES,
        st.dictionaries(st.sampled_from(names), tree, max_size=3),
    )
    return st.recursive(LEAVES, children, max_leaves=8)


plain_trees = trees(["a", "b", "fc", "0"])
any_trees = trees(["a", "module", "net"])


def keys_of(tree: Tree) -> list[str]:
    keys: list[str] = []
    for name, child in tree.items():
        keys += [name] if child is None else [f"{name}.{key}" for key in keys_of(child)]
    return keys


@st.composite
def wrapped(draw: st.DrawFn, tree: Tree) -> list[str]:
    """The tree's keys, in the same order, when some of its modules are in wrappers."""
    around = draw(st.lists(st.sampled_from(WRAPPERS), max_size=2))
    keys: list[str] = []
    for name, child in tree.items():
        inner = [name] if child is None else [f"{name}.{key}" for key in draw(wrapped(child))]
        keys += [".".join([*around, key]) for key in inner]
    return keys


def state_of(keys: list[str]) -> dict[str, int]:
    return {key: i for i, key in enumerate(keys)}


@quiet
@given(st.data(), plain_trees)
def test_a_reference_finds_every_key_in_any_wrappers(data: st.DataObject, tree: Tree) -> None:
    source, target = data.draw(wrapped(tree)), data.draw(wrapped(tree))
    for reference in (target, keys_of(tree)):
        found = normalize_state_dict(state_of(source), reference)
        assert list(found.items()) == list(state_of(reference).items())


@quiet
@given(st.data(), any_trees)
def test_a_child_called_module_keeps_its_name_or_is_refused(
    data: st.DataObject, tree: Tree
) -> None:
    around = "".join(f"{step}." for step in data.draw(st.lists(st.sampled_from(WRAPPERS))))
    own = keys_of(tree)
    some = [key for key in own if data.draw(st.booleans())]
    assert normalize_state_dict(state_of(some), own) == state_of(some)
    outer = {around + key: value for key, value in state_of(own).items()}
    assert normalize_state_dict(outer, own) == state_of(own)
    for source, reference in ((outer, list(outer)), (state_of(data.draw(wrapped(tree))), own)):
        try:
            found = normalize_state_dict(source, reference)
        except ValueError as error:
            assert "one key and one place" in str(error)
        else:
            assert found.keys() == set(reference)


@quiet
@given(plain_trees, st.lists(st.sampled_from(WRAPPERS), max_size=3))
def test_without_a_reference_wrappers_around_all_are_taken(tree: Tree, around: list[str]) -> None:
    state = state_of(keys_of(tree))
    added = {".".join([*around, key]): value for key, value in state.items()}
    assert normalize_state_dict(added) == state
    beside = {**added, "beside": -1}
    assert normalize_state_dict(beside) == beside, "not every key has it"


# What is stripped, what is not, and what is refused


@pytest.mark.parametrize(
    ("keys", "reference", "expected"),
    [
        # A submodule that is really called `module`: bare, wrapped, and only a part of its state.
        (["w", "module.w"], ["w", "module.w"], ["w", "module.w"]),
        (["module.w", "module.module.w"], ["w", "module.w"], ["w", "module.w"]),
        (["module.w"], ["w", "module.w"], ["module.w"]),
        (["module.w", "module.module.b"], ["w", "module.w", "module.b"], ["w", "module.b"]),
        # What fits nothing stays.
        (["fc.w", "module.fc.b"], ["head.w"], ["fc.w", "module.fc.b"]),
        (["module.9.w", "module.0.w"], ["0.w", "1.w"], ["module.9.w", "0.w"]),
        ([], ["w"], []),
        (["w"], [], ["w"]),
        # A module that holds the other one alone.
        (["net.fc.w", "net.module.b"], ["fc.w", "b"], ["fc.w", "b"]),
        (["module.fc.w", "module.b"], ["net.fc.w", "net.b"], ["net.fc.w", "net.b"]),
    ],
)  # fmt: skip
def test_keys_become_those_of_the_reference(
    keys: list[str], reference: list[str], expected: list[str]
) -> None:
    assert list(normalize_state_dict(state_of(keys), reference, strict=False)) == expected
    if not set(expected) <= set(reference):
        with pytest.raises(ValueError, match=r"got \d of \d that fit none of them.*strict=False"):
            normalize_state_dict(state_of(keys), reference)


def test_prefixes_of_ones_own() -> None:
    state, prefixes = {"model.fc.w": 1, "model.module.fc.b": 2}, [*PREFIXES, "model."]
    assert list(normalize_state_dict(state, ["fc.w", "fc.b"], prefixes=prefixes)) == [
        "fc.w",
        "fc.b",
    ]
    assert normalize_state_dict({"fc.w": 1}, ["model.fc.w"], prefixes=prefixes) == {"model.fc.w": 1}
    state = {"b": 1, "module.w": 2}
    assert normalize_state_dict(state, ["w"], prefixes=(), strict=False) == state
    for wrong in (["module"], [""], ["."], ["a.b."], "module."):
        with pytest.raises(ValueError, match="prefixes: expected names of one step with a dot"):
            normalize_state_dict(state, prefixes=wrong)


def test_two_keys_for_one_and_one_for_two_are_refused_by_name() -> None:
    for keys in (["module.w", "w"], ["w", "module.w"], ["a.module.w", "a.w"]):
        name = keys[0].replace("module.", "")
        with pytest.raises(ValueError, match=f"got '{name}' for both '{keys[0]}' and '{keys[1]}'"):
            normalize_state_dict(dict.fromkeys(keys, torch.ones(2)), [name, "other"])
        assert list(normalize_state_dict(state_of(keys))) == keys, "without a reference"
    with pytest.raises(ValueError, match=r"got 'w' for both 'module\.w' and '_orig_mod"):
        normalize_state_dict({"w": 1}, ["module.w", "_orig_mod.w"])


@pytest.mark.parametrize("wrong", [[1, 2], None, torch.zeros(1), {1: torch.zeros(1)}, "module.w"])
def test_what_is_no_state_dict_or_reference_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected a module's state dict or its keys, got "):
        normalize_state_dict(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=r"Expected a module's state dict or its keys, got "):
            normalize_state_dict({"w": 1}, wrong)


# The values


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.module[2].weight


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, lambda net: net])
def test_nothing_is_copied_and_ties_and_versions_stay(wrap: Any) -> None:
    net = Tied()
    state = wrap(net).state_dict()
    before = OrderedDict(state), dict(state._metadata)
    found = normalize_state_dict(state, net, strict=False)
    assert (OrderedDict(state), dict(state._metadata)) == before, "the input is not modified"
    found.pop("n_averaged", None)
    assert list(found) == list(net.state_dict())
    assert {id(value) for value in found.values()} <= {id(value) for value in state.values()}
    assert found["head.weight"].data_ptr() == found["module.2.weight"].data_ptr()
    assert found._metadata["module.0"] == net.state_dict()._metadata["module.0"] == {"version": 2}
    assert Tied().load_state_dict(found)
