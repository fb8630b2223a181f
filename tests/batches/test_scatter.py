"""What is cut goes to its device by the sizes given, in one graph; what cannot be cut is named."""

from __future__ import annotations

import sys
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from containers import Built, Sample, Slotted, Table
from nested_batches import devices_in
from oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import leaves, register_leaf_type, tree
from lightning_dp.parallel.scatter.leaves import slices
from lightning_dp.parallel.scatter.read import BatchSizeError
from lightning_dp.parallel.scatter.shards import cut, scatter
from lightning_dp.parallel.scatter.to_device import to_device

pytestmark = pytest.mark.usefixtures("on")


def root_device() -> torch.device:
    return devices_of(1)[0]


def on_root(node: Any) -> Any:
    return to_device(node, root_device())


def test_every_leaf_is_cut_by_the_same_sizes() -> None:
    batch = UserDict(x=torch.arange(5), names=list("abcde"), nested=[{"y": torch.ones(5, 2)}])
    first, second = cut(on_root(batch), (2, 3))
    assert isinstance(first, UserDict)
    assert devices_in(first) == devices_in(second) == {root_device()}
    assert first["x"].tolist() == [0, 1] and second["x"].tolist() == [2, 3, 4]
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d", "e"]
    assert second["nested"][0]["y"].shape == (3, 2)


class Recorded(Tensor):
    """As MONAI's MetaTensor: what torch makes of one has the first one's records, all of them."""

    is_batch = True
    applied_operations: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        first = next(iter(tree.leaves(args)), None)
        if isinstance(result, Recorded) and isinstance(first, Recorded):
            vars(result).update(vars(first))
        return result


def recorded(rows: Tensor, names: list[str]) -> Recorded:
    result = rows.as_subclass(Recorded)
    result.applied_operations = names
    return result


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    def decollate_batch(batch: Recorded, detach: bool) -> list[Recorded]:
        names = batch.applied_operations
        rows = batch.as_subclass(Tensor)
        return [recorded(row, [name]) for row, name in zip(rows, names, strict=True)]

    def list_data_collate(samples: list[Recorded]) -> Recorded:
        names = [name for sample in samples for name in sample.applied_operations]
        return recorded(torch.stack([sample.as_subclass(Tensor) for sample in samples]), names)

    module = SimpleNamespace(decollate_batch=decollate_batch, list_data_collate=list_data_collate)
    monkeypatch.setitem(sys.modules, "monai.data", module)


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("order", [None, [[3, 0], [], [4, 1, 2]]], ids=["in order", "by cost"])
def test_records_of_samples_go_where_the_samples_go(order: list[list[int]] | None) -> None:
    batch = recorded(on_root(torch.arange(10.0).view(5, 2).requires_grad_()), list("abcde"))
    positions = order or [[0, 1], [], [2, 3, 4]]
    shards = [s for s in cut({"x": batch}, (2, 0, 3), order=order) if s]
    active = [part for part in positions if part]
    for shard, device, part in zip(shards, devices_of(2), active, strict=True):
        shard["x"] = to_device(shard["x"], device)
        assert type(shard["x"]) is Recorded and shard["x"].device == device
        assert shard["x"].applied_operations == [list("abcde")[i] for i in part]
        assert shard["x"][:, 0].tolist() == [2.0 * i for i in part]
    outputs = [{"y": shard["x"] * 2} for shard in shards]
    joined = gather(outputs, "cpu", sizes=[2, 3], order=order and active)["y"]
    assert joined.applied_operations == list("abcde")
    assert torch.equal(joined.as_subclass(Tensor), batch.as_subclass(Tensor).cpu() * 2)
    assert joined.requires_grad


