"""Modules with unusual steps, hooks and attributes give what one device gives.

Many are such that torch.nn.DataParallel cannot train them. Lists and dicts of parameters, weight
and spectral norm and packed sequences are in test_conformance.py, tied and normalised weights in
test_same_numbers.py, checkpoints in test_peers_models.py.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.oracle import Classifier, assert_equal_trees, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


@pytest.fixture(autouse=True)
def _in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


# Steps and backwards


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


EXECUTORS = ("threads", "inorder")


# What modules do and keep


class LooksAtParameters(Classifier):
    """`parameters()` is empty on the replicas of nn.DataParallel."""

    def forward(self, x: Tensor) -> Tensor:
        weights = list(self.parameters())
        assert len(weights) == 4 and weights[0].device == x.device
        assert dict(self.named_parameters())["net.0.weight"] is self.net[0].weight
        size = sum(weight.square().sum() for weight in self.parameters())
        return self.net(x) * (1 + 0.01 * size)


class Penalised(Classifier):
    """A gradient of the loss with respect to the parameters, of every sample."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        if not torch.is_grad_enabled():
            return losses.mean()
        slopes = [
            torch.autograd.grad(loss, self.net[2].weight, create_graph=True)[0] for loss in losses
        ]
        return (losses + 0.1 * torch.stack([s.square().sum() for s in slopes])).mean()


class CopiesItself(Classifier):
    """A copy that is made in forward, and used without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        with torch.no_grad():
            target = copy.deepcopy(self.net)
            for p in target.parameters():
                p.mul_(0.5)
            other = target(x)
        return z - 0.1 * other


class Adapts(Classifier):
    """A step inside of the step, on a functional copy of the weights."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.enable_grad():
            weights = dict(self.net.named_parameters())
            first = F.cross_entropy(self.net(x), y, reduction="sum") / 10
            slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
            moved = {
                name: weight - 0.0 * slope.sum()  # depends on the shard: of no weight here
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
            return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)


class KeepsMethods(Classifier):
    """Bound methods and partials of itself and of its layers, in attributes and containers."""

    def __init__(self) -> None:
        super().__init__()
        self.apply_net = self.through
        self.steps = {"activation": self.net[1].forward, "last": [self.net[2].__call__]}

    def through(self, x: Tensor) -> Tensor:
        assert x.device == self.net[0].weight.device
        return self.net[0](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps["last"][0](self.steps["activation"](self.apply_net(x)))


class KeepsReferences(Classifier):
    """Registered layers, and a weight, again in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.net[0], (self.net[1], {"last": self.net[2]})]
        self.weights = [self.net[0].weight]

    def forward(self, x: Tensor) -> Tensor:
        first, (second, rest) = self.layers
        return rest["last"](second(first(x) + self.weights[0].sum(1).sin()))


class KeepsFunctions(Classifier):
    """Functions and hooks that know self, a layer or a parameter from where they were made."""

    def __init__(self) -> None:
        super().__init__()
        first, weight, calls = self.net[0], self.net[2].weight, 0
        self.seen: list[Tensor] = []

        def scaled(x: Tensor, *, by: float = 0.5) -> Tensor:
            nonlocal calls
            calls += 1
            return by * first(x).tanh() @ weight.T + self.net[2].bias

        self.scaled = scaled
        self.calls = lambda: calls
        self.net[1].register_forward_hook(lambda module, args, out: self.seen.append(out.detach()))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.scaled(x) + self.net(x)
        return logits + 0.1 * self.seen.pop().to(x).mean(1, keepdim=True)


class TalksToRecurrentLayers(Classifier):
    """Recurrent layers keep their weights in a flat list and may warn that it is not compact."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 5, num_layers=2, batch_first=True, proj_size=3)
        self.gru = nn.GRU(3, 2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        states, _ = self.gru(self.rnn(x.view(len(x), 5, 2))[0])
        return self.net(self.last(states[:, -1]))


class Swapped(Classifier):
    def configure_callbacks(self) -> Any:
        return [SwapsWeights()]


IN_STEPS: list[Any] = [LeavesOut, DoesNotLearn, EndsEpochs, Adversarial, InPlace, Validating]
IN_BOTH_MODES: list[Any] = [OwnBackward, WithHook, StepsInBackward, Swapped, LooksAtParameters]
IN_BOTH_MODES += [CopiesItself, KeepsMethods, KeepsReferences, KeepsFunctions]
IN_BOTH_MODES += [TalksToRecurrentLayers]
GRADIENTS = {"inference_mode": False}
LAWS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    *(
        (make, {"executor": e}, GRADIENTS)
        for make in (Penalised, Adapts, KeepsReferences)
        for e in EXECUTORS
    ),
    *((make, {"mode": mode}, {}) for make in IN_BOTH_MODES for mode in ("step", "forward")),
    *(
        (make, {}, {"accumulate_grad_batches": accumulate, **GRADIENTS})
        for make in IN_STEPS
        for accumulate in (1, 3)
    ),
]
"""Modules, options of the strategy and of the Trainer."""


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
@pytest.mark.parametrize(("make", "strategy", "options"), LAWS)
def test_it_trains_as_on_one_device(
    make: Any, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    data = lambda: loader(batch_size=11)
    several, one = (run(make, k, strategy=strategy, data=data, **options) for k in (3, 1))
    assert_same(several, one)


# Refusals


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


# `model.validation_step = None`, or any other step

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def outcome(devices: int, strategy: Any, missing: tuple[str, ...], stage: str) -> Any:
    """The weights and metrics that a stage leaves, or its error; and what is warned of."""
    torch.manual_seed(0)
    module = Classifier()
    for step in missing:
        setattr(module, step, None)
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
@pytest.mark.parametrize("missing", [STEPS[1:2], STEPS])
def test_a_missing_step_is_as_on_one_device(missing: tuple[str, ...], stage: str) -> None:
    one = outcome(1, "auto", missing, stage)
    for mode in ("step", "forward"):
        several = outcome(3, DataParallelStrategy(mode=mode), missing, stage)
        assert_equal_trees(several, one, mode, atol=1e-5, rtol=0.0)
