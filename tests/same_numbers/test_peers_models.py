"""Models of the kinds that DDP's own tests train, trained by ours and on one device.

The kinds are those that torch's public test suite names; the code is ours. Each is trained by the
drop-in and by the strategy in both modes, on 2, 3 and 8 replicas on the CPU and on as many
simulated devices, and leaves the same parameters, gradients and losses as one device. Documented
differences:

- What a forward decides by looking at its samples (`if x.sum() > 0`), every replica decides by its
  own: on one device, by the whole batch. A model that decides for each sample alone is equal.
- Batch norm normalises by the shard's statistics, as in DDP, unless `sync_batchnorm=True`.
- Weights whose gradient is None on every replica keep None. In DDP this needs
  `find_unused_parameters=True`, and static graphs have to be declared: here nothing has to be said.
- Buffers are the first replica's after a step, as in DDP; `buffers="mean"` averages them.
- Models with other parameters on some replicas, which DDP refuses, cannot come about: there is one.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from support import oracle
from support.forward_twins import EXACT, inputs, update, wrapping
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallel, DataParallelStrategy

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    # What these models are told on one device, too.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
]

N, WIDTH = 10, 4  # 8 replicas do not get the same; in the last batch of 3 some get nothing
STEPS = 3


class Base(nn.Module):
    """A layer before and a layer after what a model is about; its outputs are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)
        self.build()

    def build(self) -> None:
        """Makes more layers."""

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


class Frozen(Base):
    """One parameter is not trained, and is an integer."""

    def build(self) -> None:
        self.fixed = nn.Parameter(torch.tensor([2, 2]), requires_grad=False)
        self.first.bias.requires_grad_(False)


class Relu(Base):
    def build(self) -> None:
        self.more = nn.Sequential(nn.Linear(6, 50, bias=False), nn.ReLU(), nn.Linear(50, 6))

    def between(self, h: Tensor) -> Tensor:
        return self.more(h.relu())


class Large(Base):
    """More than one bucket of gradients."""

    def build(self) -> None:
        self.more = nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)))

    def between(self, h: Tensor) -> Tensor:
        return self.more(h)


class Parameter(Base):
    """A parameter of its own beside the layers, and one without dimensions."""

    def build(self) -> None:
        self.p, self.scale = nn.Parameter(torch.ones(6)), nn.Parameter(torch.tensor(0.5))

    def between(self, h: Tensor) -> Tensor:
        return (h + self.p) * self.scale


