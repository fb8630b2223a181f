"""Forward mode: losses that `forward` returns, arguments cut by the module, steps that miss it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F

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


# Graphs: nodes, and each node's graph


class OfGraphs(Classifier):
    """A batch has the nodes of several graphs; `forward` gives each graph's sum."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return x.new_zeros(int(graph[-1]) + 1, 3).index_add(0, graph, self.net(x))

    def sums(self, batch: Any) -> Tensor:
        x, y = batch
        graph = torch.arange(len(x), device=x.device).repeat_interleave(y + 1)
        return self(x[graph], graph)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.sums(batch), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sums(batch)


class CutByGraphs(OfGraphs):
    """Says how the arguments `(x, graph)` are cut."""

    def batch_size(self, arguments: Any) -> int:
        return int(arguments[1][-1]) + 1

    def split_batch(self, arguments: Any, sizes: Sequence[int]) -> list[Any]:
        x, graph = arguments[0], arguments[1]
        ends = torch.tensor(sizes).cumsum(0).to(graph.device)
        shards = [(graph >= end - n) & (graph < end) for end, n in zip(ends, sizes, strict=True)]
        starts = [end - n for end, n in zip(ends, sizes, strict=True)]
        return [{0: x[own], 1: graph[own] - a} for own, a in zip(shards, starts, strict=True)]


@pytest.mark.usefixtures("on")
def test_arguments_are_cut_as_the_module_says() -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(CutByGraphs, 3, strategy={"mode": "forward"}), run(CutByGraphs, 1))


def test_arguments_of_two_sizes_are_refused_with_the_way_out() -> None:
    class OfTwoSizes(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return self(batch[0], batch[1][:7])

    with pytest.raises(ValueError, match=r"two: .*split_batch\(batch, sizes\)"):
        trainer(3, DataParallelStrategy(mode="forward")).fit(OfTwoSizes(), loader(), loader())


# Steps that spread nothing


class PastForward(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.activation = nn.Tanh()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


class Numbers(Classifier):
    def forward(self, n: int) -> Tensor:
        return self.net(torch.ones(n, 10))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(len(batch[0])), batch[1])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (PastForward, "parallel_modules=['net', 'head']"),
        (Numbers, "Numbers.training_step: expected calls that are spread"),
    ],
)
def test_a_step_that_spreads_nothing_is_told_once(make: Any, why: str) -> None:
    job = trainer(2, DataParallelStrategy(mode="forward"))
    with pytest.warns(UserWarning) as told:
        job.fit(make(), loader(), loader())
    (text,) = [str(w.message) for w in told if "spread" in str(w.message)]
    assert "training_step" in text and why in text
