"""Manual optimisation: a step runs once, calls in it are spread, numbers are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from support.oracle import ByHand, Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on")


class Manual(ByHand, Classifier):
    """One optimizer, stepped by hand, and the loss before and after."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/after", self.loss(batch), on_step=True)
        return loss


class Lbfgs(Manual):
    """The optimizer calls its closure several times a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        search = "strong_wolfe"
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn=search)


class Accumulating(Manual):
    """Steps every other batch, after it has looked at the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("norm", norm, on_step=True, on_epoch=True)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "n": batch_idx}


CASES: list[tuple[Callable[[], LightningModule], dict[str, Any]]] = [
    (Lbfgs, {"executor": "threads"}),
    (Accumulating, {"weights": [0, 2, 1]}),
    (Manual, {"split": "auto"}),
]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(("make", "strategy"), CASES, ids=str)
def test_the_numbers_are_those_of_one_device(
    make: Callable[[], LightningModule], strategy: Any
) -> None:
    torch.set_default_dtype(torch.float64)
    several, one = run(make, 3, strategy=strategy), run(make, 1)
    assert_same(several, one)
    assert several.trainer.global_step == one.trainer.global_step


@pytest.mark.on("cpu")
def test_a_module_that_turns_to_manual_optimisation_during_a_fit_is_refused() -> None:
    class Turning(Classifier):
        def on_train_epoch_start(self) -> None:
            self.automatic_optimization = self.current_epoch == 0

    with pytest.raises(RuntimeError, match="automatic_optimization to stay True"):
        trainer(2).fit(Turning(), loader(), loader())


@pytest.mark.on("cpu")
def test_a_step_of_automatic_optimisation_that_changes_its_optimizer_is_named() -> None:
    class Decaying(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match=r"\['lr'\]: 0.045 on one device"):
        trainer(3, max_epochs=1).fit(Decaying(), loader(), loader())


@pytest.mark.parametrize("on", ["cpu"], indirect=True)  # Lightning has "16-mixed" on GPUs only
def test_the_precision_plugin_scales_the_loss_and_unscales_once() -> None:
    def trained(devices: int) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        module, plugin = Manual(), MixedPrecision("16-mixed", "cpu", scaler)
        trainer(devices, plugins=[plugin], max_epochs=1).fit(module, loader(), loader())
        return dict(module.state_dict()), scaler.get_scale()

    (several, scale), (one, expected) = trained(3), trained(1)
    assert scale == expected != 2.0**12
    for name in one:
        torch.testing.assert_close(several[name], one[name], atol=2e-3, rtol=0)
