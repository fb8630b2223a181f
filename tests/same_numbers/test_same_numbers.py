"""The promise: fit, validate, test and predict give what one device gives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from support.device_kinds import not_on_sim
from support.oracle import (
    EPOCHS,
    Classifier,
    Run,
    assert_same,
    in_processes,
    loader,
    run,
)
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on")

FLOAT32 = {"atol": 1e-6, "rtol": 1e-5}  # logits near 0 have no relative precision


class Everything(Classifier):
    """Logs in all the usual ways, and collects outputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        task: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
        self.train_acc = torchmetrics.Accuracy(**task)
        self.val_metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.Accuracy(**task),
                "f1": torchmetrics.F1Score(**task, average="macro"),
                "auroc": torchmetrics.AUROC(**task),
            },
            prefix="val/",
        )
        self.mean_loss = torchmetrics.MeanMetric()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/sum", logits.sum(), reduce_fx="sum", on_epoch=True)
        self.log("train/max", logits.max(), reduce_fx="max", on_step=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.val_metrics.update(logits, batch[1])
        self.log_dict(self.val_metrics)
        self.mean_loss(loss)
        self.log("val/mean_loss", self.mean_loss)
        self.log_dict({"val/loss": loss, "val/own": loss}, batch_size=len(batch[1]))
        self.outputs.append(logits)

    def on_validation_epoch_end(self) -> None:
        if not in_processes():  # each of which has what its own steps have appended
            logits = torch.cat(self.outputs)
            positions = torch.arange(len(logits), device=logits.device)
            self.log("val/logits", (logits * positions[:, None]).sum())
        self.outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return {"logits": logits, "label": (logits.argmax(1), [f"{v:.3f}" for v in batch[0][:, 0]])}


class EmbeddingBagOfWords(Classifier):
    """Tied weights, a frozen layer and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.unused = nn.Linear(10, 10)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(self.frozen(self.second(self.first(x)))), y)


class Recurrent(Classifier):
    """A recurrent network keeps a flat list of its weights besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 10, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(self.rnn(x.view(len(x), 5, 2))[0][:, -1]), y)


class Normalised(Classifier):
    """Weight norm, old and new, and a penalty on the gradients inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(10, 10))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(10, 10))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(self.orthogonal(self.new(x))), y, reduction="none")
        if not torch.is_grad_enabled():
            return loss.mean()
        x = x.detach().requires_grad_()
        score = self.net(self.new(x)).square().sum(1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return (loss + 0.1 * slope.square().sum(1)).mean()


class Norm(Classifier):
    """With batch norm: the one place where a shard can tell that it is one."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class FrozenNorm(Norm):
    """In evaluation mode it computes as on one device."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return super().forward(x)


SLOW_2, SLOW_4 = (pytest.param(k, marks=pytest.mark.slow) for k in (2, 4))
"""Numbers of devices that the other ones cover nearly always."""

MODELS: dict[str, Callable[[], Classifier]] = {
    "everything": Everything,
    "tied, frozen, unused": EmbeddingBagOfWords,
    "recurrent": Recurrent,
    "normalised": Normalised,
    "batch norm in evaluation mode": FrozenNorm,
}


@cache
def oracle(name: str, dtype: torch.dtype, **options: Any) -> Run:
    torch.set_default_dtype(dtype)
    return run(MODELS[name], 1, **options)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("devices", [SLOW_2, 3, SLOW_4, 7])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("weight_norms")
def test_several_devices_equal_one_in_double_precision(
    name: str, devices: int, executor: str
) -> None:
    torch.set_default_dtype(torch.float64)
    expected = oracle(name, torch.float64)
    assert_same(run(MODELS[name], devices, strategy={"executor": executor}), expected)


@pytest.mark.parametrize("devices", [3, 7])
def test_several_devices_equal_one_in_single_precision(devices: int) -> None:
    expected = oracle("everything", torch.float32)
    assert_same(run(Everything, devices), expected, **FLOAT32)


@not_on_sim  # which have no sparse tensors
def test_sparse_gradients_stay_sparse() -> None:
    layouts: set[torch.layout] = set()

    class Sparse(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 10, sparse=True)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x + self.embedding(y)), y)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            layouts.add(self.embedding.weight.grad.layout)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.set_default_dtype(torch.float64)
    assert_same(run(Sparse, 3), run(Sparse, 1))
    assert layouts == {torch.sparse_coo}


@pytest.mark.parametrize(
    ("devices", "strategy", "seen"),
    [
        (2, {}, 10),
        (3, {"weights": [0, 1, 1]}, 10),  # the root is idle
        (2, {"buffers": "mean"}, 20),
    ],
)
def test_batch_norm_uses_each_shards_statistics_and_keeps_the_first_replicas(
    devices: int, strategy: dict[str, Any], seen: int
) -> None:
    data = lambda: loader(n=20, batch_size=20)
    found = run(lambda: Norm(1.0), devices, data=data, max_epochs=1, strategy=strategy)
    mean = data().dataset.tensors[0][:seen].mean(0)
    torch.testing.assert_close(found.module.norm.running_mean, mean)
    assert int(found.module.norm.num_batches_tracked) == 1


class Freezing(Norm):
    """Its batch norm is in evaluation mode for all but the first batch of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.norm.train(batch_idx == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx > 0:
            self.losses.append(loss.detach())
            root = self.trainer.lightning_module.norm.running_mean
            torch.testing.assert_close(self.norm.running_mean.cpu(), root.cpu())
        return loss


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_batch_norm_that_turns_to_eval_mode_has_the_roots_statistics(executor: str) -> None:
    """Replicas' running statistics are not kept up to date while no forward reads them."""
    module = run(Freezing, 3, strategy={"executor": executor}).module
    assert len(module.losses) == 2 * EPOCHS and module.norm.running_mean.abs().sum() > 0
