"""sync_batchnorm=True: the statistics of the whole batch, over the replicas of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

BATCH = 25
EXACT = {"rtol": 0.0, "atol": 1e-10}


def data(samples: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 4, 2, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 5, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, lengths), batch_size=BATCH)


class Normed(LightningModule):
    """Two layers after each other, and two that do not depend on each other."""

    momentum: float | None = 0.1

    def __init__(self) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        norms = {name: nn.BatchNorm2d(4, momentum=self.momentum) for name in "abcd"}
        self.norms = nn.ModuleDict(norms).double()
        self.first = nn.Conv2d(3, 4, 1).double()
        self.second = nn.Conv2d(4, 4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms["a"](self.first(x)).tanh()
        z = self.norms["b"](self.second(y))
        return z + self.norms["c"](y.sin()) * self.norms["d"](y.cos())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sin().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).sin().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Cumulative(Normed):
    momentum = None


class Frozen(Normed):
    """What comes before the norms needs no gradients: no graph goes on in other processes."""

    def __init__(self) -> None:
        super().__init__()
        for conv in (self.first, self.second):
            conv.requires_grad_(False)


class Uneven(Normed):
    """Of every sample another number of positions, which batch norm counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = batch
        rows = self.first(x).mean(3).transpose(1, 2)
        valid = torch.arange(4, device=x.device) < lengths[:, None]
        loss = self.norm(rows[valid]).square().sin().mean()
        return {"loss": loss, "num_items": lengths.sum()}


MODULES = {cls.__name__: cls for cls in (Normed, Cumulative, Frozen, Uneven)}


def trained(name: str, devices: int, samples: int, **options: Any) -> dict[str, Tensor]:
    """Parameters and buffers after a fit; on one device where there are no devices."""
    module = MODULES[name]()
    trainer = Trainer(
        accelerator="cpu",
        devices=max(devices, 1),
        strategy=DataParallelStrategy(**options) if devices else "auto",
        sync_batchnorm=devices > 0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(samples), data(samples))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Flat(Normed):
    """One value per channel where the batch has one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.norm(self.first(batch[0]).mean((2, 3))).sin().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


MODULES["Flat"] = Flat


def refusal(devices: int) -> str:
    try:
        trained("Flat", devices, 51)
    except ValueError as error:
        return str(error)
    return ""


NAMES = ("Normed", "Cumulative", "Frozen", "Uneven")


def everything(devices: int, samples: int) -> dict[str, Any]:
    """In both modes, in one start of the processes."""
    found: dict[str, Any] = {name: trained(name, devices, samples) for name in NAMES}
    for name in NAMES[:2]:
        mode = {"mode": "forward"} if devices else {}
        found[f"{name}, forward mode"] = trained(name, devices, samples, **mode)
    return {**found, "refusal": refusal(devices)}


@pytest.mark.parametrize(
    ("processes", "devices", "samples"),
    [(2, 2, 51), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((2, 6, 53), (3, 3, 52)))],
)
def test_statistics_and_gradients_are_those_of_the_batch(
    processes: int, devices: int, samples: int
) -> None:
    expected = everything(0, samples)
    assert "Expected more than 1 value per channel" in expected.pop("refusal")
    for process in run_in_processes(everything, processes, devices, samples):
        assert "Expected more than 1 value per channel" in process.pop("refusal")
        for name, one in expected.items():
            torch.testing.assert_close(
                process[name], one, msg=lambda m, n=name: f"{n}: {m}", **EXACT
            )