def test_what_has_no_samples_goes_to_every_replica_and_device() -> None:
    row, rest = torch.ones(1, 3), ["words", 3, None, True, {}, torch.tensor(7.0)]
    batch = {"x": torch.zeros(9), "row": row, "table": Table({"w": row}, []), "rest": rest}
    for shard, device in zip(scatter(batch, devices_of(3)), devices_of(3), strict=True):
        assert shard["x"].shape == (3,) and shard["row"].shape == (1, 3) and shard["rest"] == rest
        assert devices_in(shard) == devices_in(shard["table"]) == {device}
        assert type(shard["table"]) is Table


def test_without_samples_there_is_no_shard() -> None:
    shards = scatter({"x": torch.arange(2), "names": ["a", "b"]}, devices_of(4))
    assert [shard is None for shard in shards] == [False, False, True, True]
    assert cut(torch.arange(3), (0, 3, 0))[::2] == [None, None]


@pytest.mark.parametrize("make", [Sample, Slotted])
def test_a_frozen_dataclass_is_cut(make: Any) -> None:
    first, second = cut(on_root(make(torch.arange(3), ["a", "b", "c"])), (1, 2))
    assert type(first) is make
    assert (first.label, second.label) == (["a"], ["b", "c"])


def test_a_dataclass_is_cut_without_running_its_constructor_again() -> None:
    first, _ = cut(on_root(Built(torch.arange(3))), (1, 2))
    assert first.made == "once" and not hasattr(first, "rest")


