"""Weights that nobody trains are written to through `.data`: replicas elsewhere must follow."""

import math
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, devices_of, loader, run
from places import on_separate
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.replicas.fingerprints import fingerprints
from lightning_dp.parallel.replicas.replicate import Replicas
from lightning_dp.parallel.replicas.untracked_writes import LOOKS

pytestmark = pytest.mark.usefixtures("on", "one_thread")
SLOW = pytest.mark.slow


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


@on_separate
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


@pytest.mark.sim_only("It counts the copies between devices.")
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


class AveragingWithATrace(AveragingInItsStep):
    def move(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        with torch.no_grad():
            teacher.lerp_(student, 0.1)


class AveragingAtTheEnd(AveragingInPlace):
    """The teacher moves after it was used, and a part of it stays."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Classifier.training_step(self, batch, batch_idx)
        self.move(self.teacher[0].weight, self.net[0].weight)
        return loss


class AveragingByHand(ByHand, AveragingWithATrace):
    """Manual optimisation; the teacher moves between two steps of the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


IN_THEIR_STEP = [AveragingInPlace, AveragingWithATrace, AveragingAtTheEnd, AveragingByHand]


@pytest.mark.parametrize("executor", ["threads", pytest.param("inorder", marks=SLOW)])
@pytest.mark.parametrize("make", IN_THEIR_STEP)
def test_a_teacher_that_a_step_writes_to_moves_once(make: Any, executor: str) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(make, 3, strategy={"executor": executor}), run(make, 1))


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_a_teacher_that_moves_where_the_root_has_no_samples_moves_all_the_same() -> None:
    torch.set_default_dtype(torch.float64)
    several = run(AveragingInPlace, 3, strategy={"weights": [0, 1, 1]})
    assert_same(several, run(AveragingInPlace, 1))


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_a_teacher_that_moves_later_is_told_once_and_moves_once_from_then_on() -> None:
    class Late(AveragingInPlace):
        def move(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
            if self.global_step >= LOOKS + 2 and teacher.dim() > 1:
                super().move(teacher, student)

    with pytest.warns(UserWarning, match=r"A step writes in place to 2 parameters") as caught:
        run(Late, 3, data=lambda: loader(200, 8), max_epochs=2)
    assert len([w for w in caught if "in place" in str(w.message)]) == 1


class Shrinking(Classifier):
    """A step shrinks weights that it trains, in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shrink(self.net[0].weight)
        return super().training_step(batch, batch_idx)

    def shrink(self, weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.mul_(0.9)


class Binding(Shrinking):
    """It binds new values instead, as the warning says."""

    def shrink(self, weight: nn.Parameter) -> None:
        weight.data = 0.9 * weight.data


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_write_to_what_replicas_share_and_train_is_told_once(executor: str) -> None:
    words = r"A step writes in place to 1 parameters that it trains \(of shapes \[\(16, 10\)\]\)"
    with pytest.warns(UserWarning, match=words) as caught:
        run(Shrinking, 3, strategy={"executor": executor})
    assert len([w for w in caught if "in place" in str(w.message)]) == 1


class ShrinkingThroughData(Shrinking):
    """No counter of versions tells of it."""

    def shrink(self, weight: nn.Parameter) -> None:
        weight.data.mul_(0.9)


class ShrinkingByHand(ByHand, Shrinking):
    """The optimizer writes as well, once for all replicas; before it the step does."""


class ShrinkingAtTheEnd(Shrinking):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.shrink(self.net[0].weight)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByHandAndData(ByHand, ShrinkingThroughData):
    """Both."""


class DescendingByHand(Classifier):
    """No optimizer: the step subtracts its gradients, as in many a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.05 * parameter.grad


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    "make",
    [
        ShrinkingThroughData,
        ShrinkingByHand,
        ShrinkingAtTheEnd,
        ByHandAndData,
        DescendingByHand,
    ],
)
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_writes_that_only_values_show_or_that_are_beside_an_optimizers_are_told(
    make: Any, executor: str
) -> None:
    with pytest.warns(UserWarning, match="A step writes in place to [14] parameters") as caught:
        run(make, 3, strategy={"executor": executor})
    assert len([w for w in caught if "in place" in str(w.message)]) == 1


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_what_an_optimizer_writes_by_hand_is_not_told(executor: str) -> None:
    class Twice(ByHand, Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return super().training_step(batch, batch_idx)

    assert_same(run(Twice, 3, strategy={"executor": executor}), run(Twice, 1), atol=1e-5)


@on_separate
@pytest.mark.parametrize("make", [Shrinking, Binding])
def test_replicas_on_devices_of_their_own_write_to_their_own(make: Any) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(make, 3), run(make, 1))


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_values_that_a_step_binds_are_those_of_one_device(executor: str) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(Binding, 3, strategy={"executor": executor}), run(Binding, 1))


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int8,
]


