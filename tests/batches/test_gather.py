"""Outputs are gathered into what one device would have returned, in few copies, on any device."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from containers import Boxes, Fixed, ModelOutput, Pair, Rows, Sample
from nested_batches import devices_in
from oracle import assert_equal_trees, devices_of

from lightning_dp.parallel.batch.gather import GatherError, gather
from lightning_dp.parallel.batch.to_device import to_device
from lightning_dp.parallel.links import transfer

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
        ([torch.arange(4), torch.arange(4)], torch.arange(4)),
    ],
    ids=str,
)
def test_gather_returns_what_one_device_would_have(outputs: list[Any], expected: Any) -> None:
    result = gathered(outputs, [2, 1])
    assert_equal_trees(result, expected, "result", atol=1e-12, rtol=0)


def test_nothing_stays_nothing_within_a_tuple() -> None:
    outputs = [(torch.zeros(2, 2), None), (torch.ones(1, 2), None)]
    y, none = gathered(outputs, [2, 1])
    assert y.shape == (3, 2) and none is None


def test_arrays_are_gathered_as_tensors_are() -> None:
    outputs = [{"y": np.ones((2, 3)), "n": np.int64(2), "mean": np.float32(1)}]
    outputs.append({"y": np.zeros((1, 3)), "n": np.int64(1), "mean": np.float32(4)})
    result = gathered(outputs, [2, 1])
    assert isinstance(result["y"], np.ndarray) and result["y"].sum(1).tolist() == [3, 3, 0]
    assert result["n"] == 3 and result["mean"] == np.float32(2)


def test_one_sample_per_shard_is_still_a_sample() -> None:
    rows = [[torch.full((3,), 1.0)], [torch.full((3,), 2.0)]]
    assert [row.tolist() for row in gathered(rows, [1, 1])] == [[1.0] * 3, [2.0] * 3]
    assert gathered([("a",), ("b",)], [1, 1]) == ("a", "b")
    parts = gathered([[torch.zeros(1, 3), torch.zeros(1)]] * 2, [1, 1])
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2,)]


def test_integers_that_every_replica_was_called_with_are_no_counts() -> None:
    assert gathered([4, 4], [4, 4]) == 8


def test_rows_that_are_none_of_samples_are_concatenated_and_said() -> None:
    with pytest.warns(
        UserWarning, match=r"output\['boxes'\]: \(3, 4\), \(0, 4\) of shards of 2, 1"
    ):
        result = gathered([{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(0, 4)}], [2, 1])
    assert result["boxes"].shape == (3, 4)


def test_ragged_outputs_become_a_list() -> None:
    with pytest.warns(
        UserWarning, match=r"do not fit together.*gather_overrides, such as \{'': 's"
    ):
        result = gathered([torch.zeros(2, 3), torch.zeros(1, 5)], [2, 1])
    assert [tuple(t.shape) for t in result] == [(2, 3), (1, 5)]


def test_parts_of_a_batch_are_told_from_one_item_per_sample() -> None:
    parts = gathered([[torch.zeros(2, 4), torch.ones(2)]] * 2, [2, 2])
    assert [tuple(t.shape) for t in parts] == [(4, 4), (4,)]
    boxes = gathered([[torch.zeros(5, 4), torch.zeros(3, 4)]] * 2, [2, 2])
    assert [len(t) for t in boxes] == [5, 3, 5, 3]


def test_outputs_of_different_structure_are_an_error_that_names_the_leaf() -> None:
    with pytest.raises(GatherError, match=r"output\['a'\]: expected the same type"):
        gathered([{"a": {"b": 1}}, {"a": (1, 2)}], [2, 1])


def record(*names: str) -> type[Any]:
    """A named tuple class that a step makes for itself, as every replica does."""
    return namedtuple("Record", names)


def dataclass_of(*names: str) -> type[Any]:
    return make_dataclass("Record", names, namespace={"__module__": __name__})


@pytest.mark.parametrize("make", [record, dataclass_of])
def test_classes_of_one_name_with_the_same_fields_are_one(make: Callable[..., Any]) -> None:
    first, second = make("y", "n"), make("y", "n")
    outputs = [first(torch.ones(2), "a"), second(torch.zeros(1), "a")]
    joined = gather(outputs, "cpu", sizes=[2, 1])
    assert type(joined) is first and joined.y.tolist() == [1, 1, 0] and joined.n == "a"


@pytest.mark.parametrize("make", [record, dataclass_of])
def test_classes_of_one_name_with_other_fields_are_an_error(make: Callable[..., Any]) -> None:
    with pytest.raises(GatherError, match="expected the same type from every replica"):
        gather([make("y", "n")(1, 2), make("n", "y")(1, 2)], "cpu", sizes=[2, 1])


def test_outputs_may_be_of_any_container() -> None:
    for make in (Sample, Pair, lambda x, y: ModelOutput(x=x, y=y), lambda x, y: Fixed({"x": x})):
        result = gathered([make(torch.ones(2), "a"), make(torch.zeros(1), "b")], [2, 1])
        assert type(result) is type(make(0, 0))
        x = result["x"] if hasattr(result, "keys") else next(iter(vars_of(result)))
        assert x.tolist() == [1, 1, 0]


def vars_of(node: Any) -> list[Any]:
    return list(node) if isinstance(node, tuple) else list(vars(node).values())


def test_objects_are_joined_by_their_class_or_listed() -> None:
    joined = gathered([Boxes(torch.ones(2, 4)), Boxes(torch.zeros(1, 4))], [2, 1])
    assert type(joined) is Boxes and joined.x.sum(1).tolist() == [4, 4, 0]
    listed = gathered([Rows(torch.ones(2)), Rows(torch.zeros(1))], [2, 1])
    assert [len(rows) for rows in listed] == [2, 1]
    assert [rows.x.device for rows in listed] == [root_device()] * 2


def test_names_in_a_tuple_are_joined_and_other_tuples_are_not() -> None:
    assert gathered([("a", "b"), ("c", "d")], [2, 2]) == ("a", "b", "c", "d")
    assert gathered([(1, 2.0), (3, 4.0)], [2, 2]) == (4, 3.0)


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
        {
            "loss": torch.tensor(0.5 * i),
            "n": torch.tensor(i),
            "float": 0.5,
            "int": 7,
            "s": ("a", None),
        }
        for i in range(k)
    ]
    result = gathered(outputs, [2] * k, scalars="stack")
    assert result["loss"].tolist() == [0.5 * i for i in range(k)]
    assert result["n"].tolist() == list(range(k)) and result["n"].dtype == torch.long
    assert (result["float"], result["int"], result["s"]) == (0.5, 7, ("a", None))
    assert gathered([torch.tensor(3.0)] * k, scalars="stack").shape == (k,)


@pytest.mark.parametrize(
    ("override", "values", "expected"),
    [
        ("mean", [1.0, 4.0], 2.0),
        ("mean", [2, 1], 5 / 3),
        ("mean", [torch.ones(2), torch.full((2,), 4.0)], torch.full((2,), 2.0)),
        ("mean", [torch.tensor(1), torch.tensor(4)], torch.tensor(2.0)),
        ("sum", [1.5, 4.0], 5.5),
        ("sum", [torch.ones(2, 2), torch.ones(2, 2)], torch.full((2, 2), 2.0)),
        ("sum", [(1.0, torch.ones(2)), (2.0, torch.ones(2))], (3.0, torch.full((2,), 2.0))),
        ("stack", [torch.zeros(4), torch.ones(4)], torch.tensor([[0.0] * 4, [1.0] * 4])),
        ("stack", [1.0, 4.0], torch.tensor([1.0, 4.0])),
        ("stack", [torch.tensor(1)], torch.tensor([1])),
        ("cat", [torch.arange(4), torch.arange(4)], torch.tensor([0, 1, 2, 3] * 2)),
        ("cat", [torch.tensor(1.0), torch.tensor(4.0)], torch.tensor([1.0, 4.0])),
        ("cat", [(1, 2), (3, 4)], (1, 2, 3, 4)),
        ("cat", [[torch.ones(2, 4), torch.ones(2, 4)], [torch.ones(1, 4)] * 2], [2, 2, 1, 1]),
        ("first", [torch.ones(2), torch.zeros(1)], torch.ones(2)),
        ("first", ["a", "b"], "a"),
        ("list", [torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.zeros(1)]),
        ("list", [{"x": 1}, {"x": 1}], [{"x": 1}, {"x": 1}]),
        ("list", ["a"], ["a"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["out", "aux.out"])
def test_an_override_replaces_the_rule(
    override: Any, values: list[Any], expected: Any, key: str
) -> None:
    other = [{"out": "as ever"}] if key == "aux.out" else None
    outputs = [{"aux": {"out": value}, "other": other} for value in values]
    result = gathered(outputs, [2, 1][: len(values)], overrides={key: override})
    actual = result["aux"]["out"]
    if isinstance(expected, list) and isinstance(expected[0], int):
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
        ("mean", ["a", "b"], "expected tensors or numbers for the override 'mean', got str, str"),
        (
            "sum",
            [torch.ones(2), torch.ones(3)],
            r"tensors of one shape .* got Tensor of shape \(2,",
        ),
        ("cat", [torch.ones(2, 2), torch.ones(2, 3)], "shapes that differ in dim 0 only"),
        ("cat", [1.0, 2.0], "expected tensors, arrays or lists for the override 'cat'"),
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


def test_outputs_end_up_on_any_device() -> None:
    *devices, other = devices_of(4)
    outputs = [{"y": torch.ones(2, device=d), "m": torch.tensor(1.0, device=d)} for d in devices]
    everywhere = [*devices, other, torch.device("cpu")]
    for device in everywhere:
        for target in (device, str(device)):
            assert devices_in(gather(outputs, target)) == {device}


@pytest.mark.sim_only("It counts the copies between devices.")
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
        copies = {pair: stats.count for pair, stats in torch.sim.copy_stats().items()}
        others = [device for device in devices if device != target]
        assert copies == {(str(device), str(target)): 2 for device in others}, "one per dtype"
        assert result["float", 4].tolist() == [4.0] * 12


def test_copies_to_the_cpu_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all were issued: the copies of several devices overlap."""
    waited: list[tuple[torch.device, ...]] = []
    monkeypatch.setattr(transfer, "host_waits_for", lambda *sources: waited.append(sources))
    devices = devices_of(3)
    outputs = [{"a": torch.ones(2, device=d), "b": torch.ones(2, device=d).long()} for d in devices]
    gather(outputs, "cpu")
    assert waited == ([] if devices[0].type == "cpu" else [tuple(dict.fromkeys(devices))])
    waited.clear()
    gather(outputs, devices[0])
    assert not waited, "work on a device waits for the copies by itself"


def test_a_squeeze_that_took_the_dim_of_one_sample() -> None:
    """`net(x).squeeze()` is 0-dim for a shard of one sample, and a row of numbers for others."""
    outputs = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    assert gather(outputs, "cpu", sizes=(2, 1)).tolist() == [1, 2, 3]
    with pytest.warns(UserWarning, match="do not fit together"):
        assert isinstance(gather(outputs, "cpu", sizes=(2, 4)), list)
