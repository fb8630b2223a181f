"""Several processes: what is a process's own, and what they must say alike."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.oracle import Classifier
from support.processes import run_in_processes
from test_logs import data, trainer
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_dp.processes import rank_sizes as between_processes


class Collecting(Classifier):
    """Keeps what its steps have, and what hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor] = []
        self.counts = {"samples": 0}
        self.steps = 0
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.items.append(batch[0][:, 0])
        self.counts["samples"] = self.counts["samples"] + 1
        self.steps += 1
        return {"loss": self.loss(batch), "rows": batch[0][:, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((outputs["loss"].clone(), outputs["rows"]))


def collected(devices: int, samples: int) -> dict[str, Any]:
    seed_everything(1)
    module, loader = Collecting().double(), data(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(devices, max_epochs=1).fit(module, loader)
    losses = torch.stack([loss for loss, _ in module.outputs])
    rows = [rows for _, rows in module.outputs]
    return {"items": module.items, "steps": module.steps, "losses": losses, "rows": rows}


def check_state(told: list[Any]) -> None:
    expected = collected(0, 51)
    for rank, own in enumerate(told):
        torch.testing.assert_close(own["losses"], expected["losses"], rtol=0, atol=1e-10)
        assert own["steps"] == expected["steps"]  # what a step binds stays, with samples or without
        for i, rows in enumerate(expected["items"]):
            sizes = between_processes(len(rows), [2, 2])
            part = rows[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
            if len(part):
                torch.testing.assert_close(own["items"][i], part)
                torch.testing.assert_close(own["rows"][i], part)
    # The last batch has one sample: the second process keeps nothing of it.
    assert [len(own["items"]) for own in told] == [3, 2]


class Hooks(Classifier):
    """Logs and measures in hooks outside of steps too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0
        self.in_hook, self.in_step = SumMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.in_step.update(batch[0].mean())
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = self.seen + batch[0].sum().item()
        self.in_hook.update(batch[0].sum())

    def on_train_epoch_end(self) -> None:
        self.log("own", self.seen)
        self.log("of all", self.seen, sync_dist=True, reduce_fx="sum")
        self.log("in hook", self.in_hook)
        self.log("in step", self.in_step)
        self.log("computed", self.in_hook.compute())


def hooked(devices: int, samples: int) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    seed_everything(1)
    module = Hooks()
    job = trainer(devices, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.fit(module, data(samples))
    torch.set_default_dtype(torch.float32)
    return {name: value.clone() for name, value in job.callback_metrics.items()}


def check_hooks(told: list[Any]) -> None:
    expected = hooked(0, 53)
    for own in told:
        for name in ("in hook", "in step", "computed", "of all"):
            torch.testing.assert_close(own[name], expected[name], rtol=1e-10, atol=1e-10)
    parts = torch.stack([own["own"] for own in told])
    torch.testing.assert_close(parts.sum(), expected["own"], rtol=1e-10, atol=1e-10)
    assert parts[0] != parts[1]


class Unlike(Classifier):
    """Does in one process what it does not in the other."""

    def __init__(self, what: Callable[[Any, Any, int], None]) -> None:
        super().__init__()
        self.what = what
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.what(self, batch, batch_idx)
        return self.loss(batch)


def other_keys(module: Any, batch: Any, batch_idx: int) -> None:
    if module.global_rank == 1 and batch_idx == 1:
        module.log("mine", 1.0)


class Stubborn(float):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no copies of me")


def no_pickles(module: Any, batch: Any, batch_idx: int) -> None:
    module.metric.update(Stubborn(batch[0].mean()))


UNLIKE: dict[str, tuple[Any, str, list[str]]] = {
    "keys": (
        other_keys,
        "ValueError",
        ["'mine'", "0 on process1/cpu", "0 on process0/cpu"],
    ),
    "pickles": (no_pickles, "TypeError", ["no copies of me", "Process 0"]),
}


def errors(devices: int) -> dict[str, str]:
    told = {}
    for name, (what, *_) in UNLIKE.items():
        try:
            trainer(devices, max_epochs=1).fit(Unlike(what).double(), data(53))
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def monitored(devices: int, folder: str) -> Any:
    torch.set_default_dtype(torch.float64)
    seed_everything(1)
    stopping = EarlyStopping("val/loss", patience=1, min_delta=0.002)
    saving = ModelCheckpoint(folder, monitor="val/loss", filename="{epoch}", save_top_k=1)
    job = trainer(devices, max_epochs=30, callbacks=[stopping, saving], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.fit(Classifier(0.02), data(53), data(53, seed=5))
    torch.set_default_dtype(torch.float32)
    score: Any = saving.best_model_score
    return stopping.stopped_epoch, Path(saving.best_model_path).name, score, stopping.best_score


def everything(folder: str) -> dict[str, Any]:
    return {
        "state": collected(4, 51),
        "hooks": hooked(4, 53),
        "errors": errors(2),
        "monitors": monitored(4, folder),
    }


def test_what_is_a_processs_own_and_what_is_alike(tmp_path: Path) -> None:
    told = run_in_processes(everything, 2, str(tmp_path / "two"))
    check_state([own["state"] for own in told])
    check_hooks([own["hooks"] for own in told])
    expected = monitored(0, str(tmp_path / "one"))
    assert 0 < expected[0] < 29
    for own in told:
        for name, (_, kind, parts) in UNLIKE.items():
            assert own["errors"][name].startswith(kind), own["errors"][name]
            assert all(part in own["errors"][name] for part in parts), own["errors"][name]
        assert own["monitors"][:2] == expected[:2]
        torch.testing.assert_close(own["monitors"][2:], expected[2:], rtol=1e-10, atol=1e-10)
