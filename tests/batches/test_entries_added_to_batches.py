"""What a step puts into its batch is there for hooks and callbacks afterwards, as on one device."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from oracle import Classifier, assert_equal_trees, trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

N = 22


class Adding(Classifier):
    """Adds to its batch the outputs of samples, a mean, names, and an entry that is a dict."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def sample_cost(self, batch: Any) -> Tensor:
        return batch["id"] % 5 + 1

    def shared_step(self, batch: Any) -> Tensor:
        out = self(batch["x"])
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        batch["out"], batch["mean"] = out, losses.mean()
        batch["names"] = [f"sample {i}" for i in batch["id"].tolist()]
        batch["more"] = {"losses": losses, "scale": 2.0}
        return losses.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.shared_step(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch)


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        self.seen.append({key: batch[key] for key in ("out", "mean", "names", "more")})

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int, j: int = 0
    ) -> None:
        self.seen.append({key: batch[key] for key in ("out", "mean", "names", "more")})


def batches(kind: type[Any], size: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    x, y = torch.randn(N, 10), torch.randint(3, (N,))
    samples = [{"x": x[i], "y": y[i], "id": i} for i in range(N)]
    collate = torch.utils.data.default_collate
    return DataLoader(samples, batch_size=size, collate_fn=lambda rows: kind(collate(rows)))


def seen(devices: int, kind: type[Any], size: int, manual: bool, split: Any) -> list[Any]:
    torch.manual_seed(0)
    watch, data = Watch(), batches(kind, size)
    job = trainer(devices, DataParallelStrategy(split=split), max_epochs=1, callbacks=[watch])
    job.fit(Adding(manual), data, data)
    return [detached(entries) for entries in watch.seen]


def detached(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: detached(value) for key, value in node.items()}
    return node.detach().cpu() if isinstance(node, Tensor) else node


@pytest.mark.parametrize("split", ["even", "cost"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(("devices", "size"), [(2, 5), (3, 7), (4, 3)])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_entries_are_joined_as_outputs_are(
    kind: type[Any], devices: int, size: int, manual: bool, split: Any
) -> None:
    expected = seen(1, kind, size, manual, "even")
    got = seen(devices, kind, size, manual, split)
    assert len(got) == len(expected) > 0
    assert_equal_trees(got, expected, "entries", atol=1e-5, rtol=1e-4)


class TwiceForOneBatch(Adding):
    """The optimizer's closure runs the step again: the entries are those of the last time."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_a_step_that_runs_again_puts_its_latest_entries_there() -> None:
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        watch = Watch()
        data = batches(dict, 8)
        job = trainer(devices, max_epochs=1, callbacks=[watch])
        job.fit(TwiceForOneBatch(False), data, data)
        found.append([detached(entries) for entries in watch.seen])
    assert_equal_trees(found[1], found[0], "entries", atol=1e-4, rtol=1e-3)


class Deciding(Adding):
    """Whether any sample is large: of two replicas' answers nobody knows which is one device's."""

    def shared_step(self, batch: Any) -> Tensor:
        loss = super().shared_step(batch)
        batch["any"] = (batch["id"] > 20).any()
        return loss


def test_what_has_no_joint_value_is_left_out_and_told() -> None:
    watch, data = Watch(), batches(dict, 22)
    with pytest.warns(UserWarning, match=r"batch\['any'\].*left out of the batch after"):
        job = trainer(2, max_epochs=1, callbacks=[watch], limit_val_batches=0)
        job.fit(Deciding(False), data, data)
    assert len(watch.seen) == 1
