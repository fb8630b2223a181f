"""Several processes with several devices each give the numbers of one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from oracle import BATCH, SAMPLES, Classifier
from several_processes import run_in_processes
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp


def data(samples: int = SAMPLES, *, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=shuffle)


def trained(devices: int, samples: int) -> dict[str, Tensor]:
    """The parameters after a fit; in several processes if there are some."""
    seed_everything(1)
    torch.manual_seed(1)
    module = Classifier().double()
    strategy: Any = lightning_dp.DataParallelStrategy() if devices > 0 else "auto"
    trainer = Trainer(
        accelerator="cpu",
        devices=max(devices, 1),
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(samples), data(samples, shuffle=False))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("processes, devices", [(2, 2), (2, 1)])
@pytest.mark.parametrize("samples", [53, 51])
def test_parameters_are_those_of_one_device(processes: int, devices: int, samples: int) -> None:
    expected = trained(0, samples)
    for own in run_in_processes(trained, processes, processes * devices, samples):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
