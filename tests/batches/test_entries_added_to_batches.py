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
from torch.utils.data import DataLoader, default_collate

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

N = 22


class Adding(Classifier):
    """Adds to its batch the outputs of samples, a mean, names, and an entry that is a dict."""

    def sample_cost(self, batch: Any) -> Tensor:
        return batch["id"] % 5 + 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch["x"])
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        batch["out"], batch["mean"] = out, losses.mean()
        batch["names"] = [f"sample {i}" for i in batch["id"].tolist()]
        batch["more"] = {"losses": losses, "scale": 2.0}
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class TwiceForOneBatch(Adding):
    """The optimizer's closure runs the step again: the entries are those of the last time."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Deciding(Adding):
    """Whether any sample is large: one device's answer is not known from those of two replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["any"] = (batch["id"] > 20).any()
        return super().training_step(batch, batch_idx)


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen.append(detached({key: batch[key] for key in ("out", "mean", "names", "more")}))

    on_validation_batch_end = on_train_batch_end


def detached(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: detached(value) for key, value in node.items()}
    return node.detach().cpu() if isinstance(node, Tensor) else node


def batches(kind: type[Any], size: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    x, y = torch.randn(N, 10), torch.randint(3, (N,))
    samples = [{"x": x[i], "y": y[i], "id": i} for i in range(N)]
    return DataLoader(samples, batch_size=size, collate_fn=lambda rows: kind(default_collate(rows)))


def seen(make: Any, devices: int, data: DataLoader[Any], split: Any = "even") -> list[Any]:
    torch.manual_seed(0)
    watch = Watch()
    job = trainer(devices, DataParallelStrategy(split=split), max_epochs=1, callbacks=[watch])
    job.fit(make(), data, data)
    return watch.seen


@pytest.mark.parametrize("split", ["even", "cost"])
@pytest.mark.parametrize(("devices", "size", "kind"), [(2, 5, dict), (3, 7, UserDict)])
def test_entries_are_joined_as_outputs_are(kind: Any, devices: int, size: int, split: Any) -> None:
    expected = seen(Adding, 1, batches(kind, size))
    got = seen(Adding, devices, batches(kind, size), split)
    assert len(got) == len(expected) > 0
    assert_equal_trees(got, expected, "entries", atol=1e-5, rtol=1e-4)


def test_a_step_that_runs_again_puts_its_latest_entries_there() -> None:
    one, two = (seen(TwiceForOneBatch, devices, batches(dict, 8)) for devices in (1, 2))
    assert_equal_trees(two, one, "entries", atol=1e-4, rtol=1e-3)


def test_what_has_no_joint_value_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"batch\['any'\].*left out of the batch after"):
        assert seen(Deciding, 2, batches(dict, 22))
