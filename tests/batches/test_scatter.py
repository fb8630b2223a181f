"""What is cut goes to its device by the sizes given, in one graph; what cannot be cut is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.containers import Built, Sample, Table
from support.nested_batches import devices_in
from support.oracle import Classifier, assert_same, devices_of, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp.parallel.gather import gather
from lightning_dp.parallel.scatter import BatchSizeError, scatter, to_device
from lightning_dp.parallel.scatter.shards import cut


@pytest.mark.usefixtures("on")
def test_what_has_no_samples_goes_to_every_replica_and_device() -> None:
    row, rest = torch.ones(1, 3), ["words", 3, None, True, {}, torch.tensor(7.0)]
    batch = {"x": torch.zeros(9), "row": row, "table": Table({"w": row}, []), "rest": rest}
    for shard, device in zip(scatter(batch, devices_of(3)), devices_of(3), strict=True):
        assert shard["x"].shape == (3,) and shard["row"].shape == (1, 3) and shard["rest"] == rest
        assert devices_in(shard) == devices_in(shard["table"]) == {device}
        assert type(shard["table"]) is Table


def test_a_dataclass_is_cut_without_running_its_constructor_again() -> None:
    first, second = cut(Sample(torch.arange(3), ["a", "b", "c"]), (1, 2))
    assert type(first) is Sample and (first.label, second.label) == (["a"], ["b", "c"])
    first, _ = cut(Built(torch.arange(3)), (1, 2))
    assert first.made == "once" and not hasattr(first, "rest")


class Moving:
    """Goes to a device itself, and says nothing."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


@pytest.mark.usefixtures("on")
def test_a_to_that_returns_nothing_moves_all_the_same() -> None:
    devices = devices_of(2)
    whole = Moving(torch.ones(2).to(devices[0]))
    assert to_device(whole, devices[1]).x.device == devices[1]
    assert whole.x.device == devices[0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (
        lambda: torch.eye(4, 3).to_sparse(),
        r"strided layout, got batch\['h'\] of layout torch.sparse_coo",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.zeros(n, 3) for n in (2, 4, 1, 5)]),
        r"strided layout, got batch\['h'\] of layout .*, nested",
    ),
    "an object with to": (
        lambda: Moving(torch.ones(4)),
        r"batch\['h'\] of type Moving, .*split_batch\(batch, sizes\)",
    ),
    "a module": (lambda: nn.Linear(1, 1), r"batch\['h'\] of type Linear"),
    "an object with rows": (
        lambda: SimpleNamespace(ids=torch.arange(4), names=torch.zeros(4, 2)),
        r"batch\['h'\] of type SimpleNamespace.* ids, names has",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        cut({"x": torch.zeros(4), "h": make()}, (2, 2))


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


def pairs() -> DataLoader[Any]:
    """Two rows for each label."""
    rows = torch.randn(23, 2, 10, generator=torch.Generator().manual_seed(0)).double()
    samples = [(pair, i % 3) for i, pair in enumerate(rows)]

    def collate(samples: list[tuple[Tensor, int]]) -> Any:
        return torch.cat([rows for rows, _ in samples]), torch.tensor([y for _, y in samples])

    return DataLoader(samples, batch_size=9, collate_fn=collate)


class OfPairs(Classifier):
    """Sums the logits of a sample's rows."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        sums: Tensor = self.net(batch[0]).view(-1, 2, 3).sum(1)
        return sums

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.predict_step(batch, batch_idx), batch[1])
        self.log("loss", loss, on_epoch=True, batch_size=len(batch[1]))
        return loss

    validation_step = test_step = training_step


class Splitting(OfPairs):
    missing = 0

    def batch_size(self, batch: Any) -> int:
        return len(batch[1])

    def split_batch(self, batch: Any, sizes: tuple[int, ...]) -> list[Any]:
        rows = batch[0].split([2 * size for size in sizes])
        return list(zip(rows, batch[1].split(sizes), strict=True))[self.missing :]


@pytest.mark.usefixtures("on")
def test_what_only_the_module_can_cut_trains_as_on_one_device() -> None:
    results = [
        run(lambda: Splitting().double(), k, data=pairs, precision="64-true") for k in (4, 1)
    ]
    assert_same(*results)


def test_without_split_batch_or_with_a_wrong_one_the_error_names_it() -> None:
    with pytest.raises(ValueError, match=r"\[0\] has 18 and .*\[1\] has 9.*split_batch"):
        run(lambda: OfPairs().double(), 2, data=pairs)

    class Wrong(Splitting):
        missing = 1

    with pytest.raises(ValueError, match=r"Wrong.split_batch: expected one shard for each"):
        run(lambda: Wrong().double(), 3, data=pairs)
