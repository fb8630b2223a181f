"""Batch norm without sync: no process gets a part that has no variance."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from oracle import Classifier
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp

SEEN: list[int] = []
"""Of this process: what a step without samples of its own leaves on self is taken back."""


class Normed(Classifier):
    """Notes how many samples it is given in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def loss(self, batch: Any) -> Tensor:
        SEEN.append(len(batch[0]))
        return super().loss(batch)


def seen_by(samples: int) -> tuple[list[int], Tensor]:
    torch.manual_seed(1)
    module, generator = Normed(), torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(samples, 10, generator=generator),
        torch.randint(3, (samples,), generator=generator),
    )
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_dp.DataParallelStrategy(),
        max_epochs=1,
        limit_val_batches=0,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    return SEEN, module.net[0].weight.detach()


@pytest.mark.parametrize("samples, parts", [(11, ([4, 3], [4, 2])), (10, ([4, 2], [4, 2]))])
def test_each_process_that_works_has_two_samples(
    samples: int, parts: tuple[list[int], list[int]]
) -> None:
    """One that has none takes part with two of another's, which count for nothing."""
    results = run_in_processes(seen_by, 2, samples)
    assert tuple(seen for seen, _ in results) == parts
    assert torch.equal(results[0][1], results[1][1])
