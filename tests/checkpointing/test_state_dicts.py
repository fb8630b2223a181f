"""`normalize_state_dict`: keys of wrapped modules become those of the module, and only they."""

import logging
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_dp import normalize_state_dict

WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module")

# --- random trees of modules, also with children called `module`, in random wrappers --------------

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
trees_with_module = trees(["a", "module", "net"])


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


TREES = st.one_of(plain_trees, trees_with_module)


@settings(deadline=None)  # other work on the machine is no failure
@given(st.data(), TREES)
def test_a_reference_finds_every_key_in_any_wrappers(data: st.DataObject, tree: Tree) -> None:
    source, target = data.draw(wrapped(tree)), data.draw(wrapped(tree))
    for reference in (target, keys_of(tree)):
        found = normalize_state_dict(state_of(source), reference)
        assert list(found.items()) == list(state_of(reference).items())


@settings(deadline=None)  # other work on the machine is no failure
@given(st.data(), TREES)
def test_names_of_the_reference_stay(data: st.DataObject, tree: Tree) -> None:
    keys = data.draw(wrapped(tree))
    some = [key for key in keys if data.draw(st.booleans())]
    assert normalize_state_dict(state_of(some), keys) == state_of(some)


@settings(deadline=None)  # other work on the machine is no failure
@given(st.data(), TREES, TREES)
def test_normalising_twice_changes_nothing_more(data: st.DataObject, one: Tree, two: Tree) -> None:
    source, other = (
        data.draw(wrapped(one)),
        data.draw(wrapped(data.draw(st.sampled_from([one, two])))),
    )
    reference = [key for key in other if data.draw(st.booleans())]
    for given_ in (None, reference):
        try:
            once = normalize_state_dict(state_of(source), given_)
        except ValueError as error:  # two keys fall together, or one fits in two places
            assert "got both" in str(error) or "fit equally well" in str(error)
            continue
        assert normalize_state_dict(once, given_) == once
        assert sorted(once.values()) == sorted(state_of(source).values()), "all are there"


@settings(deadline=None)  # other work on the machine is no failure
@given(TREES, st.sampled_from(WRAPPERS))
def test_adding_and_stripping_a_prefix_is_the_identity(tree: Tree, wrapper: str) -> None:
    state = state_of(keys_of(tree))
    added = {f"{wrapper}.{key}": value for key, value in state.items()}
    assert normalize_state_dict(added, state) == state
    assert normalize_state_dict(state, added) == added


@settings(deadline=None)  # other work on the machine is no failure
@given(plain_trees, st.lists(st.sampled_from(WRAPPERS), max_size=3))
def test_without_a_reference_wrappers_around_all_are_taken(tree: Tree, around: list[str]) -> None:
    state = state_of(keys_of(tree))
    added = {".".join([*around, key]): value for key, value in state.items()}
    assert normalize_state_dict(added) == state
    beside = {**added, "beside": -1}
    assert normalize_state_dict(beside) == beside, "not every key has it"


# --- what is stripped, what is not, and what is refused -------------------------------------------


@pytest.mark.parametrize(
    ("keys", "reference", "expected"),
    [
        (["net.module.fc.weight"], ["net.fc.weight"], ["net.fc.weight"]),
        (["module.module.x", "module.module.y.w"], ["x", "y.w"], ["x", "y.w"]),
        (["_orig_mod.module.x"], ["x"], ["x"]),
        (["a._orig_mod.w", "b.module.w"], ["a.w", "b.w"], ["a.w", "b.w"]),
        # A submodule that is really called `module`: bare, wrapped, and only a part of its state.
        (["w", "module.w"], ["w", "module.w"], ["w", "module.w"]),
        (["module.w", "module.module.w"], ["w", "module.w"], ["w", "module.w"]),
        (["module.w"], ["w", "module.w"], ["module.w"]),
        (["module.w", "module.module.b"], ["w", "module.w", "module.b"], ["w", "module.b"]),
        # Weights of a bare module for one that holds it, and back; wrappers on the way.
        (["fc.w", "fc.b"], ["net.fc.w", "net.fc.b"], ["net.fc.w", "net.fc.b"]),
        (["net.fc.w", "net.fc.b"], ["fc.w", "fc.b"], ["fc.w", "fc.b"]),
        (["module.fc.w"], ["_orig_mod.net.fc.w"], ["_orig_mod.net.fc.w"]),
        # Other modules stay what they are, for load_state_dict to tell.
        (["fc.w", "fc.b"], ["head.w", "head.b"], ["fc.w", "fc.b"]),
        (["module.9.w", "module.0.w"], ["0.w", "1.w"], ["9.w", "0.w"]),
        (["n_averaged", "module.w"], ["w"], ["n_averaged", "w"]),
        ([], ["w"], []),
        (["w"], [], ["w"]),
    ],
)
def test_keys_become_those_of_the_reference(
    keys: list[str], reference: list[str], expected: list[str]
) -> None:
    assert list(normalize_state_dict(state_of(keys), reference)) == expected


