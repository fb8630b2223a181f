"""Manual optimisation in several processes: what a step does, all processes do together."""

from typing import Any

import oracle
import pytest
import torch
from cases import Case, assert_as_on_one_device
from lightning.pytorch import Callback
from oracle import loader
from several_processes import run_in_processes
from test_manual_optimisation import (
    Accumulating,
    Adversarial,
    Clamped,
    Clipping,
    ClippingByHand,
    ClippingValues,
    Decaying,
    DecayingWithSchedule,
    Frozen,
    ImportedByName,
    Lbfgs,
    Manual,
    Masked,
    MaskedClosures,
    Penalised,
    PlainTorch,
    Scheduled,
    SetsGradients,
    SetsThoseOfTheBatch,
    Warming,
    WithClosures,
)
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

SOME = [Adversarial, Accumulating, Lbfgs, Masked, Scheduled, SetsThoseOfTheBatch]
OTHERS = [
    Clamped,
    Clipping,
    ClippingByHand,
    ClippingValues,
    Decaying,
    DecayingWithSchedule,
    Frozen,
    ImportedByName,
    Manual,
    MaskedClosures,
    Penalised,
    PlainTorch,
    Warming,
    WithClosures,
]


def test_the_numbers_are_those_of_one_device() -> None:
    assert_as_on_one_device([Case(make, samples=51) for make in SOME], metrics=False)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "samples"), [(2, 2, 53), (2, 4, 51), (4, 4, 53)])
def test_each_of_them(processes: int, devices: int, samples: int) -> None:
    cases = [Case(make, samples=samples) for make in (*SOME, *OTHERS)]
    assert_as_on_one_device(cases, processes, devices, metrics=False)


class Scaled(Manual):
    """With a gradient scaler of its own, whose second step meets an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.register_buffer("scales", torch.zeros(20))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        x, loss = batch[0], self.loss(batch)
        if batch_idx == 1:  # of some samples' alone, which not every replica has
            loss = loss + (self.net(x[x[:, 0] > 1.2]) * 1e300).sum() * 1e300
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales[batch_idx] += self.scaler.get_scale()
        assert self.scaler.get_scale() < 2.0**10 or batch_idx == self.current_epoch == 0


class Sums(Manual):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 50


def outputs_seen(devices: int, reduction: Any) -> list[float]:
    """The losses that callbacks get."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    seen: list[float] = []

    class Losses(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            seen.append(float(loss.detach()))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"]))

    module = Sums() if reduction == "sum" else Masked()
    strategy = DataParallelStrategy(loss_reduction=reduction)
    oracle.trainer(devices, strategy, callbacks=[Losses()]).fit(module, loader(51), loader(51))
    return seen


def both_reductions(devices: int) -> list[list[float]]:
    return [outputs_seen(devices, "mean"), outputs_seen(devices, "sum")]


def test_callbacks_see_the_losses_of_all_processes() -> None:
    expected = both_reductions(1)
    for own in run_in_processes(both_reductions, 2, 4):
        for a, b in zip(own, expected, strict=True):
            assert len(a) == 12 and a == pytest.approx(b, abs=1e-10)


def binds_its_own(devices: int) -> str:
    with pytest.raises(RuntimeError, match="each is of a replica's own samples") as caught:
        oracle.trainer(devices, max_epochs=1).fit(SetsGradients(), loader(), loader())
    return str(caught.value)


def test_gradients_that_one_process_has_made_of_its_samples_are_refused() -> None:
    """With one device each, too."""
    first, second = run_in_processes(binds_its_own, 2, 2)
    assert first == second


@pytest.mark.slow
def test_gradient_scalers_skip_a_step_everywhere() -> None:
    assert_as_on_one_device([Case(Scaled), Case(Sums, {"loss_reduction": "sum"})], metrics=False)
