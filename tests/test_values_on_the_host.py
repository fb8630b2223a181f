"""What devices compute and the host reads: it is there when it is read, and waits are few."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from oracle import ByHand, Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.batch.leaves import pick

EXECUTORS = ["threads", "inorder"]


@pytest.fixture(autouse=True)
def on_sim(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are strict, and count the host's waits."""
    from lightning_dp import sim

    sim.enable(8)
    monkeypatch.setattr(oracle, "ON", "sim")


class Manual(ByHand, Classifier):
    pass


class Seen(Callback):
    """The losses as callbacks read them, at once."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss))


# --- a value that was copied to the host is there ------------------------------------------------


def losses_of(make: type[Classifier], devices: int, **options: Any) -> list[float]:
    torch.manual_seed(0)
    seen, strategy = Seen(), DataParallelStrategy(**options)
    job = trainer(devices, strategy, callbacks=[seen])
    job.fit(make(), loader(), loader())
    return seen.losses


CASES = [(Classifier, "step"), (Classifier, "forward"), (Manual, "step")]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("make, mode", CASES, ids=["step", "forward", "manual"])
def test_the_loss_on_the_host_is_there(make: Any, mode: str, executor: str) -> None:
    losses = losses_of(make, 3, mode=mode, executor=executor, output_device="cpu")
    assert losses == pytest.approx(losses_of(make, 1), abs=1e-5)


# --- the scale of a gradient scaler --------------------------------------------------------------


def scaled(make: type[Classifier], devices: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("sim", init_scale=2.0**12, growth_interval=2)
    plugins, strategy = [MixedPrecision("16-mixed", "sim", scaler)], DataParallelStrategy(**options)
    module, job = make(), trainer(devices, strategy, accelerator="sim", plugins=plugins)
    job.fit(module, loader(), loader())
    assert scaler._scale is not None and scaler._scale.device == torch.device("sim:0")
    return scaler.get_scale(), dict(module.state_dict())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("make, mode", CASES, ids=["step", "forward", "manual"])
def test_a_scale_is_on_the_root_where_the_loss_is_on_the_host(
    make: Any, mode: str, executor: str
) -> None:
    """A scaler on the host reads what devices have found, and does not wait for it."""
    scale, state = scaled(make, 3, mode=mode, executor=executor, output_device="cpu")
    expected, oracle_state = scaled(make, 1)
    assert scale == expected != 2.0**12
    assert_equal_trees(state, oracle_state, "state", atol=2e-3, rtol=0)


# --- how often the host waits for a device -------------------------------------------------------


class Several(Classifier):
    """Logs more than one value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"train/loss": loss, "train/twice": 2 * loss, "train/max": loss})
        return loss


class ManualAlone(Manual):
    """Returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Counted(Classifier):
    """Its loss is a mean over tokens, of which the devices know how many there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "num_items": (batch[1] >= 0).sum()}


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(10, 16), norm, nn.Tanh(), nn.Linear(16, 3))


class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Waits(Callback):
    """How often the host has waited when each training step was through."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(torch.sim.host_waits())


def waits_per_step(make: type[Classifier], options: dict[str, Any], **fit: Any) -> set[int]:
    waits, strategy = Waits(), DataParallelStrategy(**options)
    job = trainer(3, strategy, callbacks=[waits], max_epochs=1, log_every_n_steps=50, **fit)
    job.fit(make(), loader(96, 16), loader(3))
    pairs = zip(waits.seen[1:], waits.seen[2:], strict=False)  # without what is set up at first
    return {after - before for before, after in pairs}


NO_WAITS: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any]]] = {
    "plain": (Classifier, {}, {}),
    "logs": (Several, {}, {}),
    "forward": (Classifier, {"mode": "forward"}, {}),
    "manual": (Manual, {}, {}),
    "accumulating": (Classifier, {}, {"accumulate_grad_batches": 2}),
    "clipped": (Classifier, {}, {"gradient_clip_val": 1.0}),
    "batch norm": (Normed, {}, {}),
    "synced batch norm": (Normed, {}, {"sync_batchnorm": True}),
    "means of buffers": (Normed, {"buffers": "mean"}, {}),
    "forward, with batch norm": (Normed, {"mode": "forward"}, {}),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", NO_WAITS)
def test_a_step_does_not_wait_for_devices(case: str, executor: str) -> None:
    make, options, fit = NO_WAITS[case]
    assert waits_per_step(make, {"executor": executor, **options}, **fit) == {0}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_counts_of_items_are_waited_for_once(executor: str) -> None:
    """They decide which losses count at all."""
    assert waits_per_step(Counted, {"executor": executor}) == {1}


def test_frozen_weights_are_looked_at_with_one_wait() -> None:
    """Whether somebody has written to them through `.data`, the host must know."""
    assert waits_per_step(Frozen, {}) == {1}


@pytest.mark.parametrize("make", [Classifier, Several, ManualAlone])
def test_the_host_waits_once_for_the_loss_and_once_for_all_that_is_logged(make: Any) -> None:
    assert waits_per_step(make, {"output_device": "cpu"}) == {2}


def test_picked_samples_are_picked_on_their_device() -> None:
    """As a split by cost picks them from a batch that is there already."""
    batch = torch.arange(6.0, device="sim:0")
    before = torch.sim.host_waits()
    picked = pick(batch, [4, 0, 3], 0)
    assert torch.sim.host_waits() == before
    assert picked.tolist() == [4.0, 0.0, 3.0]
