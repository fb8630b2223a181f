"""Gradients go through buffers: those that are leaves, and those that are computed of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from oracle import assert_equal_trees, devices_of, loader, trainer
from patience import soon, tensors
from spreading import EXACT, engine_of, inputs, wrapping
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A layer whose result is scaled by a buffer; `leaf` is what the buffer is computed of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(10, 3).double()
        self.leaf = [torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)]
        self.register_buffer("scale", self.leaf[0])

    def prepare(self) -> None:
        """Called before every step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale.exp()

    def training_step(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        return (self(x) - 1).square().mean()


class Moved(Scaled):
    """As `Scaled`, but the buffer stays a leaf where the module is moved."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.leaf[0] = self.scale = self.scale.detach().requires_grad_()
        return moved


class Computed(Scaled):
    """The buffer is a function of a parameter, which the layer uses as well."""

    def prepare(self) -> None:
        self.scale = self.layer.weight.exp().mean(1)


class ComputedTwice(Computed):
    """Two buffers of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", None)

    def prepare(self) -> None:
        both = self.layer.weight.exp()
        self.scale, self.shift = both.mean(1), both.sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Part(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("own", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own


class Tied(Moved):
    """Two modules have the same leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(self.scale)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.part.own = self.scale
        return moved

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


class TiedToParameter(Scaled):
    """A parameter is a buffer of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(self.layer.bias)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.part.own = self.layer.bias
        return moved

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


class Cached(Scaled):
    """A step leaves what it computes, with its graph, and the next one reads the value."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.detach()
        self.scale = self.layer.weight.exp().mean(1) + 0.1 * before
        return torch.tanh(self.layer(x)) * self.scale


class Rebound(Moved):
    """Another leaf for every step."""

    def prepare(self) -> None:
        self.scale = (self.scale.detach() * 0.9).requires_grad_()


class Frozen(Moved):
    """No parameter is trained, the buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)


class Thawed(Moved):
    """It is trained from the second step on."""

    calls = 0

    def prepare(self) -> None:
        self.calls += 1
        self.scale.requires_grad_(self.calls > 1)


KINDS: list[type[Scaled]] = [
    Scaled,
    Moved,
    Computed,
    ComputedTwice,
    Tied,
    TiedToParameter,
    Cached,
    Rebound,
    Frozen,
    Thawed,
]
EXECUTORS = ["threads", "inorder"]
SLOWLY = pytest.param("inorder", marks=pytest.mark.slow)
SIZES = [(3, 2, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in [(0, 4, 2), (6, 0, 0)])]


def batch(seed: int = 0) -> Tensor:
    return inputs(6, 10, seed)


def update(net: Scaled) -> Any:
    """A step of gradient descent of parameters and leaves; what the gradients were."""
    trained = {"leaf": net.leaf[0], **dict(net.named_parameters())}
    if net.scale.is_leaf and not isinstance(net, Cached):
        trained["scale"] = net.scale
    seen = {name: None if t.grad is None else t.grad.cpu().clone() for name, t in trained.items()}
    with torch.no_grad():
        for tensor in {id(t): t for t in trained.values()}.values():
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
                tensor.grad = None
    return seen


def steps(net: Scaled, loss_of: Callable[[Tensor], Tensor], n: int = 3, times: int = 1) -> Any:
    """What the gradients were in a few steps, each of so many backwards."""
    seen = []
    for seed in range(n):
        for time in range(times):
            net.prepare()
            loss_of(batch(seed * times + time)).backward()
        seen.append(update(net))
    return seen


def assert_same_steps(make: type[Scaled], actual: Any, net: Scaled, times: int = 1) -> None:
    """As on one device of the same kind: a buffer that was moved is no leaf any more."""
    one = make().to(devices_of(1)[0])
    place = one.layer.weight.device
    expected = steps(one, lambda x: one.training_step(x.to(place)), len(actual), times)
    assert_equal_trees(actual, expected, "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_step_mode(make: type[Scaled], sizes: tuple[int, ...], executor: Any) -> None:
    net = make()
    engine = step_engine(net, sizes, executor=executor)
    actual = steps(net, lambda x: engine.train("training_step", x))
    engine.close()
    assert_same_steps(make, actual, net)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_forward_mode(make: type[Scaled], sizes: tuple[int, ...], executor: Any) -> None:
    net = make()
    with engine_of(net, sizes, executor=executor) as engine, engine.spreading():
        actual = steps(net, net.training_step)
    assert_same_steps(make, actual, net)


@pytest.mark.parametrize("make", KINDS)
def test_in_the_drop_in(make: type[Scaled]) -> None:
    net = make()
    with wrapping() as wrap:
        wrapper = wrap(net, 3, output_device="cpu")
        actual = steps(net, lambda x: (wrapper(x) - 1).square().mean())
    assert_same_steps(make, actual, net)


@pytest.mark.parametrize("make", [Moved, Tied, Rebound, Frozen])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_gradients_accumulate(make: type[Scaled], executor: Any) -> None:
    """Those of leaves stay on the replicas until the last backward, and others' with them."""
    net = make()
    engine = step_engine(net, (3, 2, 1), executor=executor)
    actual = []
    for seed in range(2):
        for time in range(3):
            net.prepare()
            engine.reducer.accumulating = time < 2
            engine.train("training_step", batch(seed * 3 + time)).backward()
        actual.append(update(net))
    engine.close()
    one = make().to(devices_of(1)[0])
    place = one.layer.weight.device
    expected = steps(one, lambda x: one.training_step(x.to(place)), 2, 3)
    assert_equal_trees(actual, expected, "gradients", **EXACT)


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_hooks_of_leaves_see_the_sum_once(mode: str) -> None:
    def use(net: Scaled, loss_of: Any) -> Any:
        seen: list[Tensor] = []
        net.scale.register_hook(lambda g: seen.append(g.cpu()) or 2 * g)
        net.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.cpu()))
        loss_of(batch()).backward()
        return [*seen, net.scale.grad]

    one, net = Moved(), Moved().to(devices_of(1)[0])
    if mode == "step":
        engine = step_engine(net, (3, 2, 1))
        actual = use(net, lambda x: engine.train("training_step", x))
        engine.close()
    else:
        with engine_of(net, (3, 2, 1)) as spread, spread.spreading():
            actual = use(net, net.training_step)
    expected = use(one, one.training_step)
    assert_equal_trees([t.cpu() for t in actual], expected, "hooks", **EXACT)


@pytest.mark.parametrize("make", [Moved, Computed])
def test_second_derivatives_in_forward_mode(make: type[Scaled]) -> None:
    def use(net: Scaled) -> Any:
        net.prepare()
        loss = net.training_step(batch())
        tensors = [net.scale, net.layer.weight]
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        return torch.autograd.grad(sum(g.cpu().square().sum() for g in first), tensors)

    one, net = make(), make()
    with engine_of(net, (3, 2, 1)) as engine, engine.spreading():
        actual = use(net)
    assert_equal_trees([g.cpu() for g in actual], list(use(one)), "derivatives", **EXACT)


class Asking(Computed):
    """Asks for gradients inside of its step."""

    def training_step(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        loss = super().training_step(x)
        torch.autograd.grad(loss, self.weights, retain_graph=True)
        return loss

    @property
    def weights(self) -> list[Tensor]:
        return self.of


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_replicas_own_backward_through_a_shared_graph_is_refused_by_name(executor: Any) -> None:
    net = Asking()
    engine = step_engine(net, (3, 2, 1), executor=executor)
    net.of = [net.layer.weight.detach().requires_grad_()]  # what the buffer is computed of
    net.scale = net.of[0].exp().mean(1)
    with pytest.raises(RuntimeError, match=r"the buffers \['scale'\], which were computed"):
        engine.train("training_step", batch())
    net.training_step = net.__class__.__mro__[1].training_step.__get__(net)
    net.scale = net.of[0].exp().mean(1)
    engine.train("training_step", batch()).backward()
    engine.close()
    one = Computed()
    weight = one.layer.weight.detach().requires_grad_()
    one.scale = weight.exp().mean(1)
    one.training_step(batch()).backward()
    assert_equal_trees([net.of[0].grad.cpu()], [weight.grad], "gradient", **EXACT)


@pytest.mark.parametrize("make", [Moved, Computed, Tied])
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_an_exception_in_the_middle_leaves_nothing(make: type[Scaled], mode: str) -> None:
    net = make()

    def fail(module: nn.Module, args: Any) -> None:
        if len(args[0]) == 2:
            raise ValueError("of the second replica")

    if mode == "step":
        engine: Any = step_engine(net, (3, 2, 1), executor="threads")
        loss_of: Any = lambda x: engine.train("training_step", x)
        spreading: Any = contextlib.nullcontext()
    else:
        context = engine_of(net, (3, 2, 1))
        engine = context.__enter__()
        spreading, loss_of = engine.spreading(), net.training_step
    with spreading:
        handle = net.layer.register_forward_pre_hook(fail)
        net.prepare()
        with pytest.raises(ValueError, match="of the second replica"):
            loss_of(batch())
        handle.remove()
        actual = steps(net, loss_of)
    engine.close()
    assert_same_steps(make, actual, net)


@pytest.mark.parametrize("make", [Moved, Computed, Cached])
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.slow
def test_nothing_is_kept_after_the_end(make: type[Scaled], mode: str) -> None:
    def use() -> None:
        net = make()
        if mode == "step":
            engine = step_engine(net, (3, 2, 1))
            steps(net, lambda x: engine.train("training_step", x))
            engine.close()
        else:
            with engine_of(net, (3, 2, 1)) as spread, spread.spreading():
                steps(net, net.training_step)

    use()
    before = tensors()
    for _ in range(3):
        use()
    assert soon(lambda: tensors() <= before)


class Trained(LightningModule):
    """A classifier with a leaf that an optimizer trains; the second is computed for each batch."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.net = Scaled()
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("basis", None)

    def on_fit_start(self) -> None:
        self.shift = self.shift.detach().requires_grad_()
        self.trainer.strategy.optimizers[0].add_param_group({"params": [self.shift]})

    def on_train_end(self) -> None:
        self.last = self.shift.grad.cpu()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.basis = self.net.layer.bias.exp() if self.automatic_optimization else self.basis

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.net.layer(x)) + self.shift
        return y if self.basis is None else y * self.basis

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch[0]) - 0.3).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = (self(batch[0]) - 0.3).square().mean()
            self.manual_backward(loss)
            self.shift.grad.mul_(0.5)
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.05)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("executor", ["threads", SLOWLY])
@pytest.mark.parametrize(
    "options",
    [
        {"by_hand": True},
        {"accumulate_grad_batches": 2},
        pytest.param({"gradient_clip_val": 0.01}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_through_lightning(mode: Any, executor: Any, options: dict[str, Any]) -> None:
    def fit(k: int) -> Any:
        torch.manual_seed(0)
        rest = dict(options)
        module = Trained(rest.pop("by_hand", False))
        strategy = DataParallelStrategy(mode=mode, executor=executor)
        job = trainer(k, strategy, precision="64-true", **rest)
        job.fit(module, loader(), loader())
        return {**module.state_dict(), **job.callback_metrics}

    expected = fit(1)
    assert_equal_trees(fit(3), expected, "state", atol=1e-10, rtol=0.0)
    assert expected["shift"].abs().min() > 0


def test_the_check_of_the_first_step_leaves_no_gradients() -> None:
    def fit(check: bool) -> Any:
        torch.manual_seed(0)
        module = Trained()
        strategy = DataParallelStrategy(check_first_step=check)
        trainer(3, strategy, precision="64-true", max_steps=1).fit(module, loader(), loader())
        return module.last

    torch.testing.assert_close(fit(True), fit(False), **EXACT)
