"""Forward mode in the Trainer: losses of the whole batch, or of `forward`; what it refuses."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from support.device_kinds import on_separate
from support.oracle import (
    Classifier,
    assert_same,
    devices_of,
    loader,
    run,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.usefixtures("on"),
    # `forward` logs, which is for other steps.
    pytest.mark.filterwarnings(r"ignore:.*predict_step. expected calls that are spread"),
]


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    """Every sample against all others of the batch."""
    z = F.normalize(z, dim=1)
    logits = z @ z.T / 0.5
    others = 1 - torch.eye(len(z)).to(z)
    same = (y[:, None] == y).to(z) * others
    log_p = logits - (logits.exp() * others).sum(1, keepdim=True).add(1e-3).log()
    return -(log_p * same).sum() / (same.sum() + 1)


def dice(z: Tensor, y: Tensor) -> Tensor:
    """Sums over the batch in numerator and denominator."""
    p, truth = z.softmax(1), F.one_hot(y, 3).to(z)
    return (1 - 2 * (p * truth).sum(0) / (p.sum(0) + truth.sum(0) + 1)).mean()


LOSSES = {"contrastive": contrastive, "dice": dice}


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


class WholeBatch(Classifier):
    """Losses over the whole batch; logs, metrics and lists in the step and inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = nn.ModuleDict({stage: accuracy() for stage in ("fit", "other")})
        self.error = nn.ModuleDict(
            {stage: torchmetrics.MeanSquaredError() for stage in ("fit", "other")}
        )
        self.batches: list[Tensor] = []
        self.shards: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        self.log("inside/mean", z.mean())
        stage = "fit" if self.training else "other"
        self.error[stage](z.sum(1), x.sum(1))
        self.log(f"{stage}/error", self.error[stage], on_epoch=True)
        self.shards.append(z.detach())
        return z

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self(x)
        losses = {name: loss(z, y) for name, loss in LOSSES.items()}
        self.log_dict({f"loss/{name}": loss for name, loss in losses.items()})
        stage = "fit" if self.training else "other"
        self.acc[stage](z, y)
        self.log(f"{stage}/acc", self.acc[stage])
        self.batches.append(z.detach())
        return sum(losses.values())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0])
        return {"z": z, "normal": z / z.square().sum().sqrt(), "names": list("abc")}

    def on_validation_epoch_end(self) -> None:
        z, same = torch.cat(self.batches), torch.cat(self.shards)
        assert torch.equal(z, same)
        self.log(
            "val/positions", z.double().mean(1) @ torch.linspace(0, 1, len(z)).to(z.device).double()
        )
        self.batches.clear()
        self.shards.clear()


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
    """Computes the loss in `forward`, as the models of Hugging Face do: the mean over samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

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


# Graphs: nodes, and each node's graph


class CutByGraphs(Classifier):
    """A batch has the nodes of several graphs; `forward` gives each graph's sum.

    It says how the arguments `(x, graph)` are cut.
    """

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

    def batch_size(self, arguments: Any) -> int:
        return int(arguments[1][-1]) + 1

    def split_batch(self, arguments: Any, sizes: Sequence[int]) -> list[Any]:
        x, graph = arguments[0], arguments[1]
        ends = torch.tensor(sizes).cumsum(0).to(graph.device)
        shards = [(graph >= end - n) & (graph < end) for end, n in zip(ends, sizes, strict=True)]
        starts = [end - n for end, n in zip(ends, sizes, strict=True)]
        return [{0: x[own], 1: graph[own] - a} for own, a in zip(shards, starts, strict=True)]


class Recomputing(Classifier):
    """A checkpoint around the whole call."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return contrastive(checkpoint(self, x.requires_grad_(), use_reentrant=self.reentrant), y)


ELSEWHERE = {"output_device": "cpu", "split": "chunk", "parallel_modules": ["net"]}
LAWS: dict[str, tuple[Callable[[], Classifier], dict[str, Any]]] = {
    "losses over the whole batch": (WholeBatch, {"weights": [0, 1, 2], "executor": "threads"}),
    "losses on the host": (WholeBatch, ELSEWHERE),
    "arguments cut by the module": (CutByGraphs, {}),
    **{
        f"a loss that forward returns, {kind}": (partial(WithLoss, kind), {"weights": [0, 1, 3]})
        for kind in KINDS
    },
    **{
        f"reentrant={reentrant}": (partial(Recomputing, reentrant), {})
        for reentrant in (True, False)
    },
}


@pytest.mark.parametrize("law", LAWS)
def test_it_trains_as_on_one_device(law: str, on: str) -> None:
    if law.startswith("reentrant") and on != "cpu":
        pytest.skip("accelerators recompute on many threads")
    torch.set_default_dtype(torch.float64)
    make, options = LAWS[law]
    assert_same(run(make, 3, strategy={"mode": "forward", **options}), run(make, 1))


# Places


class Places(Classifier):
    """Writes down where things are."""

    def __init__(self, saw: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.saw = saw

    def forward(self, x: Tensor) -> Tensor:
        self.saw("inside", (x.device, self.device))
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        self.saw("batch", batch[0].device)
        self.saw("self", self.device)
        z = self(batch[0])
        self.saw("outputs", z.device)
        loss = dice(z, batch[1].to(z.device))
        self.saw("loss", loss.device)
        return loss


@on_separate
@pytest.mark.usefixtures("unchecked")  # it names the places: on one device they are others
@pytest.mark.parametrize(
    ("output_device", "move_batch"), [(None, True), ("cpu", True), (1, False), ("other", True)]
)
def test_everything_outside_of_forward_is_on_the_output_device(
    output_device: Any, move_batch: bool
) -> None:
    root, second, _, other = devices_of(4)
    here = {None: root, "cpu": torch.device("cpu"), 1: second, "other": other}[output_device]
    output_device = other if output_device == "other" else output_device
    options = {"output_device": output_device, "move_batch": move_batch, "executor": "inorder"}
    seen: dict[str, set[Any]] = {}
    module = Places(lambda name, place: seen.setdefault(name, set()).add(place))
    job = trainer(3, DataParallelStrategy(mode="forward", **options), max_epochs=1)
    job.fit(module, loader(), loader())
    assert seen["batch"] == {here if move_batch else torch.device("cpu")}
    assert seen["self"] == seen["outputs"] == seen["loss"] == {here}
    assert seen["inside"] == {(device, device) for device in devices_of(3)}


# Refusals and warnings


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
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


@pytest.mark.parametrize("on", ["cpu"], indirect=True)
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
