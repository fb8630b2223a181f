"""Manual optimisation, whatever people do to their optimizers: each step is made once.

Schedules, gradient scalers and libraries bind wrappers in the place of `optimizer.step`, tests bind
mocks, and modules keep optimizers that Lightning does not know. The numbers are one device's, and
so is how often a wrapper that was bound outside of a step is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.contexts import StandIn, standing_in
from lightning_dp.parallel.workers import current_participant
from lightning_dp.state.optimizers import own_methods

pytestmark = [
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`"),
    pytest.mark.filterwarnings(r"ignore:A step binds \w+.schedule to different values"),
]
executors = pytest.mark.parametrize("executor", ["threads", "inorder"])


class Manual(Classifier):
    """By hand; `counts` says how often what the tests bind was called."""

    counts: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def plain(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def train_with(self, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.train_with(self.optimizers(), batch)

    def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return wrapper


class WrappedWhenMade(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = ExponentialLR(optimizer, 0.9)
        optimizer.step = self.counted(optimizer.step, "step")
        optimizer.zero_grad = self.counted(optimizer.zero_grad, "zero_grad")
        schedule.step = self.counted(schedule.step, "schedule")
        return [optimizer], [schedule]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()


class MockedWhenMade(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.mocks = [Mock(wraps=optimizer.step)]
        optimizer.step = self.mocks[0]
        return optimizer

    def on_train_end(self) -> None:
        self.counts["mock"] = self.mocks[0].call_count


class WrappedLater(Manual):
    """Of the module too, and again in every epoch."""

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers()
        optimizer.step = self.counted(optimizer.step, "of lightning")
        optimizer.optimizer.step = self.counted(optimizer.optimizer.step, "of torch")
        self.manual_backward = self.counted(self.manual_backward, "backward")
        self.toggle_optimizer = self.counted(self.toggle_optimizer, "toggle")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.toggle_optimizer(self.optimizers())
        super().training_step(batch, batch_idx)
        self.untoggle_optimizer(self.optimizers())


class PatchedWhileTraining(Manual):
    """Nothing is trained: the mock does nothing."""

    target = "torch.optim.AdamW.step"

    def on_train_start(self) -> None:
        self.patches = [patch(self.target)]
        self.mocks = [self.patches[0].start()]

    def on_train_end(self) -> None:
        self.counts["mock"] = self.mocks[0].call_count
        self.patches[0].stop()


class PatchedLightning(PatchedWhileTraining):
    target = "lightning.pytorch.core.optimizer.LightningOptimizer.step"


class PatchedInTheStep(Manual):
    options: ClassVar[dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain, optimizer = self.plain(), self.optimizers()
        with patch.object(plain, "step", wraps=plain.step), patch.object(plain, "zero_grad"):
            loss = self.train_with(optimizer, batch)
        with patch.object(optimizer, "step", wraps=optimizer.step) as mock:
            super().training_step(batch, batch_idx)
            assert mock.call_count == 1
        with patch.object(self, "manual_backward", wraps=self.manual_backward):
            super().training_step(batch, batch_idx)
        return loss


class MockedInTheStep(Manual):
    """Nothing is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()
        with patch.object(plain, "step", autospec=True) as mock:
            self.train_with(plain, batch)
            mock.assert_called_once()
        with patch.object(plain, "step"):
            return super().training_step(batch, batch_idx)


class WrappedInTheStep(Manual):
    """For good, as one device has it afterwards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()
        if batch_idx == 0:
            plain.step = self.counted(plain.step, "step")
        return super().training_step(batch, batch_idx)


class WrappedAndPutBack(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in (self.optimizers(), self.plain()):
            before = optimizer.step

            def step(*args: Any, before: Any = before, **kwargs: Any) -> Any:
                return before(*args, **kwargs)

            optimizer.step = step
            try:
                self.train_with(optimizer, batch)
            finally:
                optimizer.step = before


class Swapping(torch.optim.Optimizer):
    """Has another one inside, in which it binds another step for as long as it makes one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults, self.state = inner.defaults, inner.state
        self.param_groups = inner.param_groups
        self.original = inner.step

    def step(self, closure: Any = None) -> Any:
        self.inner.step = functools.wraps(self.original)(lambda *args: self.original(*args))
        try:
            return self.inner.step(closure)
        finally:
            self.inner.step = self.original

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Swapped(Manual):
    def configure_optimizers(self) -> Any:
        return Swapping(super().configure_optimizers())


