"""Every output has a graph of its own, also where outputs travel together between devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from oracle import assert_equal_trees, gradients, loader, trainer
from spreading import EXACT, SIZES, compare, inputs, wrapping
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on")

STRUCTURES: dict[str, tuple[Callable[[list[Tensor]], Any], Callable[[Any], list[Tensor]]]] = {
    "tuple": (tuple, list),
    "dict": (lambda heads: dict(zip("abc", heads, strict=True)), lambda out: list(out.values())),
    "nested": (
        lambda heads: {"a": heads[0], "rest": [heads[1], (heads[2],)]},
        lambda out: [out["a"], out["rest"][0], out["rest"][1][0]],
    ),
}


class Heads(nn.Module):
    """Three heads with no layer in common, each returned by itself."""

    def __init__(self, structure: str = "tuple") -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, n)) for n in (2, 3, 1)
        )
        self.join, self.take = STRUCTURES[structure]

    def forward(self, x: Tensor) -> Any:
        return self.join([head(x).exp() + 0.5 for head in self.heads])


def two_backwards(net: Any) -> None:
    outputs = net.take(net(inputs()))
    outputs[0].square().mean().backward()
    outputs[1].square().mean().backward()


def one_is_not_used(net: Any) -> None:
    outputs = net.take(net(inputs()))
    (outputs[0].mean() + outputs[2].square().mean()).backward()


def one_is_detached(net: Any) -> None:
    outputs = net.take(net(inputs()))
    (outputs[0].detach().mean() * outputs[1].square().mean()).backward()


def gradients_of_each(net: Any) -> Any:
    outputs = net.take(net(inputs()))
    found = []
    for head, output in zip(net.heads, outputs, strict=True):
        found.append(torch.autograd.grad(output.exp().mean(), list(head.parameters())))
    return found


def a_penalty_of_one(net: Any) -> Any:
    x = inputs().requires_grad_()
    first, second, _ = net.take(net(x))
    (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    slope.square().mean().backward()
    second.mean().backward()
    return x.grad


def in_place(net: Any) -> None:
    first, second, _ = net.take(net(inputs()))
    first.mul_(2).mean().backward()
    second.relu_().square().mean().backward()


USES = [
    two_backwards,
    one_is_not_used,
    one_is_detached,
    gradients_of_each,
    a_penalty_of_one,
    in_place,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize(
    "structure", ["tuple", *(pytest.param(s, marks=pytest.mark.slow) for s in ("dict", "nested"))]
)
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_outputs_have_graphs_of_their_own(
    use: Callable[[Any], Any], structure: str, executor: str
) -> None:
    compare(partial(Heads, structure), use, executor=executor)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("sizes", [(6,), (6, 0, 0), (0, 4, 2), (1,) * 6, (0, 0, 6)], ids=str)
def test_whichever_devices_have_samples(use: Callable[[Any], Any], sizes: tuple[int, ...]) -> None:
    compare(Heads, use, sizes)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_in_the_drop_in(use: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    one, net = (Heads().double() for _ in range(2))
    net.load_state_dict(one.state_dict())
    with wrapping() as wrap:
        wrapper = wrap(net, 3, output_device="cpu")
        wrapper.take, wrapper.heads = net.take, net.heads
        actual = use(wrapper)
    assert_equal_trees(actual, use(one), "results", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


class Towers(nn.Module):
    """Uses weights that others compute: each head those of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("use", ["two backwards", "one is not used"])
def test_weights_of_a_functional_call_have_graphs_of_their_own(use: str) -> None:
    def call(net: nn.Module) -> Any:
        own = dict(net.named_parameters())
        computed = {name: p.exp() for name, p in own.items()}  # saves its result
        first, second = torch.func.functional_call(net, computed, (inputs(),))
        first.square().mean().backward()
        if use == "two backwards":
            second.square().mean().backward()

    compare(Towers, call, SIZES)


class TwoHeads(LightningModule):
    """Two heads over a body, an optimizer each; weight decay moves what gets zeros."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.heads = nn.ModuleList(nn.Linear(10, n) for n in (2, 3))
        self.gathers = gathers

    def forward(self, x: Tensor) -> Any:
        return [head(x).tanh() for head in self.heads]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        if self.gathers:
            outputs = self.all_gather(outputs, sync_grads=True)
        chosen = range(2) if batch_idx else [1]  # the first head has no part in the first step
        for i, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            if i in chosen:
                self.manual_backward((outputs[i] - 0.5).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(head.parameters(), lr=0.05, weight_decay=0.5) for head in self.heads
        ]


class OneHeadOnly(TwoHeads):
    """The loss is of one head alone; the other one's gradient is None."""

    def __init__(self, gathers: bool) -> None:
        super().__init__(gathers)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        if self.gathers:
            outputs = self.all_gather(outputs, sync_grads=True)
        return outputs[1].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


@pytest.mark.parametrize("make", [TwoHeads, OneHeadOnly])
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_through_lightning(make: Any, mode: str, executor: str) -> None:
    make = partial(make, gathers=mode == "step")
    oracle = fit(make, 1)
    assert_equal_trees(fit(make, 3, mode, executor), oracle, "state", atol=1e-10, rtol=0.0)


def fit(
    make: Callable[[], LightningModule], k: int, mode: Any = "step", executor: Any = "auto"
) -> Any:
    torch.manual_seed(0)
    module = make()
    strategy = DataParallelStrategy(mode=mode, executor=executor)
    trainer(k, strategy, precision="64-true").fit(module, loader())
    return dict(module.state_dict())
