"""A checkpoint goes on with other numbers of processes and devices, and with other strategies."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from several_processes import run_in_processes
from test_restarts import Case, Net, fitted, loader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

WHOLE = Case()


def close(own: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


def saved(folder: Path) -> dict[str, Tensor]:
    """What one device gives, after two processes of two devices have kept their checkpoints."""
    whole = fitted(folder / "one", WHOLE)
    for own in run_in_processes(fitted, 2, folder, Case(4)):
        close(own, whole)
    return whole


def test_one_process_goes_on(tmp_path: Path) -> None:
    """With one device and four, in the middle of an epoch and at its end; plainly at its end."""
    whole = saved(tmp_path)
    for step in (2, 6, 0):
        for devices in (1, 4):
            close(fitted(tmp_path, Case(devices, step=step, resume=True)), whole)
    path = tmp_path / "step=12.ckpt"
    module = Net.load_from_checkpoint(path, case=WHOLE)
    close(dict(module.state_dict()), whole)
    # Plain Lightning draws an order of its own, so that it is only shown to go on.
    own = fitted(tmp_path, Case(0, step=0, resume=True))
    assert all(bool(p.isfinite().all()) for p in own.values())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(4, 4), (2, 4), (2, 2), (3, 6)])
def test_several_processes_go_on(count: int, devices: int, tmp_path: Path) -> None:
    whole = saved(tmp_path)
    for step in (2, 0):
        for own in run_in_processes(fitted, count, tmp_path, Case(devices, step=step, resume=True)):
            close(own, whole)


def under_ddp(folder: Path, path: Path | None, epochs: int) -> dict[str, Tensor]:
    """Two processes of one device each, with half the batch each, of the same samples."""
    module = Net(WHOLE)
    data = loader("ordered").dataset
    own = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    batches = DataLoader(data, 4, sampler=own)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches, ckpt_path=path)
    trainer.save_checkpoint(folder / f"ddp-{epochs}.ckpt")
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.slow
def test_ddp_goes_on_at_an_epochs_end_and_back(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "one", Case(loader="ordered", epochs=3))
    run_in_processes(fitted, 2, tmp_path, Case(4, "ordered", epochs=1))
    run_in_processes(under_ddp, 2, tmp_path, tmp_path / "end-epoch=0.ckpt", 2)
    (tmp_path / "ddp-2.ckpt").rename(tmp_path / "step=99.ckpt")
    last = Case(4, "ordered", step=99, resume=True, epochs=3)
    for own in run_in_processes(fitted, 2, tmp_path, last):
        close(own, whole)