class InnerOne(Swapped):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.train_with(self.plain().inner, batch)


class ScheduleMadeInTheStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()
        if self.global_step == 0:
            self.schedule = ExponentialLR(plain, 0.5)
        loss = self.train_with(plain if batch_idx else self.optimizers(), batch)
        self.schedule.step()
        self.log("lr", plain.param_groups[0]["lr"])
        return loss


class OfItsOwn(Manual):
    """An optimizer and a schedule that Lightning does not know."""

    def configure_optimizers(self) -> None:
        self.own = {"optimizer": super().configure_optimizers()}
        self.schedule = ExponentialLR(self.own["optimizer"], 0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.train_with(self.own["optimizer"], batch)
        self.schedule.step()
        self.own["optimizer"].param_groups[0]["weight_decay"] += 0.1
        return loss


class ByTheClass(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()
        plain.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        type(plain).step(plain)
        return loss


class Scaled(Manual):
    """A gradient scaler of its own, and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()
        plain.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(plain)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm, on_step=True, on_epoch=True)
        self.scaler.step(plain)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())
        return loss


class SharpnessAware(torch.optim.Optimizer):
    """Two gradients for each step, the second one uphill."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class InTwoSteps(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
        return loss

    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters())


class InOneClosure(InTwoSteps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.optimizers().step(closure=lambda: self.manual_backward(self.loss(batch)))
        return loss


class LoggingClosure(Manual):
    """Called several times a step; what it logs in the last call is what stays."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.log("in the closure", loss, on_step=True, on_epoch=True)
            self.log_dict({"twice": 2 * loss, "zero": 0 * loss}, prog_bar=True)
            self.log("rows", float(len(batch[0])), reduce_fx="sum")
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        self.log("after", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class PlainClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plain = self.plain()

        def closure() -> Tensor:
            plain.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self.log("loss", plain.step(closure=closure))


FAMILY = [
    WrappedWhenMade,
    MockedWhenMade,
    WrappedLater,
    PatchedWhileTraining,
    PatchedLightning,
    PatchedInTheStep,
    MockedInTheStep,
    WrappedInTheStep,
    WrappedAndPutBack,
    Swapped,
    InnerOne,
    ScheduleMadeInTheStep,
    OfItsOwn,
    ByTheClass,
    Scaled,
    InTwoSteps,
    InOneClosure,
    LoggingClosure,
    PlainClosure,
]


def fitted(make: Callable[[], LightningModule], devices: int, **options: Any) -> dict[str, Any]:
    Manual.counts.clear()
    torch.manual_seed(0)
    strategy = DataParallelStrategy(**options.pop("strategy", {}))
    module, job = make(), trainer(devices, strategy, **options)
    job.fit(module, loader(), loader())
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    return {"state": state, "metrics": dict(job.callback_metrics), "calls": dict(Manual.counts)}


def compare(make: Callable[[], LightningModule], strategy: dict[str, Any], **options: Any) -> None:
    torch.set_default_dtype(torch.float64)
    callbacks = options.pop("callbacks", list)
    several = fitted(make, 3, strategy=strategy, callbacks=callbacks(), **options)
    one = fitted(make, 1, callbacks=callbacks(), **options)
    assert_equal_trees(several, one, make.__name__, atol=1e-10, rtol=0.0)


@pytest.mark.usefixtures("on")
@executors
@pytest.mark.parametrize("make", FAMILY)
def test_each_step_is_made_once(make: Callable[[], LightningModule], executor: str) -> None:
    compare(make, {"executor": executor})


@pytest.mark.slow
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("strategy", [{"weights": [0, 2, 1]}, {"mode": "forward"}], ids=str)
@pytest.mark.parametrize("make", FAMILY)
def test_with_an_idle_root_and_in_forward_mode(
    make: Callable[[], LightningModule], strategy: dict[str, Any]
) -> None:
    compare(make, strategy)


class Patching(Callback):
    """Binds a mock for the time of each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.patch = patch.object(optimizer, "step", wraps=optimizer.step)
        self.mock = self.patch.start()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        Manual.counts["mock"] = Manual.counts.get("mock", 0) + self.mock.call_count
        self.patch.stop()


CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "stochastic weight averaging": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)],
    "weight averaging": lambda: [WeightAveraging()],
    "mocks": lambda: [Patching()],
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("callback", list(CALLBACKS))
@pytest.mark.parametrize("make", [Manual, Classifier, WrappedLater, LoggingClosure, OfItsOwn])
def test_callbacks_that_average_or_mock(make: Callable[[], LightningModule], callback: str) -> None:
    if make is OfItsOwn and callback != "weight averaging":
        pytest.skip("these look for an optimizer of the Trainer's")
    if make is WrappedLater and callback == "stochastic weight averaging":
        pytest.skip("it makes a schedule, which refuses functions on one device")
    compare(make, {"executor": "threads"}, callbacks=CALLBACKS[callback], max_epochs=3)


