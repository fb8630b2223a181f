"""Weights that nobody trains are written to through `.data`: replicas elsewhere must follow."""

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, devices_of, loader, run
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.replicas.replicate import Replicas
from lightning_dp.parallel.replicas.untracked_writes import LOOKS

pytestmark = pytest.mark.usefixtures("on")


class Distilled(Classifier):
    """A student beside a teacher, which is the student's moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.net(x)
        return F.cross_entropy(z, y) + F.mse_loss(z, self.teacher(x))

    def on_train_batch_end(self, *args: Any) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data.mul_(0.9).add_(0.1 * student.data)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_teacher_that_is_averaged_through_data_is_followed(mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    options = {"mode": mode} if mode == "step" else {"mode": mode, "parallel_modules": ["net"]}
    many = {"data": lambda: loader(200, 8), "max_epochs": 2}
    assert_same(run(Distilled, 3, strategy=options, **many), run(Distilled, 1, **many))


@pytest.mark.parametrize("on", ["sim"], indirect=True)
def test_a_write_long_after_the_start_is_followed_late_and_told() -> None:
    devices = devices_of(2)
    net = nn.Linear(3, 2).to(devices[0]).requires_grad_(False)
    replicas = Replicas(net, devices)
    for _ in range(LOOKS + 3):
        replicas.refresh()
    net.weight.data.add_(1)
    with pytest.warns(UserWarning, match=r"1 parameters .*\(2, 3\).* in up to 15 steps .*always"):
        for _ in range(LOOKS):
            replicas.refresh()
    assert torch.equal(replicas.parameters[1][0].cpu(), net.weight.cpu())
    net.weight.data.add_(1)
    replicas.refresh()
    assert torch.equal(replicas.parameters[1][0].cpu(), net.weight.cpu())


@pytest.mark.parametrize("on", ["sim"], indirect=True)
def test_frozen_weights_that_stay_are_not_copied() -> None:
    devices = devices_of(2)
    replicas = Replicas(nn.Linear(3, 2).to(devices[0]).requires_grad_(False), devices)
    torch.sim.reset_copy_stats()
    for _ in range(3 * LOOKS):
        replicas.refresh()
    between = [pair for pair in torch.sim.copy_stats() if "cpu" not in str(pair)]
    assert not between


class AveragingInItsStep(Distilled):
    """The step itself moves the teacher."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            self.move(teacher, student)
        return super().training_step(batch, batch_idx)

    def move(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data = 0.9 * teacher.data + 0.1 * student.data

    def on_train_batch_end(self, *args: Any) -> None:
        return


class AveragingInPlace(AveragingInItsStep):
    def move(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def test_a_teacher_that_a_step_binds_anew_is_as_on_one_device() -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(AveragingInItsStep, 3), run(AveragingInItsStep, 1))


def test_a_teacher_that_a_step_writes_to_is_told_where_replicas_share_it(on: str) -> None:
    torch.set_default_dtype(torch.float64)
    if on == "cpu":
        with pytest.warns(UserWarning, match=r"A step writes in place to \d parameters") as caught:
            run(AveragingInPlace, 3)
        assert len([w for w in caught if "in place" in str(w.message)]) == 1
    else:
        assert_same(run(AveragingInPlace, 3), run(AveragingInPlace, 1))
