"""Modules that torch.nn.DataParallel cannot train, in the Trainer: as one device does.

Lists and dicts of parameters, weight and spectral norm and packed sequences are in
test_conformance.py, tied and normalised weights in test_same_numbers.py, checkpoints in
test_peers_models.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, run
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on", "one_thread")


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
    """Registered layers again in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.net[0], (self.net[1], {"last": self.net[2]})]

    def forward(self, x: Tensor) -> Tensor:
        first, (second, rest) = self.layers
        return rest["last"](second(first(x)))


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


class HasLayersInAList(Classifier):
    """A layer that `parameters()` does not find, beside some that are registered elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.net[0], nn.ReLU(), {"hidden": nn.Linear(10, 10).double()}]
        self.save_hyperparameters({"layers": [nn.Linear(1, 1)]})

    def on_fit_start(self) -> None:
        self.layers[2]["hidden"].to(self.device)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.layers[1](self.layers[2]["hidden"](x)))


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize(
    "kind",
    [
        LooksAtParameters,
        CopiesItself,
        KeepsMethods,
        KeepsReferences,
        KeepsFunctions,
        TalksToRecurrentLayers,
        HasLayersInAList,
    ],
)
def test_it_trains_as_on_one_device(kind: Callable[[], Classifier], mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(kind, 3, strategy={"mode": mode}), run(kind, 1))


@pytest.mark.parametrize("kind", [Penalised, Adapts])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_gradients_inside_of_a_step(kind: Callable[[], Classifier], executor: str) -> None:
    torch.set_default_dtype(torch.float64)
    strategy = {"executor": executor}
    options = {"inference_mode": False, "max_epochs": 2}
    assert_same(run(kind, 3, strategy=strategy, **options), run(kind, 1, **options))
