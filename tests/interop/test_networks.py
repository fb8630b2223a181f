"""Networks of libraries of many fields, trained alike: in both modes, and by the drop-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from comparison import REPLICAS, Difference, Job, as_one_device, distance
from lightning.pytorch import LightningModule
from support.oracle import devices_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallel

pytestmark = pytest.mark.interop

SAMPLES, BATCH, KINDS = 46, 10, 3  # the last batch has 6


class Row(NamedTuple):
    """A network whose forward returns rows, and how it is trained.

    Attributes:
        make: the network.
        inputs: of all samples.
        loss: of its outputs and the targets: a class of each sample.
        modes: of the Trainer that give one device's numbers.
        trainer: arguments of the Trainer.
        warns: patterns of the warnings that several devices give, and one device does not.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Sequence[Any]]
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    modes: Sequence[str] = ("step", "forward")
    trainer: Mapping[str, Any] = MappingProxyType({})
    warns: tuple[str, ...] = ()


class Net(nn.Module):
    """Calls a function of its layers."""

    def __init__(self, call: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self, *inputs)


def vectors(width: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(SAMPLES, width, generator=g, dtype=torch.float64)


def images(g: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 32, 32, generator=g, dtype=torch.float64)


def words(g: torch.Generator) -> Tensor:
    return torch.randint(0, 20, (SAMPLES, 9), generator=g)


def flow() -> nn.Module:
    """The density of a sample."""
    zuko = pytest.importorskip("zuko")
    nsf = zuko.flows.NSF(4, 0, transforms=2, hidden_features=[16])
    return Net(lambda net, x: net.flow().log_prob(x), flow=nsf)


def differential_equation() -> nn.Module:
    """Of a fixed step: an adaptive one would depend on all samples of the batch."""
    odeint = pytest.importorskip("torchdiffeq").odeint
    times = torch.linspace(0, 1, 5, dtype=torch.float64)
    field = Net(lambda net, t, x: net.layers(x).tanh() * (1 + t), layers=nn.Linear(4, 4))
    return Net(
        lambda net, x: net.last(odeint(net.field, x, times.to(x), method="rk4")[-1]),
        field=field,
        last=nn.Linear(4, KINDS),
    )


def equivariant() -> nn.Module:
    o3 = pytest.importorskip("e3nn.o3")
    product = o3.FullyConnectedTensorProduct("1x1o", "1x0e + 1x1o + 1x2e", "8x0e + 4x1o")

    def call(net: Any, x: Tensor) -> Tensor:
        shapes = o3.spherical_harmonics("1x0e + 1x1o + 1x2e", x, normalize=True)
        return net.last(net.product(x, shapes))

    return Net(call, product=product, last=o3.Linear("8x0e + 4x1o", "3x0e"))


def gaussian_process() -> nn.Module:
    gpytorch = pytest.importorskip("gpytorch")
    variational = gpytorch.variational

    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
            found = variational.CholeskyVariationalDistribution(6)
            super().__init__(variational.VariationalStrategy(self, points, found))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def call(net: Any, x: Tensor) -> Any:
        found = net.process(x)
        divergence = net.process.variational_strategy.kl_divergence() / SAMPLES
        return {"mean": found.mean, "variance": found.variance, "kl": divergence.expand(len(x))}

    process = Sparse()
    process(torch.zeros(1, 4))  # the first call draws initial values
    return Net(call, process=process)


def evidence(outputs: Any, y: Tensor) -> Tensor:
    nll = F.gaussian_nll_loss(outputs["mean"], y.double(), outputs["variance"] + 0.1)
    return nll + outputs["kl"].mean()


def embedding() -> nn.Module:
    pytest.importorskip("pytorch_metric_learning")
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))


def of_triplets(outputs: Tensor, y: Tensor) -> Tensor:
    from pytorch_metric_learning.losses import TripletMarginLoss

    return TripletMarginLoss(margin=2.0)(outputs, y)


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, num_classes=KINDS, **options)

    return make


def words_in_order() -> nn.Module:
    x = pytest.importorskip("x_transformers")
    layers = x.Encoder(dim=16, depth=2, heads=2, rotary_pos_emb=True)
    encoder = x.TransformerWrapper(num_tokens=20, max_seq_len=9, attn_layers=layers)
    return Net(lambda net, x: net.encoder(x).mean(1)[:, :KINDS], encoder=encoder)


