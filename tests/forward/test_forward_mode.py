"""Forward mode in the Trainer: whole-batch losses and manual optimisation, as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from support.device_kinds import on_separate
from support.oracle import (
    Classifier,
    assert_same,
    devices_of,
    loader,
    run,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.usefixtures("on"),
    # `forward` logs, which is for other steps.
    pytest.mark.filterwarnings(r"ignore:.*predict_step. expected calls that are spread"),
]


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    """Every sample against all others of the batch."""
    z = F.normalize(z, dim=1)
    logits = z @ z.T / 0.5
    others = 1 - torch.eye(len(z)).to(z)
    same = (y[:, None] == y).to(z) * others
    log_p = logits - (logits.exp() * others).sum(1, keepdim=True).add(1e-3).log()
    return -(log_p * same).sum() / (same.sum() + 1)


def dice(z: Tensor, y: Tensor) -> Tensor:
    """Sums over the batch in numerator and denominator."""
    p, truth = z.softmax(1), F.one_hot(y, 3).to(z)
    return (1 - 2 * (p * truth).sum(0) / (p.sum(0) + truth.sum(0) + 1)).mean()


LOSSES = {"contrastive": contrastive, "dice": dice}


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


class WholeBatch(Classifier):
    """Losses over the whole batch; logs, metrics and lists in the step and inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = nn.ModuleDict({stage: accuracy() for stage in ("fit", "other")})
        self.error = nn.ModuleDict(
            {stage: torchmetrics.MeanSquaredError() for stage in ("fit", "other")}
        )
        self.batches: list[Tensor] = []
        self.shards: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        self.log("inside/mean", z.mean())
        stage = "fit" if self.training else "other"
        self.error[stage](z.sum(1), x.sum(1))
        self.log(f"{stage}/error", self.error[stage], on_epoch=True)
        self.shards.append(z.detach())
        return z

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self(x)
        losses = {name: loss(z, y) for name, loss in LOSSES.items()}
        self.log_dict({f"loss/{name}": loss for name, loss in losses.items()})
        stage = "fit" if self.training else "other"
        self.acc[stage](z, y)
        self.log(f"{stage}/acc", self.acc[stage])
        self.batches.append(z.detach())
        return sum(losses.values())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0])
        return {"z": z, "normal": z / z.square().sum().sqrt(), "names": list("abc")}

    def on_validation_epoch_end(self) -> None:
        z, same = torch.cat(self.batches), torch.cat(self.shards)
        assert torch.equal(z, same)
        self.log(
            "val/positions", z.double().mean(1) @ torch.linspace(0, 1, len(z)).to(z.device).double()
        )
        self.batches.clear()
        self.shards.clear()


def forward_mode(**options: Any) -> dict[str, Any]:
    return {"mode": "forward", **options}


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (4, {"weights": [0, 1, 2, 1], "executor": "threads"}),
        (3, {"output_device": "cpu", "split": "chunk", "parallel_modules": ["net"]}),
    ],
    ids=str,
)
def test_losses_over_the_whole_batch_are_exact(devices: int, options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    actual = run(WholeBatch, devices, strategy=forward_mode(**options), max_epochs=2)
    assert_same(actual, run(WholeBatch, 1, max_epochs=2))


# Places


class Places(Classifier):
    """Writes down where things are."""

    def __init__(self, saw: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.saw = saw

    def forward(self, x: Tensor) -> Tensor:
        self.saw("inside", (x.device, self.device))
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        self.saw("batch", batch[0].device)
        self.saw("self", self.device)
        z = self(batch[0])
        self.saw("outputs", z.device)
        loss = dice(z, batch[1].to(z.device))
        self.saw("loss", loss.device)
        return loss


@on_separate
@pytest.mark.usefixtures("unchecked")  # it names the places: on one device they are others
@pytest.mark.parametrize(
    ("output_device", "move_batch"), [(None, True), ("cpu", True), (1, False), ("other", True)]
)
def test_everything_outside_of_forward_is_on_the_output_device(
    output_device: Any, move_batch: bool
) -> None:
    root, second, _, other = devices_of(4)
    here = {None: root, "cpu": torch.device("cpu"), 1: second, "other": other}[output_device]
    output_device = other if output_device == "other" else output_device
    options = forward_mode(output_device=output_device, move_batch=move_batch, executor="inorder")
    seen: dict[str, set[Any]] = {}
    module = Places(lambda name, place: seen.setdefault(name, set()).add(place))
    job = trainer(3, DataParallelStrategy(**options), max_epochs=1)
    job.fit(module, loader(), loader())
    assert seen["batch"] == {here if move_batch else torch.device("cpu")}
    assert seen["self"] == seen["outputs"] == seen["loss"] == {here}
    assert seen["inside"] == {(device, device) for device in devices_of(3)}


# Buffers, copies, failures


@pytest.mark.parametrize("on", ["cpu"], indirect=True)  # accelerators recompute on many threads
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_call(reentrant: bool) -> None:
    class Recomputing(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            z = checkpoint(self, x.requires_grad_(), use_reentrant=reentrant)
            return contrastive(z, y)

    torch.set_default_dtype(torch.float64)
    assert_same(run(Recomputing, 3, strategy=forward_mode()), run(Recomputing, 1))
