"""Losses, gradients and optimizers of several processes in Lightning's loop are one device's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from support.oracle import BATCH, QUIET, assert_equal_trees
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy


class Net(LightningModule):
    """A small classifier that logs nothing, to be extended by what a case is about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Sometimes(Net):
    """Some layers are used for few samples, one for none; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(10, 3)
        self.unused = nn.Linear(10, 3)
        self.net[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        chosen = (x[:, 0] > 1.2).nonzero().squeeze(1)
        if len(chosen):
            logits = logits.index_add(0, chosen, self.rare(x[chosen]))
        return logits


class Tokens(Net):
    """The loss is a mean over few of the samples, in some parts over none: there it is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        valid = x[:, 0] > 0.8
        losses = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": losses[valid].mean(), "num_items": valid.sum(), "pred": self(x).detach()}


class Summed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 10


class ManySteps(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Embedding(50, 10, sparse=True)
        self.many = nn.EmbeddingBag(40, 10, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Any:
        index = (x[:, 0].abs() * 20).long().clamp(max=39)
        y = x + self.few(index)
        uses_many = x[:, 1] > 1  # which no sample of some shards does
        return self.net(
            y + self.many(index[:, None]) * uses_many[:, None] if uses_many.any() else y
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Checkpointed(Net):
    """What is in the checkpoint gets gradients twice in a backward."""

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return self.net(x)
        x = x.requires_grad_()
        once, again = (checkpoint(self.net, y, use_reentrant=True) for y in (x, x * 0.5))
        return once + again


class KeepsGradients(Net):
    """Gradients are cleared after every second step, by a backward called twice."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Hooked(Net):
    def on_fit_start(self) -> None:
        self.heard_by = self.trainer.callbacks[0].heard  # type: ignore[attr-defined]  # a Watch
        self.net[0].weight.register_hook(self.heard)
        self.net[2].bias.register_post_accumulate_grad_hook(self.heard_of)

    def heard(self, gradient: Any) -> Any:
        self.heard_by["weight"].append(gradient.clone())
        return gradient * 0.9

    def heard_of(self, parameter: Any) -> None:
        self.heard_by["bias"].append(parameter.grad.clone())


class Watch(Callback):
    """Notes the loss of every batch, and the gradients before every step of an optimizer."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.rows: list[Any] = []
        self.heard: dict[str, list[Tensor]] = {"weight": [], "bias": []}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        dense = {n: g.to_dense() if g.is_sparse else g.clone() for n, g in gradients.items()}
        strides = {n: list(g.stride()) for n, g in gradients.items() if not g.is_sparse}
        self.seen.append({"gradients": dense, "strides": strides})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        own = dict(outputs)
        self.seen.append(own.pop("loss").clone())
        if "num_items" in own:
            self.seen.append(float(own.pop("num_items")))
        self.rows.append(own)


@dataclass
class Case:
    kind: type[Net]
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    atol: float = 1e-10
    double: bool = True
    same_shards: bool = False  # one device would give other numbers, as many in one process not


CASES = {
    "plain": Case(Net),
    "accumulating": Case(Net, {"accumulate_grad_batches": 3}),
    "unused": Case(Sometimes),
    "tokens": Case(Tokens),
    "sums": Case(Summed, strategy={"loss_reduction": "sum"}),
    "clipped": Case(Net, {"gradient_clip_val": 0.1}),
    "lbfgs": Case(ManySteps, atol=1e-7),
    "bf16": Case(Net, {"precision": "bf16-mixed"}, atol=1e-5, double=False, same_shards=True),
    "fp16": Case(Net, {"precision": "16"}, atol=1e-5, double=False, same_shards=True),
    "sparse": Case(Sparse),
    "sparse, accumulating": Case(Sparse, {"accumulate_grad_batches": 2}),
    "checkpointed": Case(Checkpointed),
    "kept": Case(KeepsGradients),
    "hooked": Case(Hooked),
}


def data(samples: int, dtype: torch.dtype) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 10, generator=generator, dtype=dtype)
    x[:, 0] += torch.linspace(-1, 1, samples)  # what is chosen by it is in the last parts mostly
    y = torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def fitted(case: Case, devices: int, samples: int, **strategy: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    module: Any = case.kind()
    if case.double:
        module.double()
    options = dict(case.trainer)
    if options.get("precision") == "16":  # the first step is skipped
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        del options["precision"]
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    own = DataParallelStrategy(**case.strategy, **strategy) if devices else "auto"
    watch = Watch()
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=devices or 1,
        strategy=own,
        max_epochs=2,
        callbacks=[watch],
        num_sanity_val_steps=0,
        **options,
    )
    dtype = torch.float64 if case.double else torch.float32
    trainer.fit(module, data(samples, dtype), data(3, dtype))
    return {
        "state": module.state_dict(),
        "seen": watch.seen,
        "rows": watch.rows,
        "heard": watch.heard,
    }


def fits(names: list[str], devices: int, samples: int, strategy: dict[str, Any]) -> dict[str, Any]:
    return {name: fitted(CASES[name], devices, samples, **strategy) for name in names}


def check(counts: tuple[int, int], samples: int, names: list[str], **strategy: Any) -> None:
    processes, k = counts
    found = run_in_processes(fits, processes, names, processes * k, samples, strategy, seconds=500)
    wrong = []
    for name in names:
        case = CASES[name]
        one = fitted(case, processes * k if case.same_shards else 0, samples)
        try:
            assert_as_one(name, case, one, [own[name] for own in found])
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def assert_as_one(name: str, case: Case, one: Any, several: list[Any]) -> None:
    for own in several:
        for what in ("state", "seen", "heard"):
            assert_equal_trees(own[what], one[what], f"{name}: {what}", atol=case.atol)
    columns = zip(*[own["rows"] for own in several], strict=True)
    for parts, its in zip(columns, one["rows"], strict=True):
        assert_equal_trees(joined(list(parts)), its, f"{name}: rows", atol=case.atol)


def joined(parts: list[Any]) -> Any:
    """The rows of all processes, in their order."""
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(parts)


def test_two_processes() -> None:
    check((2, 1), 51, list(CASES), executor="inorder")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "executor", "samples"),
    [
        ((2, 2), "inorder", 53),
        ((2, 1), "threads", 53),
        ((4, 1), "threads", 51),
    ],
)
def test_any_number(counts: tuple[int, int], executor: str, samples: int) -> None:
    # Other numbers of processes cut batches into other shards.
    names = [name for name, case in CASES.items() if counts[1] == 1 or not case.same_shards]
    check(counts, samples, names, executor=executor)