class Unused(Base):
    """Layers that no forward uses, or only for an output that the loss leaves out."""

    def build(self) -> None:
        self.never, self.left_out = nn.Linear(5, 5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.last(h), self.left_out(h)


class Dicts(Unused):
    def forward(self, x: Tensor) -> Any:
        y, other = super().forward(x)
        return {"predictions": (y, other), "rows": y, "numbers": [7, "text"]}


class Outputs(NamedTuple):
    """Rows under names."""

    a: Tensor
    b: Tensor


class Named(Unused):
    def forward(self, x: Tensor) -> Any:
        return Outputs(*super().forward(x))


@dataclass
class Record:
    """A dataclass of outputs, one of which is no tensor."""

    o1: Tensor
    o2: Any
    kind: str


class Nested(Unused):
    def forward(self, x: Tensor) -> Any:
        y, other = super().forward(x)
        return Record(y, {"b": [other.detach(), (y * 2,)]}, "record")


class Detached(Base):
    """One of its outputs has no graph."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            return y, self.last(self.first(x)) + 1


class NewTensor(Base):
    """Makes a tensor in the forward, where its input lies, and gives it back."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, torch.zeros(len(x), 3, device=x.device, dtype=x.dtype, requires_grad=True)


class ByTraining(Base):
    """Another layer in every second call."""

    calls = 0

    def build(self) -> None:
        self.other = nn.Linear(6, 6)
        self.odd = False

    def between(self, h: Tensor) -> Tensor:
        return self.other(h) if self.odd else h


class BySample(Base):
    """Each sample goes through one of two layers."""

    def build(self) -> None:
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def between(self, h: Tensor) -> Tensor:
        chosen, y = (h[:, 0] * 10).long() % 3, torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                y = y.index_copy(0, rows, expert(h[rows]))
        return y


class Twice(Base):
    """A layer that is used twice in a forward, with tied weights beside it."""

    def build(self) -> None:
        self.shared = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.shared.weight

    def between(self, h: Tensor) -> Tensor:
        return self.shared(self.shared(h).tanh()) + self.tied(h)


class Checkpointed(Base):
    """Its backward computes a part once more."""

    reentrant = False

    def build(self) -> None:
        self.more = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.more, h, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedTwice(Checkpointed):
    """The same layers twice, in two checkpoints; with weights that a third layer shares."""

    def build(self) -> None:
        super().build()
        self.after = nn.Linear(6, 6)
        self.after.weight = self.more[2].weight

    def between(self, h: Tensor) -> Tensor:
        return self.after(super().between(super().between(h)))


class Square(torch.autograd.Function):
    """A function with a backward of its own, which gives None for what it does not use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient, None


class OwnFunction(Base):
    """The gradient of a parameter that is used is undefined."""

    def build(self) -> None:
        self.undefined = nn.Parameter(torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        return Square.apply(h, self.undefined)


class Embedded(Base):
    def build(self) -> None:
        self.table, self.bag = nn.Embedding(10, 6), nn.EmbeddingBag(10, 6, mode="sum")

    def between(self, h: Tensor) -> Tensor:
        ids = (h.detach().abs() * 10).long() % 10
        return (h + self.table(ids).sum(1) + self.bag(ids)).tanh()


class Recurrent(Base):
    def build(self) -> None:
        self.rnn = nn.GRU(2, 3, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        states, state = self.rnn(h.view(len(h), 3, 2))
        return torch.cat([states[:, -1], state[0]], 1)


class Convolved(Base):
    """Strides of channels_last, and a layer with a norm of its weight."""

    def build(self) -> None:
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
        self.project = weight_norm(nn.Linear(8, 6))

    def between(self, h: Tensor) -> Tensor:
        return self.project(self.conv(h.view(len(h), 1, 2, 3)).flatten(1))


class Buffered(Base):
    """Buffers that are read: one of them is not contiguous, one is an integer."""

    def build(self) -> None:
        self.register_buffer("strided", torch.arange(12.0).view(6, 2).T[:, ::2])
        self.register_buffer("offset", torch.tensor(2))
        self.register_buffer("passing", torch.ones(6), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        return h * self.passing + self.strided.sum() * 0.01 + self.offset


class Normed(Base):
    """Batch norm that does not train, and norms of each sample."""

    def build(self) -> None:
        self.bn, self.ln, self.gn = nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GroupNorm(2, 6)
        self.bn.eval()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.bn.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        return self.gn(self.ln(self.bn(h)))


class Listed(Base):
    """Layers in a list, a dict and in nothing; one is None."""

    def build(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Identity()])
        self.named = nn.ModuleDict({"a": nn.Linear(6, 6)})
        self.nothing = None
        self.register_parameter("no_parameter", None)

    def between(self, h: Tensor) -> Tensor:
        for layer in (*self.layers, *self.named.values()):
            h = layer(h)
        return h


class Attention(Base):
    def build(self) -> None:
        self.block = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        return self.block(h.view(len(h), 3, 2)).flatten(1)


class Hooked(Base):
    """Hooks of a layer that change what goes forward and backward."""

    def build(self) -> None:
        self.more = nn.Linear(6, 6)
        self.more.register_forward_hook(lambda module, args, y: y * 2)
        self.more.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        self.last.weight.register_hook(lambda gradient: gradient * 3)

    def between(self, h: Tensor) -> Tensor:
        return self.more(h)


class NoFeatures(Base):
    """A layer with nothing to say."""

    def build(self) -> None:
        self.empty = nn.Linear(6, 0)

    def between(self, h: Tensor) -> Tensor:
        return torch.cat([h, self.empty(h)], 1)


class Inplace(Base):
    """Writes to what it computes, and to its input's copy."""

    def between(self, h: Tensor) -> Tensor:
        return F.relu_(h.clone().mul_(2).add_(1))


class Functional(Base):
    """Calls a part of itself with other weights."""

    def build(self) -> None:
        self.more = nn.Linear(6, 6)

    def between(self, h: Tensor) -> Tensor:
        weights = {name: p * 2 for name, p in self.more.named_parameters()}
        return torch.func.functional_call(self.more, weights, (h,))


class Dtypes(Base):
    """Parameters of two dtypes."""

    def build(self) -> None:
        self.single = nn.Linear(6, 6)

    def double(self) -> Any:
        super().double()
        self.single.float()
        return self

    def between(self, h: Tensor) -> Tensor:
        return self.single(h.float()).to(h.dtype)


class Several(nn.Module):
    """Several arguments of several kinds, in containers and under names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, more: Any = None, *, scale: float = 1.0) -> Any:
        return self.first(x + more["shift"][0]) * scale

    arguments = staticmethod(lambda x: ((x, {"shift": [x * 0.5, "name"]}), {"scale": 0.5}))


MODELS = [
    Base, Frozen, Relu, Large, Parameter, Unused, Dicts, Named, Nested, Detached, NewTensor,
    ByTraining, BySample, Twice, Checkpointed, Reentrant, CheckpointedTwice, OwnFunction, Embedded,
    Recurrent, Convolved, Buffered, Normed, Listed, Attention, Hooked, NoFeatures, Inplace,
    Functional, Dtypes, Several,
]  # fmt: skip


def call(net: Any, model: Any, x: Tensor) -> Any:
    args, kwargs = getattr(model, "arguments", lambda x: ((x,), {}))(x)
    return net(*args, **kwargs)


def rows(outputs: Any) -> Tensor:
    """What the loss is of: one tensor of the outputs."""
    if isinstance(outputs, Record):
        return outputs.o1
    if isinstance(outputs, dict):
        return outputs["rows"]
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def loss_of(outputs: Any) -> Tensor:
    return rows(outputs).square().mean()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def close_of(make: Any) -> dict[str, float]:
    return {"atol": 1e-6, "rtol": 1e-5} if make is Dtypes else EXACT


def compare(net: nn.Module, one: nn.Module, close: Any) -> None:
    assert_equal_trees(gradients(net), gradients(one), "gradients", **close)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **close)


# The drop-in


WAYS = [(2, "inorder"), (3, "threads")] + [
    pytest.param(k, executor, marks=pytest.mark.slow)
    for k, executor in ((2, "threads"), (3, "inorder"), (8, "threads"), (8, "inorder"))
]


@pytest.mark.parametrize(("k", "executor"), WAYS)
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.usefixtures("weight_norms")
def test_the_drop_in(make: Any, k: int, executor: Any) -> None:
    one, net = made(make), made(make)
    close = close_of(make)
    with wrapping() as wrap:
        wrapper = wrap(net, k, output_device="cpu", executor=executor)
        train(one, net, wrapper, make, close)


def train(one: nn.Module, net: nn.Module, wrapper: Any, make: Any, close: Any) -> None:
    for step, n in enumerate((N, N, 3)):
        outputs = []
        for module, layers in ((one, one), (wrapper, net)):
            layers.odd = bool(step % 2)
            outputs.append(call(module, make, inputs(n, WIDTH, seed=step)))
            loss_of(outputs[-1]).backward()
        assert_equal_trees(_plain(outputs[1]), _plain(outputs[0]), "outputs", **close)
        compare(net, one, close)
        if step:  # the first two steps accumulate
            update(one), update(net)
    with torch.no_grad():
        x = inputs(5, WIDTH)
        y = [_plain(call(module.eval(), make, x)) for module in (wrapper, one)]
    assert_equal_trees(*y, "outputs", **close)


def _plain(outputs: Any) -> Any:
    if not isinstance(outputs, Record):
        return outputs
    assert outputs.kind == "record"
    return [outputs.o1, outputs.o2]


@pytest.mark.parametrize("k", [2, 3, 8])
def test_second_derivatives(k: int) -> None:
    one, net = made(Twice), made(Twice).to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for module in (one, wrapper):
        own = list(module.parameters())
        slopes = torch.autograd.grad(loss_of(module(inputs(N))), own, create_graph=True)
        sum(slope.to("cpu").square().sum() for slope in slopes).backward()
    compare(net, one, EXACT)
    wrapper.close()


@pytest.mark.parametrize("k", [2, 3, 8])
def test_two_calls_before_a_backward_and_two_backwards_of_a_call(k: int) -> None:
    one, net = made(Twice), made(Twice).to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for module in (one, wrapper):
        first, second = module(inputs(N, seed=1)), module(inputs(7, seed=2))
        loss_of(first).backward(retain_graph=True)
        (loss_of(second) + loss_of(first)).backward()
    compare(net, one, EXACT)
    wrapper.close()


@pytest.mark.parametrize("k", [2, 3, 8])
def test_batch_norm_is_that_of_the_shard_and_buffers_the_first_ones(k: int) -> None:
    net = nn.BatchNorm1d(WIDTH).double().to(devices_of(1)[0])
    one = nn.BatchNorm1d(WIDTH).double()
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for seed in range(3):
        x = inputs(4 * k, seed=seed)
        y = wrapper(x)
        expected = torch.cat([copy.deepcopy(one)(shard) for shard in x.split(4)])
        one(x[:4])
        assert_equal_trees(y, expected, "outputs", **EXACT)
        assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    wrapper.close()


def test_an_exception_in_one_replica_ends_the_call_and_the_next_one_works() -> None:
    class Fails(Base):
        def between(self, h: Tensor) -> Tensor:
            if h.abs().max() > 1e3:
                raise ValueError("Uneven")
            return h

    one, net = made(Fails), made(Fails).to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(3), output_device="cpu", executor="threads")
    x = inputs(N)
    x[-1] = 1e6
    with pytest.raises(ValueError, match=r"^Uneven"):
        wrapper(x)
    for module in (one, wrapper):
        loss_of(module(inputs(N))).backward()
    compare(net, one, EXACT)
    wrapper.close()


def test_every_replica_decides_by_its_own_samples() -> None:
    class ByBatch(Base):
        def between(self, h: Tensor) -> Tensor:
            return h if h.sum() > 0 else -h

    one, net = made(ByBatch), made(ByBatch).to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(2), output_device="cpu")
    x = inputs(N)
    expected = torch.cat([one(x[:5]), one(x[5:])])
    assert_equal_trees(wrapper(x), expected, "outputs", **EXACT)
    wrapper.close()


# The strategy


class Trained(LightningModule):
    """Trains a model; in forward mode the calls of the model are spread."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.net = make, made(make)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.odd = bool(batch_idx % 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(call(self.net, self.make, batch[0]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(make: Any, devices: int, **options: Any) -> tuple[nn.Module, Any]:
    module = Trained(make)
    x = inputs(2 * N + 3, WIDTH)
    trainer = oracle.trainer(devices, DataParallelStrategy(**options), max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(x), N))
    return module.net, dict(trainer.callback_metrics)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 8))])
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.usefixtures("weight_norms")
def test_the_strategy(make: Any, k: int, mode: str) -> None:
    options = {"parallel_modules": ["net"]} if mode == "forward" else {}
    executor = "threads" if k % 2 else "inorder"
    net, logs = fitted(make, k, mode=mode, executor=executor, **options)
    one, expected = fitted(make, 1)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **close_of(make))
    assert_equal_trees(logs, expected, "logs", **close_of(make))
