"""Manual optimisation with a GradScaler, which is at hand on the CPU alone."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from oracle import Classifier, loader, trainer
from torch import Tensor

from lightning_dp import DataParallelStrategy

START = 2.0**12


class Turns(Classifier):
    """An optimizer for each layer, stepped in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), 0.5) for i in (0, 2)]


def trained(devices: int, executor: str) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=2)
    module, plugin = Turns(), MixedPrecision("16-mixed", "cpu", scaler)
    strategy = DataParallelStrategy(executor=executor)
    trainer(devices, strategy, plugins=[plugin], max_epochs=1).fit(module, loader(), loader())
    return dict(module.state_dict()), scaler.get_scale()


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_the_joint_loss_is_scaled_and_the_sums_are_unscaled_once(executor: str) -> None:
    several, scale = trained(3, executor)
    one, expected = trained(1, executor)
    assert scale == expected != START
    for name in one:
        torch.testing.assert_close(several[name], one[name], atol=2e-3, rtol=0)