def test_prefixes_of_ones_own() -> None:
    state = {"ema.online.w": 1, "ema.online.b": 2, "step": 3}
    found = normalize_state_dict(state, ["w", "b"], prefixes=["ema.online."])
    assert found == {"w": 1, "b": 2, "step": 3}
    assert normalize_state_dict({"module.w": 1}, ["w"], prefixes=()) == {"w": 1}, "held by module"
    for wrong in (["module"], [""], "module."):
        with pytest.raises(ValueError, match="prefixes: expected names with a dot at their end"):
            normalize_state_dict(state, prefixes=wrong)


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (NAN, NAN.detach(), True),  # weights that have diverged, tied ones too
        (NAN, NAN.clone(), True),
        (NAN, NAN.flip(0), False),
        (NAN.to(torch.complex64), NAN.to(torch.complex64), True),
        (NAN.to_sparse(), NAN.to_sparse(), True),
        (NAN.to("meta"), NAN.to("meta"), True),
        (NAN, NAN.to("meta"), False),
        (NAN.to("meta"), NAN, False),
        ({"a": [torch.ones(2), 3]}, {"a": [torch.ones(2), 3]}, True),  # extra state
        ({"a": [torch.ones(2), 3]}, {"a": [torch.zeros(2), 3]}, False),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_two_keys_fall_together_if_they_have_the_same_value(
    one: Any, other: Any, same: bool
) -> None:
    state = {"fc.x": one, "module.fc.x": other}
    if same:
        assert list(normalize_state_dict(state, ["fc.x"])) == ["fc.x"]
    else:
        with pytest.raises(ValueError, match=r"'fc\.x' and 'module\.fc\.x' .* different values"):
            normalize_state_dict(state, ["fc.x"])


def test_two_keys_that_fall_together_are_named() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    for state in ({"module.w": one, "w": other}, {"w": one, "module.w": other}):
        first, second = state
        with pytest.raises(ValueError, match=f"got both '{first}' and '{second}'"):
            normalize_state_dict(state, ["w"])
        assert normalize_state_dict(state) == state, "without a reference nothing is known"
    assert normalize_state_dict({"module.w": one, "w": one.clone()}, ["w"]).keys() == {"w"}
    assert normalize_state_dict({"module.x": 1, "x": 1.0, "b": 0}, ["x.y"]).keys() > {"x"}


def test_a_key_that_fits_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one place for 'w', found two .*'(module|_orig_mod)\.w'"):
        normalize_state_dict({"w": 1}, ["module.w", "_orig_mod.w"])


@pytest.mark.parametrize("wrong", [[1, 2], None, torch.zeros(1), {1: torch.zeros(1)}])
def test_what_is_no_state_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"state_dict: expected .*, got .*"):
        normalize_state_dict(wrong)


@pytest.mark.parametrize("wrong", ["module.w", torch.zeros(1), [1, 2], {1: 2}])
def test_what_is_no_reference_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="reference: expected a module, a state dict or its keys"):
        normalize_state_dict({"w": 1}, wrong)


def test_it_says_what_it_did_without_a_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        normalize_state_dict({"module.a": 1, "module.b": 2})
        assert "took 'module.' from all 2 keys" in caplog.text
        caplog.clear()
        normalize_state_dict({"a": 1, "module.b": 2})
        normalize_state_dict({"module.a": 1}, ["a"])
        assert not caplog.text


# --- the values -----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.module[2].weight


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, lambda net: net])
def test_nothing_is_copied_and_ties_stay(wrap: Any) -> None:
    net = Tied()
    state = wrap(net).state_dict()
    before = OrderedDict(state), dict(state._metadata)
    found = normalize_state_dict(state, net)
    assert (OrderedDict(state), dict(state._metadata)) == before, "the input is not modified"
    found.pop("n_averaged", None)
    assert list(found) == list(net.state_dict())
    assert {id(value) for value in found.values()} <= {id(value) for value in state.values()}
    assert found["head.weight"].data_ptr() == found["module.2.weight"].data_ptr()
    assert found._metadata == net.state_dict()._metadata, "versions of formats, by module"
    assert Tied().load_state_dict(found) and list(normalize_state_dict(found, state)) == [
        key for key in state if key != "n_averaged"
    ]


def test_two_gigabytes_are_renamed_without_memory() -> None:
    # Never written to: the system has not given the memory yet. Times: tests/benchmarks/renaming.py
    state = {f"module.{i}.weight": torch.empty(2**19) for i in range(1024)}
    assert sum(tensor.nbytes for tensor in state.values()) == 2 * 2**30
    reference = [f"{i}.weight" for i in range(1024)]
    tracemalloc.start()
    try:
        found = normalize_state_dict(state, reference)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20, "names only"
    assert all(found[name] is state["module." + name] for name in reference)


def test_extra_state_and_values_that_are_no_tensors_pass() -> None:
    state = {"module.w": torch.zeros(1), "module._extra_state": {"step": 3}, "module.q": (1, "x")}
    found = normalize_state_dict(state, ["w", "_extra_state", "q"])
    assert found["_extra_state"] is state["module._extra_state"] and found["q"] == (1, "x")
    assert isinstance(found["w"], Tensor)
