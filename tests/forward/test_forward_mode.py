"""Forward mode in the Trainer: whole-batch losses and manual optimisation, as on one device."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from support.device_kinds import on_separate
from support.forward_twins import said
from support.oracle import (
    Classifier,
    Run,
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


def triplet(z: Tensor, y: Tensor) -> Tensor:
    """The farthest of the same class and the nearest of another one, in the whole batch."""
    distance = (z[:, None] - z).square().sum(2)
    same = y[:, None] == y
    far = (distance * same).amax(1)
    near = (distance + 1e3 * same).amin(1)
    return F.relu(far - near + 1).mean()


def dice(z: Tensor, y: Tensor) -> Tensor:
    """Sums over the batch in numerator and denominator."""
    p, truth = z.softmax(1), F.one_hot(y, 3).to(z)
    return (1 - 2 * (p * truth).sum(0) / (p.sum(0) + truth.sum(0) + 1)).mean()


LOSSES = {"contrastive": contrastive, "triplet": triplet, "dice": dice}


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


@cache
def oracle_of(kind: type[Classifier]) -> Run:
    torch.set_default_dtype(torch.float64)
    return run(kind, 1, max_epochs=2)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (3, {"weights": [0, 1, 2], "executor": "threads"}),
        (7, {"executor": "inorder"}),
        (3, {"output_device": "cpu", "split": "chunk", "parallel_modules": ["net"]}),
    ],
    ids=str,
)
def test_losses_over_the_whole_batch_are_exact(devices: int, options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    actual = run(WholeBatch, devices, strategy=forward_mode(**options), max_epochs=2)
    assert_same(actual, oracle_of(WholeBatch))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 1e-10),
        ({"precision": "64-true"}, 1e-10),
        ({"precision": "bf16-mixed"}, 5e-2),
    ],
    ids=str,
)
def test_options_of_the_trainer(options: dict[str, Any], tolerance: float) -> None:
    if "precision" not in options:
        torch.set_default_dtype(torch.float64)
    actual = run(WholeBatch, 3, strategy=forward_mode(), max_epochs=1, **options)
    assert_same(actual, run(WholeBatch, 1, max_epochs=1, **options), atol=tolerance, rtol=tolerance)


@pytest.mark.on("cpu")
def test_closures_of_lbfgs() -> None:
    class Closure(WholeBatch):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    torch.set_default_dtype(torch.float64)
    options = {"max_epochs": 1}
    actual = run(Closure, 3, strategy=forward_mode(), **options)
    assert_same(actual, run(Closure, 1, **options), atol=1e-8)


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


@pytest.mark.on("cpu")
def test_transfer_hooks_see_the_whole_batch_once() -> None:
    calls: list[tuple[str, int]] = []

    class Hooked(WholeBatch):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("before", len(batch[0])))
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("after", len(batch[0])))
            return [batch[0] * 2, batch[1]]

    torch.set_default_dtype(torch.float64)
    job = trainer(2, DataParallelStrategy(mode="forward"), max_epochs=1, limit_val_batches=0)
    job.fit(Hooked(), loader(), loader())
    assert calls == [(name, n) for n in (25, 25, 3) for name in ("before", "after")]
    few = {"max_epochs": 1}
    assert_same(run(Hooked, 3, strategy=forward_mode(), **few), run(Hooked, 1, **few))


# Buffers, copies, failures


def test_batch_norm_in_eval_mode_is_that_of_the_root() -> None:
    class Normalised(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

        def loss(self, batch: Any) -> Tensor:
            return dice(self(batch[0]), batch[1])

        def on_train_epoch_start(self) -> None:
            self.norm.eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.norm.running_mean += 0.1
            self.norm.running_var.data.mul_(1.5)

    torch.set_default_dtype(torch.float64)
    assert_same(run(Normalised, 3, strategy=forward_mode()), run(Normalised, 1))


@pytest.mark.on("cpu")
def test_an_error_in_replica_2_arrives_once_and_leaves_nothing_behind() -> None:
    class Failing(WholeBatch):
        armed = True

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and len(x) == 8 and self.training:
                raise LookupError("nothing there")
            return super().forward(x)

    module = Failing()
    job = trainer(3, DataParallelStrategy(mode="forward", weights=[9, 8, 8]), max_epochs=1)
    with pytest.raises(LookupError, match="nothing there") as caught:
        job.fit(module, loader(), loader())
    assert said(caught.value).count("in replica") == 1
    assert not {"forward", "log"} & set(module.__dict__)
    assert not [t for t in threading.enumerate() if t.name.startswith("dp-")]
    module.armed = False
    module.train()
    module.batches.clear()
    module.shards.clear()
    job.fit(module, loader(), loader())
    assert job.current_epoch == 1


def test_parameters_used_in_the_step_itself_count_with_those_inside() -> None:
    """A regulariser, a temperature, a layer that the step calls: all on the root."""

    class Mixed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def loss(self, batch: Any) -> Tensor:
            z = self(batch[0]) * self.scale + self.net[0](batch[0]).mean()
            return contrastive(z, batch[1]) + 0.1 * self.net[2].weight.square().sum()

    torch.set_default_dtype(torch.float64)
    assert_same(run(Mixed, 3, strategy=forward_mode()), run(Mixed, 1))


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
