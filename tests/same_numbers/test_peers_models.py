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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from support import oracle
from support.forward_twins import EXACT, inputs, update, wrapping
from support.oracle import assert_equal_trees, gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.usefixtures("on", "one_thread"),
    # What these models are told on one device, too.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
]

N, WIDTH = 10, 4  # 8 replicas do not get the same; in the last batch of 3 some get nothing
STEPS = 3


class Row(NamedTuple):
    """What a model is about: the layers it has, what is between its first and its last one."""

    build: Callable[[Any], Any] = lambda m: None
    between: Callable[[Any, Tensor], Tensor] = lambda m, h: h.tanh()
    outputs: Callable[[Any, Tensor], Any] = lambda m, h: m.last(h)


class Model(nn.Module):
    """A layer before and a layer after what its row is about; its outputs are rows."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row, self.odd = row, False
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)
        row.build(self)

    def add(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, more: Any = None, *, scale: float = 1.0) -> Any:
        if more is not None:
            return self.last(self.first(x + more["shift"][0])) * scale
        return self.row.outputs(self, self.row.between(self, self.first(x)))


class Outputs(NamedTuple):
    """Rows under names."""

    a: Tensor
    b: Tensor


@dataclass
class Record:
    """A dataclass of outputs, one of which is no tensor."""

    o1: Tensor
    o2: Any
    kind: str


def freeze(m: Any) -> None:
    """One parameter is not trained, and is an integer."""
    m.fixed = nn.Parameter(torch.tensor([2, 2]), requires_grad=False)
    m.first.bias.requires_grad_(False)


def without_graph(m: Any, h: Tensor) -> Any:
    """One of its outputs has no graph."""
    y = m.last(h)
    with torch.no_grad():
        return y, m.last(h) + 1


def new_tensor(m: Any, h: Tensor) -> Any:
    """Makes a tensor in the forward, where its input lies, and gives it back."""
    return m.last(h), torch.zeros(len(h), 3, device=h.device, dtype=h.dtype, requires_grad=True)


def by_sample(m: Any, h: Tensor) -> Tensor:
    """Each sample goes through one of three layers."""
    chosen, y = (h[:, 0] * 10).long() % 3, torch.zeros_like(h)
    for k, expert in enumerate(m.experts):
        rows = (chosen == k).nonzero()[:, 0]
        if len(rows):
            y = y.index_copy(0, rows, expert(h[rows]))
    return y


def tie(m: Any) -> None:
    m.add(shared=nn.Linear(6, 6), tied=nn.Linear(6, 6, bias=False))
    m.tied.weight = m.shared.weight


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    """Its backward computes a part once more."""
    return lambda m, h: checkpoint(m.more, h, use_reentrant=reentrant)


def three_layers(m: Any) -> None:
    m.more = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    m.after = nn.Linear(6, 6)
    m.after.weight = m.more[2].weight


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


def embed(m: Any, h: Tensor) -> Tensor:
    ids = (h.detach().abs() * 10).long() % 10
    return (h + m.table(ids).sum(1) + m.bag(ids)).tanh()


def recur(m: Any, h: Tensor) -> Tensor:
    states, state = m.rnn(h.view(len(h), 3, 2))
    return torch.cat([states[:, -1], state[0]], 1)


def convolutions(m: Any) -> None:
    """Strides of channels_last, and a layer with a norm of its weight."""
    conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
    m.add(conv=conv, project=weight_norm(nn.Linear(8, 6)))


def buffers(m: Any) -> None:
    """Buffers that are read: one of them is not contiguous, one is an integer."""
    m.register_buffer("strided", torch.arange(12.0).view(6, 2).T[:, ::2])
    m.register_buffer("offset", torch.tensor(2))
    m.register_buffer("passing", torch.ones(6), persistent=False)


def norm(m: Any, h: Tensor) -> Tensor:
    """Batch norm that does not train, and norms of each sample."""
    m.bn.eval()
    return m.gn(m.ln(m.bn(h)))


def lists(m: Any) -> None:
    """Layers in a list, a dict and in nothing; one is None."""
    m.add(layers=nn.ModuleList([nn.Linear(6, 6), nn.Identity()]), nothing=None)
    m.named = nn.ModuleDict({"a": nn.Linear(6, 6)})
    m.register_parameter("no_parameter", None)


def through_lists(m: Any, h: Tensor) -> Tensor:
    for layer in (*m.layers, *m.named.values()):
        h = layer(h)
    return h


def hooks(m: Any) -> None:
    """Hooks of a layer that change what goes forward and backward."""
    m.more = nn.Linear(6, 6)
    m.more.register_forward_hook(lambda module, args, y: y * 2)
    m.more.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
    m.last.weight.register_hook(lambda gradient: gradient * 3)


def functional(m: Any, h: Tensor) -> Tensor:
    """Calls a part of itself with other weights."""
    weights = {name: p * 2 for name, p in m.more.named_parameters()}
    return torch.func.functional_call(m.more, weights, (h,))


def more(m: Any, h: Tensor) -> Tensor:
    return m.more(h)


def unused(m: Any) -> None:
    """Layers that no forward uses, or only for an output that the loss leaves out."""
    m.add(never=nn.Linear(5, 5), left_out=nn.Linear(6, 3))


MODELS: dict[str, Row] = {
    "Base": Row(),
    "Frozen": Row(freeze),
    "Relu": Row(
        lambda m: m.add(more=nn.Sequential(nn.Linear(6, 50, False), nn.ReLU(), nn.Linear(50, 6))),
        lambda m, h: m.more(h.relu()),
    ),
    # More than one bucket of gradients.
    "Large": Row(lambda m: m.add(more=nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)))), more),
    "Parameter": Row(
        lambda m: m.add(p=nn.Parameter(torch.ones(6)), scale=nn.Parameter(torch.tensor(0.5))),
        lambda m, h: (h + m.p) * m.scale,
    ),
    "Unused": Row(unused, outputs=lambda m, h: (m.last(h), m.left_out(h))),
    "Dicts": Row(
        unused,
        outputs=lambda m, h: {"pair": (m.last(h), h), "rows": m.last(h), "numbers": [7, "text"]},
    ),
    "Named": Row(unused, outputs=lambda m, h: Outputs(m.last(h), m.left_out(h))),
    "Nested": Row(
        outputs=lambda m, h: Record(m.last(h), {"b": [h.detach(), (m.last(h) * 2,)]}, "record")
    ),
    "Detached": Row(outputs=without_graph),
    "NewTensor": Row(outputs=new_tensor),
    # Another layer in every second call.
    "ByTraining": Row(
        lambda m: m.add(other=nn.Linear(6, 6)), lambda m, h: m.other(h) if m.odd else h
    ),
    "BySample": Row(
        lambda m: m.add(experts=nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])), by_sample
    ),
    # A layer that is used twice in a forward, with tied weights beside it.
    "Twice": Row(tie, lambda m, h: m.shared(m.shared(h).tanh()) + m.tied(h)),
    "Checkpointed": Row(three_layers, checkpointed(False)),
    "Reentrant": Row(three_layers, checkpointed(True)),
    "CheckpointedTwice": Row(
        three_layers, lambda m, h: m.after(checkpointed(False)(m, checkpointed(False)(m, h)))
    ),
    # The gradient of a parameter that is used is undefined.
    "OwnFunction": Row(
        lambda m: m.add(undefined=nn.Parameter(torch.ones(6))),
        lambda m, h: Square.apply(h, m.undefined),
    ),
    "Embedded": Row(
        lambda m: m.add(table=nn.Embedding(10, 6), bag=nn.EmbeddingBag(10, 6, mode="sum")), embed
    ),
    "Recurrent": Row(lambda m: m.add(rnn=nn.GRU(2, 3, batch_first=True)), recur),
    "Convolved": Row(
        convolutions, lambda m, h: m.project(m.conv(h.view(len(h), 1, 2, 3)).flatten(1))
    ),
    "Buffered": Row(buffers, lambda m, h: h * m.passing + m.strided.sum() * 0.01 + m.offset),
    "Normed": Row(
        lambda m: m.add(bn=nn.BatchNorm1d(6), ln=nn.LayerNorm(6), gn=nn.GroupNorm(2, 6)), norm
    ),
    "Listed": Row(lists, through_lists),
    "Attention": Row(
        lambda m: m.add(block=nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)),
        lambda m, h: m.block(h.view(len(h), 3, 2)).flatten(1),
    ),
    "Hooked": Row(hooks, more),
    # A layer with nothing to say.
    "NoFeatures": Row(
        lambda m: m.add(empty=nn.Linear(6, 0)), lambda m, h: torch.cat([h, m.empty(h)], 1)
    ),
    # Writes to what it computes.
    "Inplace": Row(between=lambda m, h: F.relu_(h.clone().mul_(2).add_(1))),
    "Functional": Row(lambda m: m.add(more=nn.Linear(6, 6)), functional),
    # Parameters of two dtypes: see `made`.
    "Dtypes": Row(
        lambda m: m.add(single=nn.Linear(6, 6)), lambda m, h: m.single(h.float()).to(h.dtype)
    ),
    # Several arguments of several kinds, in containers and under names: see `call`.
    "Several": Row(),
}


def call(net: Any, name: str, x: Tensor) -> Any:
    return net(x, {"shift": [x * 0.5, "name"]}, scale=0.5) if name == "Several" else net(x)


def loss_of(outputs: Any) -> Tensor:
    """Of one tensor of the outputs."""
    if isinstance(outputs, Record):
        outputs = outputs.o1
    elif isinstance(outputs, dict):
        outputs = outputs["rows"]
    elif isinstance(outputs, tuple):
        outputs = outputs[0]
    return outputs.square().mean()


def made(row: Row) -> nn.Module:
    torch.manual_seed(0)
    model = Model(row).double()
    if row is MODELS["Dtypes"]:
        model.single.float()
    return model


def close_of(name: str) -> dict[str, float]:
    return {"atol": 1e-6, "rtol": 1e-5} if name == "Dtypes" else EXACT


def compare(net: nn.Module, one: nn.Module, close: Any) -> None:
    assert_equal_trees(gradients(net), gradients(one), "gradients", **close)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **close)


# The drop-in


WAYS = [(2, "inorder"), (3, "threads")] + [
    pytest.param(k, executor, marks=pytest.mark.slow)
    for k, executor in ((2, "threads"), (3, "inorder"), (8, "threads"), (8, "inorder"))
]


@pytest.mark.parametrize(("k", "executor"), WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("weight_norms")
def test_the_drop_in(name: str, k: int, executor: Any) -> None:
    one, net, close = made(MODELS[name]), made(MODELS[name]), close_of(name)
    with wrapping() as wrap:
        wrapper = wrap(net, k, output_device="cpu", executor=executor)
        for step, n in enumerate((N, N, 3)):
            outputs = []
            for module, layers in ((one, one), (wrapper, net)):
                layers.odd = bool(step % 2)
                outputs.append(call(module, name, inputs(n, WIDTH, seed=step)))
                loss_of(outputs[-1]).backward()
            assert_equal_trees(_plain(outputs[1]), _plain(outputs[0]), "outputs", **close)
            compare(net, one, close)
            if step:  # the first two steps accumulate
                update(one), update(net)
        with torch.no_grad():
            x = inputs(5, WIDTH)
            y = [_plain(call(module.eval(), name, x)) for module in (wrapper, one)]
        assert_equal_trees(*y, "outputs", **close)


def _plain(outputs: Any) -> Any:
    if not isinstance(outputs, Record):
        return outputs
    assert outputs.kind == "record"
    return [outputs.o1, outputs.o2]


# The strategy


class Trained(LightningModule):
    """Trains a model; in forward mode the calls of the model are spread."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.net = name, made(MODELS[name])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.odd = bool(batch_idx % 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(call(self.net, self.name, batch[0]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(name: str, devices: int, **options: Any) -> tuple[nn.Module, Any]:
    module = Trained(name)
    x = inputs(2 * N + 3, WIDTH)
    trainer = oracle.trainer(devices, DataParallelStrategy(**options), max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(x), N))
    return module.net, dict(trainer.callback_metrics)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 8))])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("weight_norms")
def test_the_strategy(name: str, k: int, mode: str) -> None:
    options = {"parallel_modules": ["net"]} if mode == "forward" else {}
    executor = "threads" if k % 2 else "inorder"
    net, logs = fitted(name, k, mode=mode, executor=executor, **options)
    one, expected = fitted(name, 1)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **close_of(name))
    assert_equal_trees(logs, expected, "logs", **close_of(name))
