"""In several processes training leaves what it leaves on one device, in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support import device_kinds
from support.oracle import Classifier, assert_equal_trees, loader, run, trainer
from support.processes import assert_pass_in_two_processes, run_in_processes
from test_conformance import OPTIONS
from test_conformance import cases as conformance
from torch import Tensor, nn
from torch.nn import functional as F


class Sometimes(Classifier):
    """One layer is used for few samples, one for none; a parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.unused = nn.Linear(10, 3), nn.Linear(10, 3)
        self.net[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        chosen = (x[:, 0] > 1.2).nonzero().squeeze(1)
        logits = self.net(x)
        return logits.index_add(0, chosen, self.rare(x[chosen])) if len(chosen) else logits


class Tokens(Classifier):
    """The loss is a mean over few samples, in some shards over none: there it is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        valid = x[:, 0] > 0.8
        losses = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": losses[valid].mean(), "num_items": valid.sum(), "pred": self(x).detach()}


class Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 50


class Hooked(Classifier):
    """Hooks of parameters see the gradient of the whole batch, in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.net[2].weight.register_hook(self.double_gradient)
        self.net[0].bias.register_post_accumulate_grad_hook(self.note)

    def double_gradient(self, gradient: Tensor) -> Tensor:
        self.seen[0] += gradient.square().sum()
        return 2 * gradient

    def note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen[1] += parameter.grad.square().sum()


class Late(Classifier):
    """Only samples with a large first number count; often a shard has none, and no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        kept = x[:, 0] > (1 if batch_idx < 2 else -9)  # some loss in each batch
        loss = F.cross_entropy(self(x[kept]), y[kept])
        return {"loss": loss, "num_items": int(kept.sum())} if kept.any() else None


class ReadsOutputs(Classifier):
    """Hooks read what steps return and what has been logged, and log themselves."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "count": torch.tensor(1.0)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", outputs["loss"] * 2 + outputs["count"], on_step=True)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["train/loss_epoch"] + 1)


def stopping() -> list[Callback]:
    return [EarlyStopping("val/loss", patience=0, min_delta=0.02)]


@dataclass(frozen=True)
class Case:
    """A module, which has to be this file's own, and how it is trained."""

    make: Callable[[], LightningModule]
    options: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list


CASES = [
    Case(Classifier, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    Case(Classifier, strategy={"weights": [1, 2, 1, 3, 0, 1]}),
    Case(Classifier, {"max_epochs": 9}, callbacks=stopping),
    Case(Sometimes),
    Case(Tokens),
    Case(Summed, strategy={"loss_reduction": "sum"}),
    Case(Hooked),
    Case(Late),
    Case(ReadsOutputs),
]


def outcome(case: Case, devices: int, samples: int) -> Any:
    torch.set_default_dtype(torch.float64)
    strategy = {**case.strategy}
    if "weights" in strategy:
        strategy["weights"] = strategy["weights"][:devices]
    done = run(
        case.make,
        devices,
        strategy=strategy if devices > 1 else None,
        data=lambda: loader(samples),
        callbacks=case.callbacks(),
        **case.options,
    )
    counts = (done.trainer.global_step, done.trainer.current_epoch)
    logged = (done.callback_metrics, done.logged_metrics, done.validated, done.tested)
    return dict(done.module.state_dict()), counts, logged


class Counts(Classifier):
    """Keeps more in its checkpoints."""

    seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def resumed(devices: int, folder: Path) -> Any:
    """A training that goes on from a checkpoint, and the names of those that it leaves."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder}
    first = trainer(devices, max_epochs=1, **options)
    first.fit(Counts(), loader(), loader())
    first.save_checkpoint(folder / "own.ckpt")
    saving = ModelCheckpoint(folder / "more", every_n_train_steps=2, save_top_k=-1, save_last=True)
    module, again = Counts(), trainer(devices, max_epochs=3, callbacks=[saving], **options)
    again.fit(module, loader(), loader(), ckpt_path=folder / "own.ckpt")
    names = sorted(path.name for path in (folder / "more").iterdir())
    return dict(module.state_dict()), module.seen, names


def outcomes(devices: int, samples: int, folder: Path) -> list[Any]:
    found = [outcome(case, devices, samples) for case in CASES]
    return [*found, resumed(devices, folder)]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:`weights_only` was not set")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("processes", "devices", "samples"),
    [(2, 4, 51), *(pytest.param(*n, marks=pytest.mark.slow) for n in [(2, 2, 53), (3, 6, 51)])],
)
def test_the_numbers_are_those_of_one_device(
    processes: int, devices: int, samples: int, tmp_path: Path
) -> None:
    """The last batch has 1 sample or 3: some processes have none."""
    expected = outcomes(1, samples, tmp_path / "one")
    several = run_in_processes(outcomes, processes, devices, samples, tmp_path / "several")
    for rank, own in enumerate(several):
        for case, found, one in zip([*CASES, "resumed"], own, expected, strict=True):
            assert_equal_trees(found, one, f"{case}, process {rank}", atol=1e-10, rtol=0)


# What is there already, once more in two processes

MATRIX = "same_numbers/test_conformance.py::test_as_one_device"
QUICK = ["language-plain-cpu", "measured-weights-cpu", "multitask-accumulation-sim"]
FORWARD = {"forward", "manual", "two-optimizers", "adversarial", "contrastive"}
"""Options and families in forward mode, which several processes refuse by name."""
TURNS = 6
"""An option has one of so many parts of its cases; all would take long."""


def rows() -> Iterator[Any]:
    """Some cases of each option, of all kinds of devices, by turns."""
    known = [case.values for case in conformance() if FORWARD.isdisjoint(case.values)]
    for number, option in enumerate(key for key in OPTIONS if key not in {*FORWARD, "output-1"}):
        own = [f"{MATRIX}[{'-'.join(values)}]" for values in known if values[1] == option]
        part = [name for i, name in enumerate(own) if i // 2 % TURNS == number % TURNS]
        yield pytest.param(part, id=option)


def test_some_cases_of_the_conformance_matrix() -> None:
    here = [name for name in QUICK if name.endswith(device_kinds.kinds)]
    assert_pass_in_two_processes([f"{MATRIX}[{name}]" for name in here])


@pytest.mark.slow
@pytest.mark.parametrize("names", list(rows()))
def test_the_conformance_matrix(names: list[str]) -> None:
    assert_pass_in_two_processes(names)


@pytest.mark.slow
def test_the_promise_on_one_machine_holds() -> None:
    """But for what is refused by name, and for batch norm, which sees other shards."""
    refused = ("limited", "output_device", "weights", "forward", "uses_each_shards")
    chosen = " and not ".join(["sim", *refused])
    assert_pass_in_two_processes(["same_numbers/test_same_numbers.py"], ["-k", chosen])
