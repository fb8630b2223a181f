"""sync_batchnorm=True: batch norm by the whole batch, whatever the shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from support.oracle import (
    Classifier,
    assert_equal_trees,
    assert_same,
    devices_of,
    gradients,
    loader,
    run,
    trainer,
)
from torch import Tensor, nn

from lightning_dp.layer_sync import ReplicaBatchNorm
from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")
EXACT = {"atol": 1e-10, "rtol": 0.0}

pytestmark = pytest.mark.usefixtures("on")
on_cpu = pytest.mark.on("cpu")


class Normed(nn.Module):
    """The loss of a network on inputs that need gradients themselves."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make()
        self.shift = nn.Parameter(torch.randn(3))

    def training_step(self, x: Tensor) -> Tensor:
        y = self.net(x + self.shift.view(1, 3, *[1] * (x.dim() - 2)).to(x.dtype))
        return (y.float() if y.dtype != torch.float64 else y).sin().mean()


def batch_of(n: int, dims: int, mean: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return mean + torch.randn(n, 3, *[2] * dims, generator=generator, dtype=torch.float64)


def train(
    module: Normed, batch: Tensor, sizes: tuple[int, ...] | None, steps: int, **options: Any
) -> list[Tensor]:
    """The losses; on one device where there are no sizes."""
    losses: list[Tensor] = []
    if sizes is None:
        for _ in range(steps):
            losses.append(module.training_step(batch))
            losses[-1].backward()
        return losses
    ReplicaBatchNorm().apply(module)
    devices = devices_of(len(sizes))
    defaults = {"output_device": CPU, "executor": "threads", "split": lambda n: sizes}
    with closing(StepParallel(module.to(devices[0]), devices, **{**defaults, **options})) as engine:
        for _ in range(steps):
            losses.append(engine.train("training_step", engine.scatter(batch)))
            losses[-1].backward()
    ReplicaBatchNorm().revert(module)
    return losses


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a network": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
        2,
    ),
    "two in a row": (lambda: nn.Sequential(*[nn.BatchNorm2d(3)] * 2), 2),
    "without dims": (lambda: nn.BatchNorm1d(3), 0),
    "3d": (lambda: nn.BatchNorm3d(3), 3),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), 2),
    "momentum and eps": (lambda: nn.BatchNorm2d(3, momentum=0.4, eps=1e-2), 2),
    "without weights": (lambda: nn.BatchNorm2d(3, affine=False), 2),
    "untracked eval": (lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(), 2),
    "eval": (lambda: nn.BatchNorm2d(3).eval(), 2),
}


@pytest.mark.parametrize(
    ("layer", "sizes", "executor"),
    [
        *[("a network", sizes, "threads") for sizes in [(3, 2, 1), (1, 1, 1), (5,)]],
        ("a network", (3, 2, 1), "inorder"),
        *[(layer, (3, 0, 1), "threads") for layer in [*LAYERS][1:]],
    ],
)
def test_statistics_and_gradients_are_those_of_the_batch(
    layer: str, sizes: tuple[int, ...], executor: str
) -> None:
    make, dims = LAYERS[layer]
    batch = batch_of(sum(sizes), dims)
    one, several = Normed(make).double(), Normed(make).double()
    expected = train(one, batch, None, 3)
    actual = train(several, batch, sizes, 3, executor=executor)
    assert_equal_trees(actual, expected, "losses", **EXACT)
    assert_equal_trees(gradients(several), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(several.state_dict()), dict(one.state_dict()), "state", **EXACT)


@on_cpu
def test_large_means_do_not_cost_digits() -> None:
    """As good as torch's own in single precision, where the mean is 1,000 times the deviation."""
    batch, make = batch_of(24, 2, mean=1000.0), lambda: nn.BatchNorm2d(3)
    exact, own, several = Normed(make).double(), Normed(make), Normed(make)
    train(exact, batch, None, 1)
    train(own, batch.float(), None, 1)
    train(several, batch.float(), (9, 8, 7), 1)

    def error(module: nn.Module) -> float:
        pairs = zip(module.state_dict().values(), exact.state_dict().values(), strict=True)
        return max(float((a.cpu() / b - 1).abs().max()) for a, b in pairs if b.is_floating_point())

    assert error(several) <= 2 * error(own) + 1e-6


@on_cpu
def test_one_value_per_channel_is_too_few_as_on_one_device() -> None:
    for sizes in (None, (1, 0)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            train(Normed(lambda: nn.BatchNorm1d(3)).double(), batch_of(1, 0), sizes, 1)
    train(Normed(lambda: nn.BatchNorm1d(3)).double(), batch_of(2, 0), (1, 1), 1)


# In the Trainer


class NormedClassifier(Classifier):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(lr=0.02)
        self.net = nn.Sequential(
            nn.Linear(10, 16, bias=False),
            nn.BatchNorm1d(16, momentum=momentum),
            nn.Tanh(),
            nn.Linear(16, 3),
        )


@pytest.mark.parametrize("mode", ["step", "forward", "averaged"])
def test_training_equals_one_device(mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    kwargs: dict[str, Any] = {"sync_batchnorm": True, "accumulate_grad_batches": 2}
    strategy = {"buffers": "mean", "weights": [0, 3, 1]} if mode == "step" else {"mode": mode}
    # It finds the statistics of the averaged weights anew.
    callbacks = lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    if mode == "averaged":
        strategy, kwargs = {}, {**kwargs, "callbacks": callbacks()}
    several = run(NormedClassifier, 3, strategy=strategy, **kwargs)
    if mode == "averaged":
        kwargs["callbacks"] = callbacks()
    assert_same(several, run(NormedClassifier, 1, **kwargs))


@on_cpu
@pytest.mark.usefixtures("unchecked")  # it names the list that the hook appends to
def test_the_module_is_as_before_afterwards() -> None:
    module = NormedClassifier()
    layer, before, keys = module.net[1], dict(module.net[1].__dict__), list(module.state_dict())
    seen: set[bool] = set()
    layer.register_forward_hook(lambda *_: seen.add("forward" in layer.__dict__))
    job = trainer(2, sync_batchnorm=True, max_epochs=1)
    job.fit(module, loader(), loader())
    assert seen == {True}
    assert module.net[1] is layer and set(layer.__dict__) == set(before)
    assert list(module.state_dict()) == keys


@on_cpu
def test_layers_with_a_forward_of_their_own_are_named() -> None:
    class OwnNorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    module = NormedClassifier()
    module.net[1] = OwnNorm(16)
    with pytest.warns(UserWarning, match=r"got also \S*OwnNorm, which keep to the statistics"):
        trainer(2, sync_batchnorm=True, fast_dev_run=True).fit(module, loader(), loader())
