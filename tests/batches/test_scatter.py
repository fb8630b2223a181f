"""What is cut goes to its device by the sizes given, in one graph; what cannot be cut is named."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.containers import Built, Slotted, Table
from support.nested_batches import devices_in
from support.oracle import Classifier, assert_same, devices_of, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import (
    BatchSizeError,
    scatter,
    to_device,
)
from lightning_dp.parallel.scatter.shards import cut


def test_every_leaf_is_cut_by_the_same_sizes() -> None:
    batch = UserDict(x=torch.arange(5), names=list("abcde"), nested=[{"y": torch.ones(5, 2)}])
    first, second = cut(batch, (2, 3))
    assert isinstance(first, UserDict)
    assert first["x"].tolist() == [0, 1] and second["x"].tolist() == [2, 3, 4]
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d", "e"]
    assert second["nested"][0]["y"].shape == (3, 2)


@pytest.mark.usefixtures("on")
def test_what_has_no_samples_goes_to_every_replica_and_device() -> None:
    row, rest = torch.ones(1, 3), ["words", 3, None, True, {}, torch.tensor(7.0)]
    batch = {"x": torch.zeros(9), "row": row, "table": Table({"w": row}, []), "rest": rest}
    for shard, device in zip(scatter(batch, devices_of(3)), devices_of(3), strict=True):
        assert shard["x"].shape == (3,) and shard["row"].shape == (1, 3) and shard["rest"] == rest
        assert devices_in(shard) == devices_in(shard["table"]) == {device}
        assert type(shard["table"]) is Table


def test_without_samples_there_is_no_shard() -> None:
    shards = scatter({"x": torch.arange(2), "names": ["a", "b"]}, ["cpu"] * 4)
    assert [shard is None for shard in shards] == [False, False, True, True]
    assert cut(torch.arange(3), (0, 3, 0))[::2] == [None, None]


def test_a_dataclass_is_cut_without_running_its_constructor_again() -> None:
    first, second = cut(Slotted(torch.arange(3), ["a", "b", "c"]), (1, 2))
    assert type(first) is Slotted and (first.label, second.label) == (["a"], ["b", "c"])
    first, _ = cut(Built(torch.arange(3)), (1, 2))
    assert first.made == "once" and not hasattr(first, "rest")


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


class Broken(MovingRows):
    def __getitem__(self, key: Any) -> Any:
        raise KeyError("a fault of the class")


@pytest.mark.usefixtures("on")
def test_a_to_that_returns_nothing_moves_all_the_same() -> None:
    devices = devices_of(2)
    whole = MovingRows(torch.arange(4).to(devices[0]))
    shards = scatter({"rows": whole}, devices)
    assert [shard["rows"].x.tolist() for shard in shards] == [[0, 1], [2, 3]]
    assert [shard["rows"].x.device for shard in shards] == devices
    assert whole.x.device == devices[0]
    assert to_device(Moving(torch.ones(2).to(devices[0])), devices[1]).x.device == devices[1]


def nested(layout: torch.layout) -> Tensor:
    rows = [torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(1, 3), torch.zeros(5, 3)]
    return torch.nested.nested_tensor(rows, layout=layout)


REFUSED = {
    "sparse": (
        lambda: torch.eye(4, 3).to_sparse(),
        TypeError,
        r"strided.*, got batch\['h'\] .*sparse_coo",
    ),
    "nested": (
        lambda: nested(torch.strided),
        TypeError,
        r"strided.*, got batch\['h'\] of layout .*, nested",
    ),
    "jagged": (
        lambda: nested(torch.jagged),
        TypeError,
        r"strided.*, got batch\['h'\] of layout .*, nested",
    ),
    "an object with to": (
        lambda: Moving(torch.ones(4)),
        TypeError,
        r"batch\['h'\] of type Moving, .*split_batch\(batch, sizes\)",
    ),
    "a module": (lambda: nn.Linear(1, 1), TypeError, r"batch\['h'\] of type Linear"),
    "an object with rows": (
        lambda: SimpleNamespace(ids=torch.arange(4), names=torch.zeros(4, 2)),
        TypeError,
        r"batch\['h'\] of type SimpleNamespace.* ids, names has",
    ),
    "a class of a library that fails": (lambda: Broken(torch.ones(4)), KeyError, "of the class"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        cut({"x": torch.zeros(4), "h": make()}, (2, 2))
    assert kind is TypeError or caught.value.__notes__ == ["[cutting batch['h'], a Broken]"]


def test_objects_with_other_rows_go_to_every_replica() -> None:
    of_batch = SimpleNamespace(weights=torch.ones(3), scale=2.0)
    parts = cut({"x": torch.zeros(4), "h": of_batch}, (2, 2))
    assert all(part["h"] is of_batch for part in parts)


@pytest.mark.parametrize("sizes", [(2, 1), (5, -1), (2, 2, 1)])
def test_sizes_must_sum_to_the_batch_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BatchSizeError, match=r"sum to the batch size 4, got \(.*Let them sum to 4"):
        cut(torch.zeros(4), sizes)
    with pytest.raises(ValueError, match=r"sizes: expected 4 numbers, one per device, got"):
        scatter(torch.zeros(4), ["cpu"] * 4, sizes)
    with pytest.raises(BatchSizeError, match=r"a tensor or a list to cut, got dict: .*'scale': 2"):
        scatter({"scale": 2.0, "x": torch.tensor(1.0)}, ["cpu"] * 2)


@pytest.mark.usefixtures("on")
def test_gradients_flow_through_scatter_and_gather_as_on_one_device() -> None:
    x = torch.randn(7, 3, dtype=torch.double, requires_grad=True)
    w = torch.randn(1, 3, dtype=torch.double, requires_grad=True)
    devices = devices_of(4)

    def spread(x: Tensor, w: Tensor) -> Any:
        shards = scatter({"x": x.sin(), "w": w}, devices, [3, 0, 2, 2])
        outputs = [s and {"y": s["x"] * s["w"], "m": (s["x"] @ s["w"].T).mean()} for s in shards]
        return gather(outputs, devices[0], sizes=[3, 0, 2, 2])

    result = spread(x, w)
    expected = {"y": x.sin() * w, "m": (x.sin() @ w.T).mean()}
    for key in ("y", "m"):
        torch.testing.assert_close(result[key].cpu(), expected[key])
        actual = torch.autograd.grad(result[key].cos().sum(), (x, w), retain_graph=True)
        torch.testing.assert_close(actual, torch.autograd.grad(expected[key].cos().sum(), (x, w)))
    assert torch.autograd.gradcheck(lambda x, w: spread(x, w)["y"].cpu(), (x, w))


@pytest.mark.usefixtures("on")
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


# --- a module's own `split_batch(batch, sizes)`


def bag_loader() -> DataLoader[Any]:
    """Bags of 0 to 4 instances: one label and count per bag, all instances in one tensor."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 5, (23,), generator=generator).tolist()
    bags = [(torch.randn(c, 10, generator=generator).double(), c % 3) for c in counts]

    def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return {
            "label": torch.tensor([label for _, label in samples]),
            "count": torch.tensor([len(bag) for bag, _ in samples]),
            "instances": torch.cat([bag for bag, _ in samples]),
        }

    return DataLoader(bags, batch_size=9, collate_fn=collate)