def frozen(values: Tensor, dtype: torch.dtype) -> nn.Module:
    net = nn.Module()
    net.weight = nn.Parameter(values.to(dtype).t(), requires_grad=False)
    net.other = nn.Parameter(torch.ones(1))
    return net.to(devices_of(1)[0])


@on_separate
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 5), (64, 65), (0, 2)])
def test_one_element_of_any_type_that_changes_is_followed(
    dtype: torch.dtype, size: tuple[int, int]
) -> None:
    devices = devices_of(2)
    values = torch.randint(1, 7, size, generator=torch.Generator().manual_seed(0)).double()
    net = frozen(values, dtype)
    replicas = Replicas(net, devices)
    for i in range(min(8, values.numel())):
        place = divmod(i * 7 % values.numel(), size[0])
        values.T[place] += 1
        net.weight.data.copy_(values.T.to(dtype))
        replicas.refresh()
        own = replicas.modules[1].weight
        assert torch.equal(own.cpu().to(torch.complex64), values.T.to(dtype).to(torch.complex64))


@on_separate
def test_a_small_step_of_an_average_in_bfloat16_is_followed() -> None:
    devices = devices_of(2)
    net = frozen(torch.linspace(0.5, 1.5, 4096).view(64, 64), torch.bfloat16)
    replicas = Replicas(net, devices)
    for _ in range(3):
        net.weight.data.mul_(0.99)
        replicas.refresh()
        assert torch.equal(replicas.modules[1].weight.cpu(), net.weight.cpu())


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0])
def test_frozen_weights_that_are_no_numbers_are_not_told(value: float) -> None:
    class Frozen(Distilled):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.full((3,), value), requires_grad=False)

        def on_train_batch_end(self, *args: Any) -> None:
            return

    run(Frozen, 3, data=lambda: loader(400, 8), max_epochs=1)


def test_frozen_weights_of_8_bits_are_trained_beside() -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(10, 10).to(torch.float8_e4m3fn)
            self.packed = nn.Parameter(weight, requires_grad=False)
            self.register_buffer("scale", torch.ones(3).to(torch.float8_e5m2))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x @ self.packed.to(x.dtype)), y)

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    several, one = run(Frozen, 3), run(Frozen, 1)
    for own, expected in zip(several.module.parameters(), one.module.parameters(), strict=True):
        torch.testing.assert_close(own.cpu().double(), expected.double(), atol=1e-10, rtol=0)


def test_weights_that_are_more_than_their_elements_are_left_alone() -> None:
    class Wrapped(torch.Tensor):
        """A subclass that does not know what bits are."""

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any, kwargs: Any = None
        ) -> Any:
            if "view" in str(function) or "norm" in str(function):
                raise NotImplementedError(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    weight = torch.ones(3).as_subclass(Wrapped)
    assert fingerprints([(0, weight), (1, torch.ones(2))]).keys() == {1}
