"""Modules that torch.nn.DataParallel cannot train, in the Trainer: as one device does.

Lists and dicts of parameters, weight and spectral norm and packed sequences are in
test_conformance.py, tied weights and normalised ones in test_same_numbers.py.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import not_on_sim
from support.oracle import Classifier, assert_same, loader, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


class Checkpointed(Classifier):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.net(x)
        x = x.detach().requires_grad_()  # a reentrant checkpoint needs an input with a gradient
        h = checkpoint(self.net[:2], x, use_reentrant=self.reentrant)
        return checkpoint(self.net[2], h, use_reentrant=self.reentrant)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


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


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize(
    "kind",
    [
        LooksAtParameters,
        CopiesItself,
        Checkpointed,
        CheckpointedReentrantly,
        KeepsMethods,
        KeepsReferences,
        KeepsFunctions,
        TalksToRecurrentLayers,
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


class Hides(Classifier):
    """Layers where `parameters()` does not find them."""

    def __init__(self, hide: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.hidden = hide(nn.Linear(10, 10))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize(
    ("hide", "name"),
    [
        (lambda layer: [layer], r"hidden\[0\]"),
        (lambda layer: ("x", layer), r"hidden\[1\]"),
        (lambda layer: {"a": [nn.ReLU(), layer]}, r"hidden\['a'\]\[1\]"),
    ],
)
def test_layers_in_plain_containers_are_named(hide: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Hides\.{name}: expected .* got Linear.*ModuleList"):
        oracle.trainer(2).fit(Hides(hide), loader(), loader())


def test_what_is_no_layer_of_its_own_may_be_in_plain_containers() -> None:
    class Keeps(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [self.net[0], self.net[2], nn.ReLU(), nn.CrossEntropyLoss()]
            self.save_hyperparameters({"layers": [nn.Linear(1, 1)]})

    oracle.trainer(2, max_epochs=1).fit(Keeps(), loader(), loader())


# Compiled submodules


class Compiled(Classifier):
    """A part of it is compiled; who compiles is written down."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.net[2] = torch.compile(nn.Sequential(nn.Linear(16, 3), nn.Tanh()), backend=backend)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@not_on_sim  # which cannot compile
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("eager", "step"),
        ("aot_eager", "forward"),
        pytest.param("eager", "forward", marks=pytest.mark.slow),
        pytest.param("aot_eager", "step", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # and looks
def test_compiled_submodules(backend: str, mode: str, fresh_compiler: None) -> None:
    torch.set_default_dtype(torch.float64)
    make = lambda: Compiled(backend)
    one = run(make, 1)
    several = run(make, 3, strategy={"mode": mode, "executor": "threads"})
    assert_same(several, one)


@not_on_sim
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_they_are_compiled_and_run_in_order(mode: str, fresh_compiler: None) -> None:
    compilers: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        compilers.append(threading.current_thread().name)
        return graph.forward

    run(lambda: Compiled(backend), 3, strategy={"mode": mode, "executor": "threads"})
    assert set(compilers) == {"MainThread"}
