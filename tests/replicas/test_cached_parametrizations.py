"""`torch.nn.utils.parametrize.cached()` in a step: one device's numbers in turns, else refused.

torch's cache knows a weight by the module that was parametrized, which all replicas have in common.
"""

from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, devices_of, loader, run, trainer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lightning_dp import DataParallel, DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread", "weight_norms")
REFUSED = r'parametrize.cached\(\).*Choose executor="inorder"'


class Cached(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 8)), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return self.net(x) + self.net(-2 * x)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_in_turns_it_is_one_device_and_in_threads_it_is_refused(mode: Any) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(Cached, 3, strategy={"mode": mode, "executor": "inorder"}), run(Cached, 1))
    job = trainer(2, DataParallelStrategy(mode=mode, executor="threads"))
    with pytest.raises(RuntimeError, match=REFUSED):
        job.fit(Cached(), loader(), loader())


def test_where_replicas_meet_inside_it_is_refused() -> None:
    class MeetingInside(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with parametrize.cached():
                loss = super().training_step(batch, batch_idx)
                self.all_gather(loss.detach())
                return loss

    job = trainer(2, DataParallelStrategy(executor="inorder"))
    with pytest.raises(RuntimeError, match="leave cached"):
        job.fit(MeetingInside(), loader(), loader())


def test_the_drop_in_refuses_it_and_goes_on_in_turns() -> None:
    module, x = Cached().to(devices_of(1)[0]), torch.randn(8, 10, device=devices_of(1)[0])
    expected = module(x).detach().cpu()
    model = DataParallel(module, device_ids=devices_of(2), executor="threads")
    with pytest.raises(RuntimeError, match=REFUSED):
        model(x)
    assert torch.allclose(model(x).cpu(), expected, atol=1e-6)
    model.close()