def test_sparse_tensors_are_cut_where_there_is_no_gradient() -> None:
    matrix = torch.eye(4, 3).to_sparse()
    parts = cut({"a": matrix, "y": torch.zeros(4)}, (1, 3))
    assert torch.equal(torch.cat([part["a"].to_dense() for part in parts]), matrix.to_dense())
    with pytest.raises(TypeError, match=r"without gradient\), got batch\['a'\] .*sparse_coo"):
        cut({"a": matrix.requires_grad_(), "y": torch.zeros(4)}, (1, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    for nested in (torch.nested.nested_tensor(rows, layout=torch.jagged), nested_of(rows)):
        with pytest.raises(TypeError, match=r"strided .*, got batch\['b'\] of layout .*, nested"):
            cut({"b": nested, "y": torch.zeros(2)}, (1, 1))


def nested_of(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows)


class Moving:
    """Goes to a device itself, and says nothing."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


class MovingRows(Moving):
    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key: Any) -> MovingRows:
        return MovingRows(self.x[key])


def test_a_to_that_returns_nothing_moves_all_the_same() -> None:
    whole, devices = MovingRows(on_root(torch.arange(4))), devices_of(2)
    shards = scatter({"rows": whole}, devices)
    assert [shard["rows"].x.tolist() for shard in shards] == [[0, 1], [2, 3]]
    assert [shard["rows"].x.device for shard in shards] == devices
    assert whole.x.device == devices[0]
    assert to_device(Moving(on_root(torch.ones(2))), devices[1]).x.device == devices[1]
    joined = gather([{"rows": Moving(shard["rows"].x)} for shard in shards], "cpu")
    assert [part.x.tolist() for part in joined["rows"]] == [[0, 1], [2, 3]]
    assert {part.x.device.type for part in joined["rows"]} == {"cpu"}


def test_objects_that_may_hide_samples_are_refused() -> None:
    class Hidden:
        def to(self, device: torch.device) -> Hidden:
            return self

    for hidden in (Hidden(), nn.Sequential(nn.Linear(1, 1))):
        with pytest.raises(
            TypeError, match=rf"batch\['h'\] of type .*{type(hidden).__name__}"
        ) as e:
            cut(on_root({"x": torch.zeros(4), "h": hidden}), (2, 2))
        assert "split_batch(batch, sizes)" in str(e.value)


def test_objects_with_as_many_rows_as_the_batch_are_refused() -> None:
    of_samples = SimpleNamespace(ids=torch.arange(4), names=torch.zeros(4, 2))
    of_batch = SimpleNamespace(weights=torch.ones(3), scale=2.0)
    with pytest.raises(
        TypeError, match=r"batch\['h'\] of type SimpleNamespace.* ids, names has"
    ) as e:
        cut(on_root({"x": torch.zeros(4), "h": of_samples}), (2, 2))
    assert "split_batch(batch, sizes)" in str(e.value)
    parts = cut(on_root({"x": torch.zeros(4), "h": of_batch}), (2, 2))
    assert all(part["h"] is of_batch for part in parts)


@pytest.mark.parametrize("sizes", [(2, 1), (5, -1), (2, 2, 1)])
def test_sizes_must_sum_to_the_batch_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BatchSizeError, match=r"sum to the batch size 4, got \(.*Let them sum to 4"):
        cut(on_root(torch.zeros(4)), sizes)
    with pytest.raises(ValueError, match=r"sizes: expected 4 numbers, one per device, got"):
        scatter(torch.zeros(4), devices_of(4), sizes)
    with pytest.raises(BatchSizeError, match=r"a tensor or a list to cut, got dict: .*'scale': 2"):
        scatter({"scale": 2.0, "x": torch.tensor(1.0)}, devices_of(2))


class Records:
    """Samples that only their own class can take apart."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


def test_a_registered_type_is_cut_and_joined_as_its_functions_say() -> None:
    register_leaf_type(
        Records,
        size=lambda leaf, dim: len(leaf.names),
        cut=lambda leaf, sizes, dim: [Records(names) for names in slices(leaf.names, sizes)],
        join=lambda leaves, dim: Records([name for leaf in leaves for name in leaf.names]),
        to=lambda leaf, device: leaf,
    )
    try:
        batch = {"x": torch.arange(3), "records": Records(["a", "b", "c"])}
        shards = scatter(batch, devices_of(2))
        assert [shard["records"].names for shard in shards] == [["a", "b"], ["c"]]
        assert gather(shards, "cpu")["records"].names == ["a", "b", "c"]
        first, second = cut(batch, (1, 2), order=[[2], [0, 1]])
        assert (first["records"].names, second["records"].names) == (["c"], ["a", "b"])
    finally:
        del leaves._registered[Records]


def test_gradients_flow_through_scatter_and_gather_as_on_one_device() -> None:
    x = torch.randn(7, 3, dtype=torch.double, requires_grad=True)
    w = torch.randn(1, 3, dtype=torch.double, requires_grad=True)
    devices = devices_of(4)

    def spread(x: Tensor, w: Tensor) -> Any:
        shards = scatter({"x": x.sin(), "w": w}, devices, [3, 0, 2, 2])
        outputs = [s and {"y": s["x"] * s["w"], "m": (s["x"] @ s["w"].T).mean()} for s in shards]
        return gather(outputs, root_device(), sizes=[3, 0, 2, 2])

    result = spread(x, w)
    expected = {"y": x.sin() * w, "m": (x.sin() @ w.T).mean()}
    for key in ("y", "m"):
        torch.testing.assert_close(result[key].cpu(), expected[key])
        actual = torch.autograd.grad(result[key].cos().sum(), (x, w), retain_graph=True)
        torch.testing.assert_close(actual, torch.autograd.grad(expected[key].cos().sum(), (x, w)))
    assert torch.autograd.gradcheck(lambda x, w: spread(x, w)["y"].cpu(), (x, w))


def test_shards_and_outputs_may_be_changed_in_place() -> None:
    x = torch.ones(5, requires_grad=True)
    shards = scatter(x * 3, devices_of(3))
    for shard in shards:
        shard.mul_(2)
    # Different trailing shapes: a list of the tensors as they arrived.
    outputs = [shard.expand(k + 1, -1).clone() for k, shard in enumerate(shards)]
    with pytest.warns(UserWarning, match="come as a list"):
        arrived = gather([{"a": o, "b": o * 1} for o in outputs], devices_of(1)[0], sizes=[9, 9, 9])
    for tensor in arrived["a"]:
        tensor.mul_(5)
    sum(tensor.sum() for tensor in [*arrived["a"], *arrived["b"]]).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [36.0, 36.0, 72.0, 72.0, 108.0]