class BagClassifier(Classifier):
    """Sums the logits of a bag's instances."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        owner = torch.repeat_interleave(batch["count"])
        sums = torch.zeros(len(batch["label"]), 3, dtype=torch.double, device=self.device)
        return sums.index_add(0, owner, self.net(batch["instances"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.predict_step(batch, batch_idx), batch["label"])
        self.log("loss", loss, on_epoch=True, batch_size=len(batch["label"]))
        return loss

    validation_step = test_step = training_step


class Splitting(BagClassifier):
    missing = 0

    def batch_size(self, batch: dict[str, Tensor]) -> int:
        return len(batch["count"])

    def split_batch(self, batch: dict[str, Tensor], sizes: tuple[int, ...]) -> list[Any]:
        counts = batch["count"].split(list(sizes))
        instances = batch["instances"].split([int(c.sum()) for c in counts])
        columns = zip(batch["label"].split(list(sizes)), counts, instances, strict=True)
        return [{"label": x, "count": c, "instances": i} for x, c, i in columns][self.missing :]


@pytest.mark.usefixtures("on")
def test_what_only_the_module_can_cut_trains_as_on_one_device() -> None:
    results = [
        run(lambda: Splitting().double(), k, data=bag_loader, precision="64-true") for k in (4, 1)
    ]
    assert_same(*results)


def test_without_split_batch_or_with_a_wrong_one_the_error_names_it() -> None:
    with pytest.raises(ValueError, match=r"'label'.*'instances'.*batch_size.*split_batch"):
        run(lambda: BagClassifier().double(), 2, data=bag_loader)

    class Wrong(Splitting):
        missing = 1

    with pytest.raises(ValueError, match=r"Wrong.split_batch: expected one shard for each"):
        run(lambda: Wrong().double(), 3, data=bag_loader)