class Captured(Manual):
    """Calls the method past the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.steps = [optimizer.step]
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))
        self.steps[0]()


class MadeInTheStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))
        torch.optim.SGD(self.parameters(), 0.1).step()


class Automatic(Classifier):
    """Automatic optimisation beside an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(self.net[0].parameters(), 0.1)
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.own.step()
        return loss


@pytest.mark.usefixtures("on")
@executors
@pytest.mark.parametrize("make", [Captured, MadeInTheStep, Automatic])
def test_a_step_that_each_replica_would_make_is_refused(
    make: Callable[[], LightningModule], executor: str
) -> None:
    with pytest.raises(RuntimeError, match=r"once for all replicas, got \w+.step from replica"):
        fitted(make, 3, strategy={"executor": executor})


@pytest.mark.usefixtures("on")
@executors
def test_an_optimizer_of_the_samples_is_the_replicas_own(executor: str) -> None:
    class Attacking(Classifier):
        """Looks for the worst input near each sample."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            shift = torch.zeros_like(x, requires_grad=True)
            optimizer = torch.optim.SGD([shift], 0.1)
            for _ in range(2):
                rows = nn.functional.cross_entropy(self.net(x + shift), y, reduction="sum")
                (shift.grad,) = torch.autograd.grad(-rows, shift)
                optimizer.step()
            return super().training_step((x + shift.detach(), y), batch_idx)

    compare(Attacking, {"executor": executor})


def test_own_methods_are_those_that_are_not_torchs() -> None:
    class More(SharpnessAware):
        @property
        def rho(self) -> float:
            return 0.0

        def _private(self) -> None: ...

        def look(self) -> None: ...

        def pieces(self) -> Any:
            yield 1

        def state_dict(self) -> Any:
            return super().state_dict()

    weight = nn.Parameter(torch.ones(1))
    assert own_methods(torch.optim.LBFGS([weight])) == []
    assert own_methods(More([weight])) == ["look", "first_step", "second_step"]


def test_what_stood_in_is_the_method_again_for_those_who_kept_it() -> None:
    class Greeter:
        def word(self) -> str:
            return "hello"

    greeter = Greeter()
    for _ in range(3):  # a wrapper that stays is no wrapper of itself
        with standing_in(greeter, "word", lambda: "goodbye"):
            kept = greeter.word
            assert isinstance(kept, StandIn) and greeter.word() == "goodbye"
            greeter.word = functools.partial(lambda inner: f"{inner()}!", kept)
    assert kept() == "hello!!" and greeter.word() == "hello!!!"


@executors
def test_an_exception_in_the_middle_leaves_the_optimizers_as_they_were(executor: str) -> None:
    class Failing(WrappedWhenMade):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            participant = current_participant()
            if batch_idx == 1 and participant is not None and participant.replica == 1:
                raise ValueError("one replica alone")
            self.optimizers().zero_grad()

    module, strategy = Failing(), DataParallelStrategy(executor=executor)
    job = trainer(3, strategy)
    with pytest.raises(ValueError, match="one replica alone"):
        job.fit(module, loader(), loader())
    optimizer, schedule = job.optimizers[0], job.lr_scheduler_configs[0].scheduler
    assert type(optimizer) is torch.optim.AdamW and type(schedule) is ExponentialLR
    assert not isinstance(optimizer.step, StandIn) and not isinstance(schedule.step, StandIn)
    assert not isinstance(vars(module).get("manual_backward"), StandIn)
