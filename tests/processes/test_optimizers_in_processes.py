"""Optimizers take the same steps in every process, or it is told who differs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from oracle import Classifier, loader, trainer
from several_processes import ProcessesError, run_in_processes

from lightning_dp import DataParallelStrategy


class Changes(Callback):
    """Changes an option of the optimizer once a step is done, in some processes."""

    def __init__(self, key: str, value: Any, ranks: tuple[int, ...], *, back: bool) -> None:
        self.key, self.value, self.ranks, self.back = key, value, ranks, back

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        [group] = trainer.optimizers[0].param_groups
        if trainer.global_rank in self.ranks and trainer.global_step == 2:
            self.before, group[self.key] = group[self.key], self.value
        if trainer.global_rank in self.ranks and trainer.global_step == 3 and self.back:
            group[self.key] = self.before


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(
    key: str, value: Any, ranks: tuple[int, ...], *, back: bool = False, mode: Any = "step"
) -> float:
    torch.manual_seed(0)
    own = DataParallelStrategy(mode=mode)
    job = trainer(4, own, max_epochs=2, callbacks=[Changes(key, value, ranks, back=back)])
    module = Scheduled()
    job.fit(module, loader(53))
    return float(sum(p.detach().double().sum() for p in module.parameters()))


def told(*args: Any, **options: Any) -> str:
    with pytest.raises(ProcessesError) as caught:
        run_in_processes(partial(trained, **options), 2, *args)
    return str(caught.value)


def test_a_rate_that_one_process_changes_is_told() -> None:
    text = told("lr", 0.5, (0,))
    assert "optimizer 0, group 0, lr: expected the same in all processes, got 0.5 in proc" in text
    assert text.count("Change it in every process") >= 2


def test_what_all_processes_change_is_theirs() -> None:
    one, other = run_in_processes(trained, 2, "lr", 0.5, (0, 1))
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    "key, value",
    [("lr", 0.5), ("lr", torch.tensor(0.5)), ("betas", (0.5, 0.9)), ("weight_decay", 0.5)],
)
def test_every_option_in_every_mode(key: str, value: Any, back: bool, mode: str) -> None:
    text = told(key, value, (1,), back=back, mode=mode)
    where = "in an earlier batch" if back else f"optimizer 0, group 0, {key}"
    assert where in text


class Plateau(Classifier):
    """Advances a schedule by the loss of a batch, which is that of all processes."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        options: Any = {"factor": 0.5, "patience": 0, "threshold": 0.02}
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.schedule.step(loss.detach())
        return loss


def advanced(devices: int) -> list[float]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module = Plateau()
    own = (devices, DataParallelStrategy()) if devices > 1 else (devices,)
    job = trainer(*own, max_epochs=3)
    job.fit(module, loader(53), loader(53))
    torch.set_default_dtype(torch.float32)
    best: Any = module.schedule.best
    weights = float(sum(p.detach().sum() for p in module.parameters()))
    return [*module.schedule.get_last_lr(), float(best), module.schedule.last_epoch, weights]


def test_a_schedule_that_steps_advance_goes_by_the_loss_of_all_processes() -> None:
    expected = advanced(1)
    for own in run_in_processes(advanced, 2, 4):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)
