"""What hooks of backwards leave on self is one device's, or a warning names the attribute."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from oracle import Classifier, assert_equal_trees, loader, trainer
from places import on_accelerators
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy
from lightning_dp.metrics.backwards import LOOKS

pytestmark = pytest.mark.usefixtures("on", "one_thread")

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class Hooked(Classifier):
    """A hook of its hidden layer's gradient does something, which the step registers."""

    validation_step = None

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []
        self.norms = torchmetrics.SumMetric()
        self.scale = 1.0

    def on_gradient(self, gradient: Tensor) -> None:
        self.gradients.append(gradient)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[1](self.net[0](batch[0]))
        hidden.register_hook(self.on_gradient)
        return F.cross_entropy(self.net[2](hidden), batch[1])


class Samples(Hooked):
    def on_gradient(self, gradient: Tensor) -> None:
        self.gradients.extend(gradient.abs().sum(1))


class OfFunction(Hooked):
    """A function of the user's own keeps it in its backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(Keeping.apply(self(batch[0]), self), batch[1])


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.module.gradients.append(gradient)
        return gradient, None


class ByLayer(Hooked):
    """The hook is the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(self.keep)

    def keep(self, layer: Any, inputs: Any, outputs: Any) -> None:
        self.gradients.append(outputs[0])

    def on_gradient(self, gradient: Tensor) -> None:
        return None


class Late(Hooked):
    """Only the last steps' backwards leave something; the layer has a hook in all."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(self.keep)

    def keep(self, layer: Any, inputs: Any, outputs: Any) -> None:
        if self.global_step > LOOKS + 1:
            self.gradients.append(outputs[0])

    def on_gradient(self, gradient: Tensor) -> None:
        return None


class Measured(Hooked):
    def on_gradient(self, gradient: Tensor) -> None:
        self.norms.update(gradient.abs().sum())
        self.log("largest", gradient.abs().sum(), reduce_fx="sum", on_step=False, on_epoch=True)


class Logging(Hooked):
    def on_gradient(self, gradient: Tensor) -> None:
        self.log("sum", gradient.abs().sum(), reduce_fx="sum")


class RootsOwn(Hooked):
    """Hooks of the Trainer around the backward are the root's, once."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.gradients.append(loss.detach())

    def on_after_backward(self) -> None:
        self.gradients.append(self.net[0].weight.grad.clone())
        self.log("norm", self.net[0].weight.grad.norm())


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(([*module.gradients], module.norms.compute(), module.scale))


def seen(make: Callable[[], Hooked], devices: int, **options: Any) -> tuple[Any, list[str]]:
    """What is there after every step and at the end, and what a user is warned of."""
    torch.manual_seed(0)
    watch = Watch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy = DataParallelStrategy(**options)
        job = trainer(devices, strategy, max_epochs=1, callbacks=[watch])
        module = make()
        job.fit(module, loader(n=27, batch_size=5))
    logged = {name: float(value) for name, value in job.callback_metrics.items()}
    weights = dict(module.named_parameters())
    return (watch.seen, logged, weights), [str(w.message) for w in told if "binds" in str(w)]


@pytest.mark.parametrize("executor", ["inorder", "threads"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "make",
    [Hooked, Samples, OfFunction, ByLayer, Late, Measured, RootsOwn],
    ids=lambda m: m.__name__,
)
def test_what_they_collect_is_one_devices(make: Any, devices: int, executor: Any) -> None:
    expected, _ = seen(make, 1)
    got, told = seen(make, devices, executor=executor)
    assert_equal_trees(got, expected, "left by backwards", **CLOSE)
    assert told == []


@on_accelerators
@pytest.mark.parametrize("executor", ["inorder", "threads"])
def test_numbers_that_they_log_are_read_when_they_are_on_the_host(executor: Any) -> None:
    expected, _ = seen(Logging, 1)
    got, _ = seen(Logging, 3, executor=executor, output_device="cpu")
    assert_equal_trees(got, expected, "logged in backwards", **CLOSE)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_so_it_is_where_gradients_accumulate(accumulate: int) -> None:
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Hooked()
        job = trainer(devices, max_epochs=1, accumulate_grad_batches=accumulate)
        job.fit(module, loader(n=27, batch_size=5))
        found.append(module.gradients)
    assert_equal_trees(found[1], found[0], "gradients", **CLOSE)


class Binding(Hooked):
    """What it binds scales the next loss."""

    def on_gradient(self, gradient: Tensor) -> None:
        self.scale = 0.9 * self.scale + gradient.norm().item()


def test_what_they_bind_to_different_values_is_told() -> None:
    _, told = seen(Binding, 2)
    (text,) = told
    assert text.startswith("A step binds Binding.scale to different values")


class Failing(Hooked):
    def on_gradient(self, gradient: Tensor) -> None:
        self.gradients.append(gradient)
        if len(gradient) < 3:
            raise ValueError("too few")


def test_an_error_in_one_is_raised() -> None:
    with pytest.raises(ValueError, match="too few"):
        seen(Failing, 2)


class Closing(Hooked):
    """The optimizer's closure runs the step and its backward again."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_closures_leave_what_they_do_on_one_device() -> None:
    expected, _ = seen(Closing, 1)
    got, _ = seen(Closing, 2)
    assert len(got[0][-1][0]) == len(expected[0][-1][0]) > 6
    assert_equal_trees(got, expected, "left by backwards", atol=1e-3, rtol=1e-2)
