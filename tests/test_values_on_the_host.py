"""What devices compute and the host reads: it is there when it is read, and waits are few."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy

EXECUTORS = ["threads", "inorder"]


@pytest.fixture(autouse=True)
def on_sim(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are strict, and count the host's waits."""
    from lightning_dp import sim

    sim.enable(8)
    monkeypatch.setattr(oracle, "ON", "sim")


class Manual(Classifier):
    """Calls its backward and its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train/loss", loss)
        return loss.detach()


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
