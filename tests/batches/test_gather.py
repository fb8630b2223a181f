"""Outputs are gathered into what one device would have returned, in few copies, on any device."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from support.containers import ModelOutput, Pair, Sample
from support.nested_batches import devices_in
from support.oracle import assert_equal_trees, devices_of
from torch import distributions
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

from lightning_dp.parallel.gather import GatherError, gather, pad
from lightning_dp.parallel.scatter import to_device, tree

pytestmark = pytest.mark.usefixtures("on")


def root_device() -> torch.device:
    return devices_of(1)[0]


def gathered(outputs: list[Any], sizes: list[int] | None = None, **options: Any) -> Any:
    """What `gather` brings to the root of outputs that lie on one device each."""
    devices = devices_of(len(outputs))
    placed = [to_device(output, device) for output, device in zip(outputs, devices, strict=True)]
    result = gather(placed, root_device(), sizes=sizes, **options)
    assert devices_in(result) <= {root_device()}
    return result


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
        ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
        ([torch.tensor(2), torch.tensor(1)], torch.tensor(3)),
        ([1.0, 4.0], 2.0),
        ([2, 1], 3),
        ([5, 5], 5),
        ([(torch.ones(2), None), (torch.ones(1), None)], (torch.ones(3), None)),
        (["a", "a"], "a"),
        (["a", "b"], ["a", "b"]),
        ([True, True], True),
        ([True, False], [True, False]),
        (["a", 1], ["a", 1]),
        ([None, None], None),
        ([None, torch.tensor([3])], torch.tensor([3])),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([{"x": 1, "y": 2}, {"x": 1}], {"x": 1, "y": 2}),
        ([["kept"], []], ["kept"]),
        ([torch.zeros(4, 2), torch.zeros(4, 1)], torch.zeros(4, 3)),
        ([torch.tensor([1.0, 2.0]), torch.tensor(3.0)], torch.tensor([1.0, 2.0, 3.0])),
        ([torch.arange(4), torch.arange(4)], torch.arange(4)),
    ],
    ids=str,
)
def test_gather_returns_what_one_device_would_have(outputs: list[Any], expected: Any) -> None:
    result = gathered(outputs, [2, 1])
    assert_equal_trees(result, expected, "result", atol=1e-12, rtol=0)


def test_arrays_are_gathered_as_tensors_are() -> None:
    result = gathered([{"y": np.ones((2, 3))}, {"y": np.zeros((1, 3))}], [2, 1])
    assert isinstance(result["y"], np.ndarray) and result["y"].sum(1).tolist() == [3, 3, 0]


class Opaque:
    """An object that nobody can join."""


REFUSED = {
    "several rows per sample": ([torch.zeros(4, 2), torch.zeros(2, 2)], "one row for each of"),
    "rows that follow no sizes": ([torch.zeros(3, 4), torch.zeros(0, 4)], r"shape \(3, 4\), Ten"),
    "other values of one shape": ([torch.ones(5), torch.zeros(5)], r"one row .*shape \(5,\)"),
    "other arrays of one shape": ([np.ones(5), np.zeros(5)], r"one row .* got ndarray of shape"),
    "bools that differ": ([torch.tensor(True), torch.tensor(False)], "the same bool"),
    "objects": ([Opaque(), Opaque()], "tensors, numbers, strings, or .* got Opaque"),
    "objects in a list": ([[1, Opaque()], [1, Opaque()]], "got Opaque"),
    "generators": ([iter([1]), iter([2])], "got list_iterator"),
    "other structures": ([{"b": 1}, (1, 2)], "expected the same type"),
    "other fields": ([Pair(1, 2), namedtuple("Pair", "a b")(1, 2)], "expected the same type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_joint_value_is_refused_by_name(name: str) -> None:
    outputs, message = REFUSED[name]
    with pytest.raises(GatherError, match=rf"output\['x'\].*{message}.*gather_overrides, such as"):
        gather([{"x": output} for output in outputs], "cpu", sizes=[2, 1])
    joined = gather([{"x": o} for o in outputs], "cpu", sizes=[2, 1], overrides={"x": "list"})
    assert joined["x"] == outputs


def test_what_differs_beside_its_rows_comes_as_a_list_with_a_warning() -> None:
    outputs = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(1, 5)}]
    with pytest.warns(UserWarning, match=r"output\['x'\]: .*as a list.*gather_overrides, such as"):
        assert [len(x) for x in gathered(outputs, [2, 1])["x"]] == [2, 1]


@pytest.mark.parametrize(
    ("lists", "lengths"),
    [
        ([[torch.zeros(2, 4), torch.ones(2)]] * 2, [4, 4]),
        ([[torch.zeros(5, 4), torch.zeros(3, 4)]] * 2, [5, 3, 5, 3]),
        ([("a", "b"), ("c", "d")], [1, 1, 1, 1]),
    ],
    ids=["columns", "boxes", "names"],
)
def test_columns_in_a_list_are_told_from_one_item_per_sample(
    lists: list[Any], lengths: list[int]
) -> None:
    assert [len(item) for item in gathered(lists, [2, 2])] == lengths


def test_one_sample_per_shard_is_still_a_sample() -> None:
    rows = [[torch.full((3,), 1.0)], [torch.full((3,), 2.0)]]
    assert [row.tolist() for row in gathered(rows, [1, 1])] == [[1.0] * 3, [2.0] * 3]
    assert gathered([("a",), ("b",)], [1, 1]) == ("a", "b")
    assert gathered([(1, 2.0), (3, 4.0)], [2, 2]) == (4, 3.0)
    assert gathered([4, 4], [4, 4]) == 8


def test_outputs_may_be_of_any_container() -> None:
    for make in (Sample, Pair, lambda x, y: ModelOutput(x=x, y=y)):
        result = gathered([make(torch.ones(2), "a"), make(torch.zeros(1), "b")], [2, 1])
        assert type(result) is type(make(0, 0))
        assert tree.leaves(result)[0].tolist() == [1, 1, 0]


class Registered:
    def __init__(self, y: Any) -> None:
        self.y = y


def test_registered_pytree_nodes_are_joined_child_by_child() -> None:
    register_pytree_node(Registered, lambda node: ([node.y], None), lambda ys, _: Registered(*ys))
    try:
        result = gathered([Registered(torch.ones(2)), Registered(torch.zeros(1))], [2, 1])
        assert type(result) is Registered and result.y.tolist() == [1, 1, 0]
    finally:
        del SUPPORTED_NODES[Registered]


DISTRIBUTIONS = {
    "normal": lambda x: distributions.Normal(x, 2.0),
    "categorical": lambda x: distributions.Categorical(logits=x),
    "independent": lambda x: distributions.Independent(distributions.Normal(x, x.exp()), 1),
    "multivariate": lambda x: distributions.MultivariateNormal(x, torch.eye(2, device=x.device)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("sizes", [(3, 1), (2, 2)], ids=str)
def test_distributions_are_joined_parameter_by_parameter(name: str, sizes: tuple[int, int]) -> None:
    make, x = DISTRIBUTIONS[name], torch.randn(4, 2, device=root_device())
    joined, whole = gathered([make(part) for part in x.split(sizes)], list(sizes)), make(x)
    value = torch.ones(whole.batch_shape + whole.event_shape, device=x.device)
    assert (joined.batch_shape, joined.event_shape) == (whole.batch_shape, whole.event_shape)
    torch.testing.assert_close(joined.log_prob(value), whole.log_prob(value))


def test_replicas_without_samples_are_left_out() -> None:
    outputs = [None, {"x": torch.ones(1), "m": 1.0}, None, {"x": torch.zeros(3), "m": 5.0}]
    assert gathered(outputs, [0, 1, 0, 3])["m"] == 4.0
    result = gathered(outputs)
    assert result["m"] == 4.0 and result["x"].tolist() == [1, 0, 0, 0]
    assert gathered([None, None]) is None


def test_sizes_are_read_off_the_outputs() -> None:
    outputs = [{"y": torch.zeros(3, 2), "loss": 1.0}, {"y": torch.zeros(1, 2), "loss": 5.0}]
    assert gathered(outputs)["loss"] == 2.0
    assert gathered([{"loss": 1.0}, {"loss": 5.0}])["loss"] == 3.0
    unclear = [{"y": torch.zeros(3), "z": torch.zeros(2), "loss": loss} for loss in (1.0, 5.0)]
    assert gathered(unclear)["loss"] == 3.0


@pytest.mark.parametrize("k", [1, 3])
def test_scalars_are_stacked_in_the_order_of_the_replicas(k: int) -> None:
    outputs = [
        {"loss": torch.tensor(0.5 * i), "n": torch.tensor(i), "f": 0.5, "s": ("a", None)}
        for i in range(k)
    ]
    result = gathered(outputs, [2] * k, scalars="stack")
    assert result["loss"].tolist() == [0.5 * i for i in range(k)]
    assert result["n"].tolist() == list(range(k)) and result["n"].dtype == torch.long
    assert (result["f"], result["s"]) == (0.5, ("a", None))


@pytest.mark.parametrize(
    ("override", "values", "expected"),
    [
        ("mean", [1.0, 4.0], 2.0),
        ("mean", [2, 1], 5 / 3),
        ("mean", [torch.ones(2), torch.full((2,), 4.0)], torch.full((2,), 2.0)),
        ("sum", [1.5, 4.0], 5.5),
        ("sum", [(1.0, torch.ones(2)), (2.0, torch.ones(2))], (3.0, torch.full((2,), 2.0))),
        ("stack", [torch.zeros(4), torch.ones(4)], torch.tensor([[0.0] * 4, [1.0] * 4])),
        ("stack", [1.0, 4.0], torch.tensor([1.0, 4.0])),
        ("cat", [torch.arange(4), torch.arange(4)], torch.tensor([0, 1, 2, 3] * 2)),
        ("cat", [torch.tensor(1.0), torch.tensor(4.0)], torch.tensor([1.0, 4.0])),
        ("cat", [(1, 2), (3, 4)], (1, 2, 3, 4)),
        ("cat", [[torch.ones(2, 4), torch.ones(2, 4)], [torch.ones(1, 4)] * 2], [2, 2, 1, 1]),
        ("first", [torch.ones(2), torch.zeros(1)], torch.ones(2)),
        ("list", [torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.zeros(1)]),
        ("list", [{"x": 1}, {"x": 1}], [{"x": 1}, {"x": 1}]),
        (pad(7), [torch.ones(2, 1), torch.ones(1, 2)], torch.tensor([[1.0, 7], [1, 7], [1, 1]])),
        (max, [2.5, 4.0], 4.0),
        (lambda parts: [x for part in parts for x in part], [(1,), (2, 3)], [1, 2, 3]),
    ],
)
def test_an_override_replaces_the_rule(override: Any, values: list[Any], expected: Any) -> None:
    other = [{"out": "as ever"}]
    outputs = [{"aux": {"out": value}, "other": other} for value in values]
    result = gathered(outputs, [2, 1][: len(values)], overrides={"aux.out": override})
    actual = result["aux"]["out"]
    if isinstance(expected, list) and isinstance(expected[0], int) and override == "cat":
        actual = [len(item) for item in actual]
    assert_equal_trees(actual, expected, "out", atol=1e-6, rtol=0)
    assert result["other"] == other, "another path"


def test_an_output_itself_and_entries_of_a_tuple_can_be_overridden() -> None:
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    mean = gathered(losses, [2, 1], scalars="stack", overrides={"": "mean"})
    assert mean.tolist() == pytest.approx(2.0)
    pairs = [(loss, loss) for loss in losses]
    first, second = gathered(pairs, [2, 1], scalars="stack", overrides={"0": "mean"})
    assert first.tolist() == pytest.approx(2.0) and second.tolist() == [1.0, 4.0]


def test_an_override_holds_for_all_that_is_in_a_container() -> None:
    outputs = [Sample({"a": 1.0, "b": [torch.tensor(2.0)]}, 3.0) for _ in range(2)]
    result = gathered(outputs, [2, 1], overrides={"image": "sum", "b": "stack"})
    assert result.image["a"] == 2.0 and result.label == 3.0
    assert [scalars.tolist() for scalars in result.image["b"]] == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("override", "values", "message"),
    [
        ("mean", ["a", "b"], "expected tensors or numbers for the override 'mean', got str"),
        (
            "sum",
            [torch.ones(2), torch.ones(3)],
            r"tensors of one shape .* got Tensor of shape \(2,",
        ),
        ("cat", [torch.ones(2, 2), torch.ones(2, 3)], "shapes that differ in dim 0 only"),
        ("cat", [1.0, 2.0], "expected tensors, arrays or lists for the override 'cat'"),
        (pad(0), [1.0, 2.0], r"expected tensors of as many dims for pad\(value\), got float"),
    ],
)
def test_an_override_that_cannot_be_followed_names_the_leaf(
    override: Any, values: list[Any], message: str
) -> None:
    with pytest.raises(GatherError, match=rf"output\['x'\]: .*{message}.*"):
        gathered([{"x": value} for value in values], overrides={"x": override})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scalars": "cat"}, r"scalars: expected one of \['merge', 'stack'\], got 'cat'"),
        (
            {"overrides": {"x": "median"}},
            r"overrides\['x'\]: expected a key .* one of .* got 'median'",
        ),
        ({"overrides": ["x"]}, "overrides: expected a mapping such as"),
        ({"sizes": [1, 2, 3]}, "sizes: expected 2 numbers, one per output, got 3"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather([1, 2], "cpu", **options)


@pytest.mark.on("sim")  # It counts the copies between devices.
def test_many_outputs_cross_in_few_copies() -> None:
    *devices, other = devices_of(4)
    outputs = [
        {
            (name, i): torch.full((4,) * (i % 3), i, dtype=dtype, device=device)
            for name, dtype in [("float", torch.float), ("long", torch.long)]
            for i in range(20)
        }
        for device in devices
    ]
    for target in (devices[0], torch.device("cpu"), other):
        torch.sim.reset_copy_stats()
        result = gather(outputs, target)
        copies = {pair: stats.copies for pair, stats in torch.sim.copy_stats().items()}
        others = [device for device in devices if device != target]
        assert copies == {(str(device), str(target)): 2 for device in others}, "one per dtype"
        assert result["float", 4].tolist() == [4.0] * 12


# --- dtypes ------------------------------------------------------------------------------------

INTEGERS = [torch.uint8, torch.int64]
FLOATS = [torch.bfloat16, torch.float64, torch.complex64]


def scalars(values: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    pairs = zip(values, devices_of(len(values)), strict=True)
    return [torch.tensor(value, dtype=dtype, device=device) for value, device in pairs]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_numbers_keep_their_dtype(dtype: torch.dtype) -> None:
    joined = gather(scalars([3, 1, 2], dtype), "cpu", sizes=[3, 1, 2])
    expected = 6 if dtype in INTEGERS else (9 + 1 + 4) / 6
    torch.testing.assert_close(joined, torch.tensor(expected, dtype=dtype))
    stacked = gather(scalars([3, 1, 2], dtype), "cpu", sizes=[3, 1, 2], scalars="stack")
    assert stacked.dtype == dtype and stacked.shape == (3,)
    total = gather(scalars([3, 1], dtype), "cpu", sizes=[2, 1], overrides={"": "sum"})
    torch.testing.assert_close(total, torch.tensor(4, dtype=dtype))


# --- classes that a step makes: each replica has another class of that name


def named(**fields: Any) -> Any:
    return namedtuple("Prediction", fields)(**fields)


def record(**fields: Any) -> Any:
    return dataclasses.make_dataclass("Prediction", fields)(**fields)


@pytest.mark.parametrize("make", [named, record])
@pytest.mark.parametrize("sizes", [(2, 1), (3,)])
def test_equal_names_and_fields_are_enough(make: Any, sizes: tuple[int, ...]) -> None:
    x = torch.randn(sum(sizes), 2)
    outputs = [make(y=part, inner=make(mean=part.mean())) for part in x.split(sizes)]
    joined = gather(outputs, "cpu", sizes=sizes)
    (_, y), (_, inner) = tree.children(joined) or ()
    assert type(joined) is type(outputs[0]) and torch.equal(y, x)
    torch.testing.assert_close(tree.leaves(inner)[0], x.mean())
