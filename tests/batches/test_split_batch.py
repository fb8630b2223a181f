"""A module's own `split_batch(batch, sizes)` cuts what the engine cannot know how to cut."""

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, devices_of, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split.arithmetic import even

pytestmark = pytest.mark.usefixtures("on")


def bags(n: int = 23) -> list[tuple[Tensor, int]]:
    """Bags of 0 to 4 instances, each with a label."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 5, (n,), generator=generator).tolist()
    return [(torch.randn(c, 10, generator=generator).double(), c % 3) for c in counts]


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """One label and count per bag, and all instances of all bags in one tensor."""
    return {
        "label": torch.tensor([label for _, label in samples]),
        "count": torch.tensor([len(bag) for bag, _ in samples]),
        "instances": torch.cat([bag for bag, _ in samples]),
    }


def bag_loader() -> DataLoader[Any]:
    return DataLoader(bags(), batch_size=9, collate_fn=collate)


class BagClassifier(Classifier):
    """Sums the logits of a bag's instances."""

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        owner = torch.repeat_interleave(batch["count"])
        sums = torch.zeros(len(batch["label"]), 3, dtype=torch.double, device=self.device)
        return sums.index_add(0, owner, self.net(batch["instances"]))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch), batch["label"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_epoch=True, batch_size=len(batch["label"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch["label"]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch)


class Splitting(BagClassifier):
    def batch_size(self, batch: dict[str, Tensor]) -> int:
        return len(batch["count"])

    def split_batch(self, batch: dict[str, Tensor], sizes: tuple[int, ...]) -> list[Any]:
        counts = batch["count"].split(list(sizes))
        instances = batch["instances"].split([int(c.sum()) for c in counts])
        columns = zip(batch["label"].split(list(sizes)), counts, instances, strict=True)
        return [{"label": x, "count": c, "instances": i} for x, c, i in columns]


@pytest.mark.parametrize("devices", [2, 4])
def test_what_only_the_module_can_cut_trains_as_on_one_device(devices: int) -> None:
    def make() -> Splitting:
        return Splitting().double()

    expected = run(make, 1, data=bag_loader, precision="64-true")
    assert_same(run(make, devices, data=bag_loader, precision="64-true"), expected)


def test_without_it_the_error_names_both_leaves_and_the_hook() -> None:
    with pytest.raises(ValueError, match=r"'label'.*'instances'.*batch_size.*split_batch"):
        run(lambda: BagClassifier().double(), 2, data=bag_loader)


def test_a_wrong_number_of_shards_is_an_error() -> None:
    class Wrong(Splitting):
        def split_batch(self, batch: dict[str, Tensor], sizes: tuple[int, ...]) -> list[Any]:
            return super().split_batch(batch, sizes)[:-1]

    with pytest.raises(ValueError, match=r"Wrong.split_batch: expected one shard for each"):
        run(lambda: Wrong().double(), 3, data=bag_loader)


def test_in_forward_mode_it_gets_the_arguments_of_the_call() -> None:
    class TimeMajor(nn.Module):
        """A recurrent layer whose state has its batch in dim 1."""

        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor, *, state: Tensor) -> Tensor:
            output: Tensor = self.rnn(x, state)[0]
            return output

        def batch_size(self, batch: dict[Any, Tensor]) -> int:
            return len(batch[0])

        def split_batch(self, batch: dict[Any, Tensor], sizes: tuple[int, ...]) -> list[Any]:
            pairs = zip(
                batch[0].split(list(sizes)), batch["state"].split(list(sizes), 1), strict=True
            )
            return [{0: x, "state": state.contiguous()} for x, state in pairs]

    devices = devices_of(3)
    net = TimeMajor().to(devices[0])
    x, state = torch.randn(5, 2, 3).to(devices[0]), torch.randn(1, 5, 4).to(devices[0])
    expected = net(x, state=state)
    engine = ForwardParallel(net, devices, output_device=devices[0], split=lambda n: even(n, 3))
    with engine.spreading():
        result = net(x, state=state)
    engine.close()
    assert engine.last_sizes == (2, 2, 1)
    torch.testing.assert_close(result.cpu(), expected.cpu())
