"""Samples of unequal cost are cut into shards of about the same cost."""

from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.scatter.shards import cut

pytestmark = pytest.mark.usefixtures("on")

SEQUENCES = 53


def sequences() -> list[dict[str, Any]]:
    """Sequences of lognormal length, each with a name, a label and a score."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randn(SEQUENCES, generator=draw).exp().mul(4).ceil().clamp(max=30).long()
    return [
        {
            "name": f"sequence {i}",
            "x": torch.randn(int(length), 10, generator=draw, dtype=torch.double),
            "y": i % 3,
        }
        for i, length in enumerate(lengths)
    ]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = [len(sample["x"]) for sample in samples]
    return {
        "name": [sample["name"] for sample in samples],
        "x": nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True),
        "y": torch.tensor([sample["y"] for sample in samples]),
        "lengths": torch.tensor(lengths),
    }


def data() -> DataLoader[Any]:
    return DataLoader(sequences(), batch_size=25, collate_fn=collate)


class Reader(Classifier):
    """Classifies the mean of a sequence; collects and returns in the batch's order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def sample_cost(self, batch: Any) -> Tensor:
        costs: Tensor = batch["lengths"]
        return costs

    def forward(self, batch: Any) -> Tensor:
        z: Tensor = self.net(batch["x"]).sum(1) / batch["lengths"][:, None]
        return z

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.names.extend(batch["name"])
        return {"loss": super().training_step(batch, batch_idx), "name": batch["name"]}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"z": self(batch), "name": batch["name"], "first": batch["x"][:, 0]}


def make() -> Reader:
    return Reader().double()


@pytest.mark.parametrize("cost", [None, "lengths"])
def test_everything_is_as_on_one_device_in_the_order_of_the_batch(cost: str | None) -> None:
    options = {"split": "cost", "sample_cost": cost}
    expected = run(make, 1, data=data, precision="64-true")
    result = run(make, 3, strategy=options, data=data, precision="64-true")
    assert_same(result, expected)
    assert result.module.names == expected.module.names


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ("size", r"sample_cost='size': expected an entry 'size' in the batch, got \['lengths', "),
        ("x", r"sample_cost='x': expected 25 finite numbers .* got Tensor of shape \(25, "),
        ("name", r"sample_cost='name': expected 25 finite numbers .* got list: "),
    ],
)
def test_costs_that_are_none_are_refused(cost: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make, 2, strategy={"split": "cost", "sample_cost": cost}, data=data)


def test_a_module_that_cuts_batches_itself_cannot_be_split_by_cost() -> None:
    class Cutting(Reader):
        def split_batch(self, batch: Any, sizes: Any) -> list[Any]:
            return cut(batch, sizes)

    with pytest.raises(ValueError, match=r"expected no split_batch on .*Cutting, got one"):
        run(lambda: Cutting().double(), 2, strategy={"split": "cost"}, data=data)


def test_options_of_the_cut_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a method sample_cost\(batch\) on Classifier"):
        run(Classifier, 2, strategy={"split": "cost"})
    with pytest.raises(
        ValueError, match=r"sample_cost: expected with split='cost' .* got 'lengths'"
    ):
        DataParallelStrategy(sample_cost="lengths")
    with pytest.raises(ValueError, match="dim: expected an integer from -64 to 63, got '0'"):
        DataParallelStrategy(dim="0")  # type: ignore[arg-type]  # that is the mistake
