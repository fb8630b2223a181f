"""Gradients that reach the root have their parameters' strides, as autograd gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal_trees, devices_of, gradients
from spreading import EXACT, engine_of, wrapping
from torch import Tensor, nn

from lightning_dp.parallel.gradients import reduce_gradients
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2)
        self.double()
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)
        elif kind == "transposed":
            self.linear.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
        elif kind == "sliced":
            self.linear.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64)[:, ::2])
        elif kind == "permuted":
            weight = torch.randn(3, 3, 4, 3, dtype=torch.float64).permute(2, 3, 1, 0)
            self.conv.weight = nn.Parameter(weight)
        elif kind == "of one channel":
            self.conv = nn.Conv2d(3, 4, 1).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        # What comes of permuted views are gradients of other strides than the weights'.
        w = self.linear.weight
        h = self.conv(x).mean((2, 3))
        return torch.tanh(h @ w.t().contiguous()) * self.scale

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 0.5).square().mean()


KINDS = ["plain", "channels_last", "transposed", "sliced", "permuted", "of one channel"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam foreach": partial(torch.optim.Adam, lr=0.1, foreach=True),
    "Adam fused": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def images(seed: int, channels_last: bool = True) -> Tensor:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def train(
    net: nn.Module, loss_of: Callable[[Tensor], Tensor], optimizer: str, backwards: int = 1
) -> Any:
    """The losses of a few steps, and the strides of the gradients in each."""
    if devices_of(1)[0].type == "sim":  # which has no such kernels
        optimizer = optimizer.replace("fused", "foreach")
    updates = OPTIMIZERS[optimizer](net.parameters())
    seen = []
    for seed in range(3):
        updates.zero_grad()
        for i in range(backwards):
            loss = loss_of(images(seed, channels_last=(seed + i) % 2 == 0))
            loss.backward()
            seen.append(loss.detach().cpu())
        assert_strides_as_autograd_gives(net)
        updates.step()
    return seen


def assert_strides_as_autograd_gives(net: nn.Module) -> None:
    """Those of the parameter where its memory is dense; dims of one entry have no stride."""
    for p in net.parameters():
        if p.grad is not None and torch.empty_like(p).stride() == p.stride():
            dims = [d for d, length in enumerate(p.shape) if length > 1]
            assert [p.grad.stride(d) for d in dims] == [p.stride(d) for d in dims]


def assert_as_one_device(
    kind: str, actual: Any, net: nn.Module, optimizer: str, backwards: int = 1
) -> None:
    one = Strided(kind)
    if kind == "sliced" and devices_of(1)[0].type == "cuda":
        # A copy on a GPU is dense; on the CPU fused kernels update what lies beside a slice.
        optimizer = optimizer.replace("fused", "foreach")
    expected = train(one, one.training_step, optimizer, backwards)
    assert_equal_trees(actual, expected, "losses", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def step_engine(net: nn.Module, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    devices = devices_of(len(sizes))
    split: Any = lambda n: sizes
    return StepParallel(net.to(devices[0]), devices, output_device=CPU, split=split, **options)


ONE_OPTIMIZER = [
    name if name == "AdamW fused" else pytest.param(name, marks=pytest.mark.slow)
    for name in OPTIMIZERS
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ONE_OPTIMIZER)
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("sizes", [(3, 2, 1), (0, 4, 2)], ids=str)
def test_in_step_mode(kind: str, optimizer: str, executor: Any, sizes: tuple[int, ...]) -> None:
    net = Strided(kind)
    engine = step_engine(net, sizes, executor=executor)
    actual = train(net, lambda x: engine.train("training_step", x), optimizer)
    engine.close()
    assert_as_one_device(kind, actual, net, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_hooks", [False, True])
def test_gradients_that_accumulate(kind: str, with_hooks: bool) -> None:
    """Hooked ones are reduced apart from the others, and all are not of the packed kinds."""
    net = Strided(kind)
    engine = step_engine(net, (3, 2, 1))
    if with_hooks:
        net.conv.weight.register_hook(lambda g: None)
    actual = train(net, lambda x: engine.train("training_step", x), "Adam fused", 2)
    engine.close()
    assert_as_one_device(kind, actual, net, "Adam fused", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ONE_OPTIMIZER)
def test_in_forward_mode(kind: str, optimizer: str) -> None:
    net = Strided(kind)
    with engine_of(net, (3, 2, 1)) as engine, engine.spreading():
        actual = train(net, net.training_step, optimizer)
    assert_as_one_device(kind, actual, net, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_drop_in(kind: str) -> None:
    net = Strided(kind)
    with wrapping() as wrap:
        wrapper = wrap(net, 3, output_device="cpu")
        loss_of = lambda x: (wrapper(x) - 0.5).square().mean()
        actual = train(net, loss_of, "AdamW fused")
    assert_as_one_device(kind, actual, net, "AdamW fused")


def mixed_engine(net: nn.Module, sizes: tuple[int, ...]) -> StepParallel:
    """A root on the CPU, which has fused kernels; gradients of the others are packed and travel."""
    others = devices_of(3)[1:]
    split: Any = lambda n: sizes
    return StepParallel(net, [CPU, *others], output_device=CPU, split=split)


class Switched(Strided):
    """A sample goes through one of two layers: a replica may use one of them only."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.other = nn.Conv2d(3, 4, 3, padding=1).double()
        if kind == "channels_last":
            self.other.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        rows = [(self.other if row.sum() > 0 else self.conv)(row[None]) for row in x]
        return torch.tanh(torch.cat(rows).mean((2, 3)) @ self.linear.weight.t()) * self.scale


