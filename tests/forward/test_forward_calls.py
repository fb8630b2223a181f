"""Forward mode: losses that `forward` returns, arguments cut by the module, steps that miss it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule
from support.oracle import QUIET, Classifier, assert_equal_trees, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_dp.pytorch_lightning
from lightning_dp import DataParallelStrategy


class ModelOutput(OrderedDict):
    """Mapping and attributes at once."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@dataclass
class Outputs:
    loss: Tensor
    logits: Tensor


KINDS: dict[str, Any] = {
    "mapping": lambda loss, logits: ModelOutput(loss=loss, logits=logits),
    "dataclass": Outputs,
    "tuple": lambda loss, logits: (loss, logits),
    "bare": lambda loss, logits: loss,
}


def losses_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.loss


class WithLoss(Classifier):
    """Computes the loss in `forward`, as the models of Hugging Face do."""

    kind = "mapping"

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        return KINDS[self.kind](F.cross_entropy(logits, labels), logits)

    def loss(self, batch: Any) -> Tensor:
        output = self(batch[0], labels=batch[1])
        loss = losses_of(output)
        assert loss.shape == ()
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return losses_of(self(*batch))


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_loss_that_forward_returns_is_the_mean_over_samples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 25, 25 and 3 samples, on 3 devices."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(WithLoss, "kind", kind)
    strategy = {"mode": "forward", "weights": [0, 1, 3]}
    assert_same(run(WithLoss, 3, strategy=strategy), run(WithLoss, 1))


# Graphs: nodes, edges between them, and each node's graph


def graphs(n: int = 40, seed: int = 0) -> list[tuple[Tensor, Tensor, int]]:
    """Features of nodes, edges (each node and the next one), and a class."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (n,), generator=generator).tolist()
    return [
        (torch.randn(m, 4, generator=generator), torch.arange(m - 1).repeat(2, 1), i % 3)
        for i, m in enumerate(sizes)
    ]


def as_batch(items: Sequence[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    starts = [0]
    for x, _, _ in items:
        starts.append(starts[-1] + len(x))
    sizes = torch.tensor([len(x) for x, _, _ in items])
    edges = [edge + start for (_, edge, _), start in zip(items, starts, strict=False)]
    return {
        "x": torch.cat([x for x, _, _ in items]),
        "edge_index": torch.cat([edge + torch.tensor([[0], [1]]) for edge in edges], 1),
        "batch": torch.arange(len(items)).repeat_interleave(sizes),
        "y": torch.tensor([y for _, _, y in items]),
    }


class GraphNet(nn.Module):
    """Sums over neighbours, then over the nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h.index_add(0, edge_index[1], h[edge_index[0]])
        return h.new_zeros(int(batch[-1]) + 1, 3).index_add(0, batch, self.second(h))


class CutByGraphs:
    """How the arguments `(x, edge_index, batch)` are cut."""

    def batch_size(self, arguments: Any) -> int:
        return int(arguments[2][-1]) + 1

    def split_batch(self, arguments: Any, sizes: Sequence[int]) -> list[Any]:
        x, edges, batch = (arguments[i] for i in range(3))
        shards, first = [], 0
        for size in sizes:
            mine = ((batch >= first) & (batch < first + size)).nonzero().flatten()
            start, end = (int(mine[0]), int(mine[-1]) + 1) if size else (0, 0)
            own = (edges[0] >= start) & (edges[0] < end)
            shards.append({0: x[start:end], 1: edges[:, own] - start, 2: batch[start:end] - first})
            first += size
        return shards


class CuttingNet(CutByGraphs, GraphNet):
    pass


class OfGraphs(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def step(self, batch: Any) -> Tensor:
        return F.cross_entropy(
            self.net(batch["x"], batch["edge_index"], batch["batch"]), batch["y"]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("loss", loss, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class CallingItself(CutByGraphs, OfGraphs):
    """The module itself is called, and says how its arguments are cut."""

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.net(*arguments)

    def step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["edge_index"], batch["batch"]), batch["y"])


def fitted(make: Any, devices: int, **strategy: Any) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = [(x.double(), edges, y) for x, edges, y in graphs()]
    module, job = make(), trainer(devices, DataParallelStrategy(**strategy))
    job.fit(module, DataLoader(data, batch_size=9, collate_fn=as_batch))
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    return {"state": state, "metrics": dict(job.callback_metrics)}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: CallingItself(GraphNet()), []),
        (lambda: OfGraphs(CuttingNet()), ["net"]),
    ],
    ids=["itself", "the net"],
)
def test_arguments_are_cut_as_the_module_says(make: Any, names: list[str]) -> None:
    """The last batch has 4 graphs; some have one node."""
    strategy = {"mode": "forward", "parallel_modules": names}
    several = fitted(make, 3, **strategy)  # and no warning: it is spread, and nothing is guessed
    assert_equal_trees(several, fitted(make, 1), "fits", atol=1e-10, rtol=0.0)


def test_arguments_of_two_sizes_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"two: .*split_batch\(batch, sizes\)"):
        fitted(lambda: OfGraphs(GraphNet()), 3, mode="forward", parallel_modules=["net"])


# Steps that spread nothing


class PastForward(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.activation = nn.Tanh()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


def test_a_step_that_spreads_nothing_is_told_once() -> None:
    job = trainer(2, DataParallelStrategy(mode="forward"))
    with pytest.warns(UserWarning) as told:
        job.fit(PastForward(), loader(), loader())
    (text,) = [str(w.message) for w in told if "spread" in str(w.message)]
    assert "training_step" in text and "parallel_modules=['net', 'head']" in text


def test_calls_without_anything_to_cut_are_told() -> None:
    class Numbers(Classifier):
        def forward(self, n: int) -> Tensor:
            return self.net(torch.ones(n, 10))

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self(len(batch[0])), batch[1])

    job = trainer(2, DataParallelStrategy(mode="forward"))
    with pytest.warns(UserWarning, match=r"Numbers.training_step: .*no tensor and no list"):
        job.fit(Numbers(), loader(), loader())


# Names


@pytest.mark.parametrize(
    "package", [lightning.pytorch, pytorch_lightning], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("name, mode", [("dp_custom", "step"), ("dp_custom_forward", "forward")])
def test_each_mode_has_a_name_in_each_package(package: Any, name: str, mode: str) -> None:
    job = package.Trainer(strategy=name, accelerator="cpu", devices=2, **QUIET)
    own = {lightning.pytorch: DataParallelStrategy}.get(
        package, lightning_dp.pytorch_lightning.DataParallelStrategy
    )
    assert type(job.strategy) is own
    registry = package.strategies.StrategyRegistry
    own.register_strategies(registry)  # again, as when a notebook's cell is run again
    assert job.strategy._mode_name == mode
