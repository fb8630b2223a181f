"""Lightning on one simulated device: accelerator, devices, precision, and the CPU's numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from sim_devices.accelerator import SimAccelerator, register
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # No bias before the normalisation: its gradient is rounding noise, which AdamW blows up.
        self.net = nn.Sequential(
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.accuracies = nn.ModuleDict(
            {stage: Accuracy("multiclass", num_classes=3) for stage in ("train_", "val_", "test_")}
        )
        self.seen: set[tuple[str, torch.dtype]] = set()

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        output = self.net(x)
        self.seen.add((str(output.device), output.dtype))
        loss = nn.functional.cross_entropy(output, y)
        accuracy = self.accuracies[stage + "_"]
        accuracy(output, y)
        self.log(f"{stage}_loss", loss, on_epoch=True)
        self.log(f"{stage}_accuracy", accuracy, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@pytest.fixture
def loader() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=20)


def classifier() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    options = {
        "accelerator": "sim",
        "devices": 1,
        "max_epochs": 3,
        "precision": "32-true",
    } | options
    return Trainer(
        **options,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


def test_the_accelerator_registers_once() -> None:
    register()
    register()
    assert AcceleratorRegistry["sim"]["accelerator"] is SimAccelerator
    assert SimAccelerator.is_available() and SimAccelerator.name() == "sim"


def test_one_device_gives_the_cpus_numbers(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]]
) -> None:
    results = []
    for accelerator in ("cpu", "sim"):
        model, run = classifier(), trainer(tmp_path / accelerator, accelerator=accelerator)
        run.fit(model, loader, loader)
        metrics = dict(run.callback_metrics)
        metrics |= (
            run.validate(model, loader, verbose=False)[0]
            | run.test(model, loader, verbose=False)[0]
        )
        predictions = torch.cat([part.cpu() for part in run.predict(model, loader) or []])
        results.append((model, metrics, predictions))
        where = "cpu" if accelerator == "cpu" else "sim:0"
        assert model.seen == {(where, torch.float32)}
        assert run.strategy.root_device == torch.device(where)
    (one, one_metrics, one_predictions), (other, other_metrics, other_predictions) = results
    for expected, got in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    assert one_metrics.keys() == other_metrics.keys()
    for name, value in one_metrics.items():
        assert float(other_metrics[name]) == pytest.approx(float(value), rel=1e-4)
    assert torch.equal(one_predictions, other_predictions)


def test_a_checkpoint_moves_between_devices_and_the_cpu(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]]
) -> None:
    path = tmp_path / "saved.ckpt"
    model, run = classifier(), trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    run.fit(model, loader, loader)
    run.save_checkpoint(path)
    resumed = []
    for accelerator in ("cpu", "sim"):
        again = classifier()
        options = {"accelerator": accelerator, "enable_checkpointing": False}
        trainer(tmp_path, **options).fit(again, loader, loader, ckpt_path=path)
        resumed.append(again)
    for expected, got in zip(*(model.parameters() for model in resumed), strict=True):
        torch.testing.assert_close(got, expected)
    loaded = Classifier.load_from_checkpoint(path, map_location="sim:2")
    assert loaded.net[0].weight.device == torch.device("sim:2")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_precision_reaches_the_device(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]], precision: str, dtype: torch.dtype
) -> None:
    model = classifier()
    trainer(tmp_path, precision=precision, max_epochs=1).fit(model, loader, loader)
    assert model.seen == {("sim:0", dtype)}


def test_half_precision_with_a_scaler(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]]
) -> None:
    model, plugin = classifier(), MixedPrecision("16-mixed", "sim")
    trainer(tmp_path, plugins=[plugin], precision=None, max_epochs=1).fit(model, loader, loader)
    assert model.seen == {("sim:0", torch.float16)}
    assert plugin.scaler is not None and plugin.scaler.is_enabled()


@pytest.mark.parametrize("devices", [[3], "3,"])
def test_the_device_asked_for_is_used(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]], devices: list[int] | str
) -> None:
    model, run = classifier(), trainer(tmp_path, devices=devices, max_epochs=1)
    run.fit(model, loader, loader)
    assert model.seen == {("sim:3", torch.float32)}
    assert torch.sim.current_device() == 3


def test_a_strategy_with_a_device_keeps_it(
    tmp_path: Path, loader: DataLoader[tuple[Tensor, ...]]
) -> None:
    model = classifier()
    trainer(tmp_path, strategy=SingleDeviceStrategy("sim:5"), max_epochs=1).fit(
        model, loader, loader
    )
    assert model.seen == {("sim:5", torch.float32)}


@pytest.mark.parametrize(
    ("devices", "ids"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        ("2", [0, 1]),
        ([7, 2], [7, 2]),
        ("5,1", [5, 1]),
        (-1, list(range(8))),
        ("auto", list(range(8))),
    ],
)
def test_devices_are_numbers_ids_or_all(devices: int | str | list[int], ids: list[int]) -> None:
    assert SimAccelerator.parse_devices(devices) == ids
    assert SimAccelerator.get_parallel_devices(ids) == [torch.device("sim", index) for index in ids]


def test_a_device_that_repeats_is_the_strategys_to_take() -> None:
    with pytest.raises(ValueError, match=r"different ids .* \[0, 0\].*Strategy\(devices=\['sim:0'"):
        SimAccelerator.parse_devices([0, 0])


@pytest.mark.parametrize(
    "devices", [[8], [-1, 0], [1, 1], 9, -2, "12", "x", [0.5], [True], "1,x", None]
)
def test_devices_that_are_not_there_are_refused(devices: Any) -> None:
    with pytest.raises(
        ValueError, match=r"devices: expected .* of simulated devices, got .*enable"
    ):
        trainer(Path(), devices=devices)


@pytest.mark.slow
def test_the_trainer_enables_enough_devices_by_itself() -> None:
    code = (
        "import torch; from lightning.pytorch import Trainer; import sim_devices\n"
        "Trainer(accelerator='sim', devices=[9], barebones=True)\n"
        "assert torch.sim.device_count() == 10"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],  # whose modules it imports
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_device_stats_are_bytes() -> None:
    before = SimAccelerator().get_device_stats("sim:2")["memory_allocated"]
    x = torch.ones(1000, device="sim:2")
    stats = SimAccelerator().get_device_stats(torch.device("sim:2"))
    assert stats["memory_allocated"] - before == x.nbytes
    assert stats["memory_free"] == stats["memory_total"] - stats["memory_allocated"]
    assert stats["max_memory_allocated"] >= stats["memory_allocated"]