def fit(net: nn.Module, loss_of: Callable[[Tensor], Tensor], optimizer: str, format: str) -> Any:
    """Steps between which the module's memory format changes."""
    updates = OPTIMIZERS[optimizer](net.parameters())
    seen = []
    for seed in range(4):
        if seed == 2:
            net.to(memory_format=getattr(torch, format))
        updates.zero_grad()
        loss = loss_of(images(seed))
        loss.backward()
        seen.append(loss.detach().cpu())
        assert_strides_as_autograd_gives(net)
        updates.step()
    return seen


@pytest.mark.parametrize("kind", ["plain", "channels_last", "permuted"])
@pytest.mark.parametrize("make", [Strided, Switched])
@pytest.mark.parametrize("format", ["channels_last", "contiguous_format"])
@pytest.mark.parametrize("sizes", [(3, 2, 1), (0, 4, 2), (0, 1, 5)], ids=str)
@pytest.mark.parametrize(
    "optimizer", ["AdamW fused", pytest.param("SGD fused", marks=pytest.mark.slow)]
)
def test_a_root_on_the_cpu_that_changes_its_format(
    make: type[Strided], kind: str, format: str, sizes: tuple[int, ...], optimizer: str
) -> None:
    one, net = make(kind), make(kind)
    engine = mixed_engine(net, sizes)
    actual = fit(net, lambda x: engine.train("training_step", x), optimizer, format)
    engine.close()
    assert_equal_trees(actual, fit(one, one.training_step, optimizer, format), "losses", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def test_a_gradient_takes_the_strides_of_its_parameter() -> None:
    """Of replicas that the root has none of, whatever strides they have."""
    weight = torch.randn(2, 3, 4, 5)
    roots = {
        "dense": nn.Parameter(weight.to(memory_format=torch.channels_last)),
        "contiguous": nn.Parameter(weight.clone()),
        "with gaps": nn.Parameter(torch.randn(2, 3, 4, 10)[..., ::2]),
        "expanded": nn.Parameter(torch.randn(2, 1, 4, 5).expand(2, 3, 4, 5)),
    }
    for name, root in roots.items():
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1)):
            twin = nn.Parameter(torch.empty(2, 3, 4, 5))
            back = sorted(range(4), key=order.__getitem__)
            twin.grad = weight.permute(order).contiguous().permute(back)
            root.grad = None
            reduce_gradients([[root], [twin]])
            alone = root.detach().requires_grad_()
            (alone * weight).sum().backward()
            assert torch.equal(root.grad, alone.grad), name
            assert root.grad.stride() == alone.grad.stride(), name
