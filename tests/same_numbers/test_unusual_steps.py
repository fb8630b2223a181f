"""Steps and hooks that do less, or other things, than most: still what one device does."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.oracle import Classifier, Run, assert_equal_trees, assert_same, loader, run, trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


@pytest.fixture(autouse=True)
def _in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


class LeavesOut(Classifier):
    """Its step returns None for two batches of five: there is no backward then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 3) else loss


class DoesNotLearn(Classifier):
    """Its own backward does nothing for some batches."""

    batches = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        if self.batches % 5 not in (2, 4):
            loss.backward()


class EndsEpochs(Classifier):
    """Ends its first epoch while gradients accumulate."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


class Adversarial(Classifier):
    """Trains on inputs that a backward inside of the step has made worse."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        F.cross_entropy(self(x), y, reduction="sum").backward()
        assert x.grad is not None
        return F.cross_entropy(self((x + 0.1 * x.grad.sign()).detach()), y)


class InPlace(Adversarial):
    """Gradients are zeroed in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Validating(Classifier):
    """Leaves gradients in validation, which nobody zeroes: they go on into the next step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            F.cross_entropy(self(batch[0]), batch[1], reduction="sum").backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        return None


STEPS_AND_BACKWARDS = [LeavesOut, DoesNotLearn, EndsEpochs, Adversarial, InPlace, Validating]


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", STEPS_AND_BACKWARDS)
def test_gradients_that_wait_are_there_when_the_optimizer_steps(make: Any, accumulate: int) -> None:
    def result(devices: int) -> Run:
        data = lambda: loader(batch_size=11)
        options: Any = {"inference_mode": False, "accumulate_grad_batches": accumulate}
        return run(make, devices, data=data, **options)

    assert_same(result(3), result(1))


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()


class WithHook(OwnBackward):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class StepsInBackward(Classifier):
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.own = torch.optim.SGD([parameter], 0.05, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Any) -> None:
        parameter.own.step()
        parameter.own.zero_grad()

    def configure_optimizers(self) -> None: ...


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("make", [OwnBackward, WithHook, StepsInBackward])
def test_an_own_backward(make: Any, mode: str) -> None:
    assert_same(run(make, 3, strategy={"mode": mode}), run(make, 1))


class OfSome(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(inputs=list(self.net[2].parameters()))


class ByGrad(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("make", [OfSome, ByGrad])
def test_gradients_of_some_parameters_are_refused_in_step_mode(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"all parameters of the module, got inputs="):
        run(make, 2)
    assert_same(run(make, 2, strategy={"mode": "forward"}), run(make, 1))


class SwapsWeights(Callback):
    """Validates with averaged weights, bound by `.data` where there is inference mode."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, job: Any, module: Any, *args: Any) -> None:
        for name, parameter in module.named_parameters():
            old = self.average.get(name, parameter.detach())
            self.average[name] = 0.5 * old + 0.5 * parameter.detach()

    def on_validation_epoch_start(self, job: Any, module: Any) -> None:
        self.swap(module)

    on_validation_epoch_end = on_validation_epoch_start

    def swap(self, module: Any) -> None:
        for name, parameter in module.named_parameters() if self.average else ():
            own = parameter.detach().clone()
            parameter.data = self.average[name].clone()
            self.average[name] = own


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_weights_may_be_bound_to_inference_tensors(mode: str) -> None:
    def result(devices: int) -> Run:
        strategy = {"mode": mode}
        return run(Classifier, devices, strategy=strategy, callbacks=[SwapsWeights()])

    assert_same(result(3), result(1))


# `model.validation_step = None`, or any other step

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def outcome(devices: int, strategy: Any, missing: tuple[str, ...], when: str, stage: str) -> Any:
    """The weights and metrics that a stage leaves, or its error; and what is warned of."""
    torch.manual_seed(0)
    module = Classifier()
    if when == "before":
        for step in missing:
            setattr(module, step, None)
    else:
        module.setup = lambda stage: [setattr(module, step, None) for step in missing]
    job = trainer(devices, strategy, max_epochs=1)
    data = [loader(10, 5)] * (2 if stage == "fit" else 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = getattr(job, stage)(module, *data)
        except Exception as error:
            result = (type(error), str(error))
    told = sorted(str(w.message) for w in caught if "step" in str(w.message))
    return result, dict(job.callback_metrics), module.state_dict(), told


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize(
    ("missing", "when"),
    [
        (STEPS[1:2], "before"),
        (STEPS, "before"),
        *(
            pytest.param((step,), "before", marks=pytest.mark.slow)
            for step in STEPS
            if step != STEPS[1]
        ),
        pytest.param(STEPS[1:], "in setup", marks=pytest.mark.slow),
    ],
)
def test_a_missing_step_is_as_on_one_device(
    missing: tuple[str, ...], when: str, stage: str
) -> None:
    one = outcome(1, "auto", missing, when, stage)
    for mode in ("step", "forward"):
        several = outcome(3, DataParallelStrategy(mode=mode), missing, when, stage)
        assert_equal_trees(several, one, mode, atol=1e-5, rtol=0.0)