def passages() -> nn.Module:
    """Graphs of one size, as rows: messages along a ring of atoms."""
    geometric = pytest.importorskip("torch_geometric.nn")

    def call(net: Any, x: Tensor) -> Tensor:
        n, atoms, _ = x.shape
        ring = torch.arange(atoms, device=x.device)
        edges = torch.stack([ring, (ring + 1) % atoms])
        all_edges = torch.cat([edges + i * atoms for i in range(n)], 1)
        h = net.second(net.first(x.flatten(0, 1), all_edges).relu(), all_edges)
        owner = torch.arange(n, device=x.device).repeat_interleave(atoms)
        return net.last(geometric.global_mean_pool(h, owner))

    return Net(
        call,
        first=geometric.GATConv(3, 8, heads=2),
        second=geometric.SAGEConv(16, 8),
        last=nn.Linear(8, KINDS),
    )


def rings(g: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 5, 3, generator=g, dtype=torch.float64)


SYNCED = {"sync_batchnorm": True}
ROWS: dict[str, Row] = {
    "zuko, a flow": Row(flow, vectors(4), lambda out, y: -out.mean()),
    "torchdiffeq, an equation": Row(differential_equation, vectors(4)),
    "e3nn, a tensor product": Row(equivariant, vectors(3)),
    "gpytorch, a process": Row(
        gaussian_process,
        vectors(4),
        evidence,
        warns=(r"_memoize_cache.* to different values",),  # of one call
    ),
    "pytorch-metric-learning, triplets": Row(
        embedding, vectors(4), of_triplets, modes=("forward",)
    ),
    "timm, a transformer": Row(
        vision(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2
        ),
        images,
    ),
    "timm, with batch norm": Row(vision("resnet10t"), images, trainer=SYNCED),
    "x-transformers, an encoder": Row(words_in_order, words),
    "torch_geometric, graphs": Row(passages, rings),
}


class Trained(LightningModule):
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.network, self.loss_of = row.make(), row.loss

    def forward(self, x: Any) -> Any:
        return self.network(x)

    def loss(self, name: str, batch: Any) -> Tensor:
        loss = self.loss_of(self(batch[0]), batch[1])
        self.log(name, loss, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss("train/loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss("val/loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(row: Row) -> DataLoader[Any]:
    inputs = row.inputs(torch.Generator().manual_seed(0))
    return DataLoader([(x, i % KINDS) for i, x in enumerate(inputs)], BATCH)


JOBS = {
    name: Job(
        *name.split(", ", 1),
        make=lambda row=row: Trained(row),
        data=lambda row=row: loader(row),
        trainer={"precision": "64-true", **row.trainer},
        warns=row.warns,
    )
    for name, row in ROWS.items()
}


test_the_trainer = as_one_device(
    *((JOBS[name], {"mode": mode}) for name, row in ROWS.items() for mode in row.modes)
)


def dropped_in(row: Row, devices: int) -> list[Any]:
    torch.manual_seed(0)
    net = row.make().double()
    net = net.to(devices_of(1)[0]) if devices > 1 else net
    wrapper = DataParallel(net, devices_of(devices), output_device="cpu") if devices > 1 else net
    updates, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for _ in range(6):
        for x, y in loader(row):
            updates.zero_grad()
            loss = row.loss(wrapper(x), y)
            loss.backward()
            updates.step()
            losses.append(loss.detach())
    with torch.no_grad():
        outputs = [wrapper(x) for x, _ in loader(row)]
    if devices > 1:
        wrapper.close()
    return [dict(net.state_dict()), torch.stack(losses), outputs]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.trainer is not SYNCED])
def test_the_drop_in(name: str, on: str, record_property: Any) -> None:
    torch.set_default_dtype(torch.float64)
    row = ROWS[name]
    expected, actual = dropped_in(row, 1), dropped_in(row, REPLICAS)
    parameters, logs, outputs = (
        distance(a, e, what)
        for a, e, what in zip(actual, expected, ("state", "losses", "outputs"), strict=True)
    )
    found = Difference(len(expected[1]), parameters, logs, outputs)
    assert max(parameters, logs, outputs) <= 1e-9, found
    record_property("interop", JOBS[name].row("drop-in", on, found))
