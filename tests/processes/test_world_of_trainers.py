"""Trainers of several processes, one after another, from their first word to their last."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer, seed_everything
from oracle import QUIET, Classifier
from several_processes import run_in_processes
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.split import between_processes

SAMPLES, BATCH = 53, 25


def data(*, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=shuffle)


class Sizes(Callback):
    """How many samples each device had, in every training step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(getattr(trainer.strategy, "last_sizes", ()))


def trained(
    devices: int, options: dict[str, Any] | None, again: bool = False
) -> tuple[dict[str, Tensor], Any]:
    """The parameters after a fit, and how many samples this process's devices had."""
    seed_everything(1, verbose=False)
    module, sizes = Classifier().double(), Sizes()
    strategy: Any = "auto" if options is None else DataParallelStrategy(**options)
    job = {"accelerator": "cpu", "max_epochs": 1, "callbacks": [sizes], **QUIET}
    trainer = Trainer(devices=devices, strategy=strategy, **job)
    trainer.fit(module, data(shuffle=True), data())
    if again:
        trainer.test(module, data(), verbose=False)
        trainer.predict(module, data())
        trainer = copy.deepcopy(trainer)
        assert trainer.strategy._world is None  # until it is set up
        Trainer(devices=devices, strategy=DataParallelStrategy(), **job).fit(module, data(), data())
    return {name: p.detach().clone() for name, p in module.named_parameters()}, sizes.seen


def one_after_another() -> Any:
    """A fit, a test, a prediction and another Trainer's fit in one process group."""
    answer = trained(3, {}, again=True)
    assert dist.is_initialized() and dist.get_world_size() == 2
    group = dist.group.WORLD
    weighted = trained(6, {"weights": [1, 1, 1, 2, 2, 2], "timeout": 60})
    chunked = trained(8, {"split": "chunk"})
    own = trained(4, {"split": _all_but_one})
    assert dist.group.WORLD is group
    assert rank_zero_only.rank == dist.get_rank()
    return [answer, weighted, chunked, own]


def _all_but_one(n: int, devices: Any) -> tuple[int, ...]:
    return (n - 1, 1) if n else (0, 0)


def on_one_device() -> Any:
    once = trained(1, None)[0]
    seed_everything(1, verbose=False)
    module = Classifier().double()
    job = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET}
    trainer = Trainer(**job)
    trainer.fit(module, data(shuffle=True), data())
    Trainer(**job).fit(module, data(), data())
    return once, {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.slow
def test_trainers_one_after_another_and_shares_of_every_kind() -> None:
    once, twice = on_one_device()
    for rank, (again, *others) in enumerate(run_in_processes(one_after_another, 2)):
        torch.testing.assert_close(again[0], twice, rtol=0, atol=1e-10)
        for parameters, _ in others:
            torch.testing.assert_close(parameters, once, rtol=0, atol=1e-10)
        sizes = [[sum(step) for step in seen] for _, seen in (again, *others)]
        # 25, 25 and 3 samples on 3, 6, 8 and 4 devices; an idle process works on one of others.
        expected = [
            between_processes(n, counts, weights, rule)
            for counts, weights, rule in (
                ([2, 1], None, "even"),
                ([3, 3], [1, 1, 1, 2, 2, 2], "even"),
                ([4, 4], None, "chunk"),
                ([2, 2], None, "even"),
            )
            for n in (25, 25, 3)
        ]
        assert [n for seen in sizes for n in seen[:3]] == [
            own[rank] or min(2, sum(own)) for own in expected
        ]
        assert others[2][1][0] == [(12, 1), (11, 1)][rank]


def in_the_users_group() -> Any:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    answer = trained(2, {})[0]
    assert dist.group.WORLD is group
    return answer


@pytest.mark.slow
def test_a_process_group_that_is_there_is_used() -> None:
    expected = trained(1, None)[0]
    for own in run_in_processes(in_the_users_group, 2):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
import lightning_dp

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(10, 3)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = DataLoader(TensorDataset(torch.randn(10, 10)), batch_size=4)
trainer = Trainer(accelerator="cpu", devices=2, strategy="dp_custom", max_epochs=1,
                  log_every_n_steps=1)
trainer.fit(Module(), loader)
print(f"I am {trainer.global_rank} of {trainer.world_size}")
"""


@pytest.mark.slow
def test_a_script_under_torchrun_says_everything_once_and_ends_in_silence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    for once in ("GPU available", "Trainable params", "`max_epochs=1` reached", "I am 0 of 2"):
        assert said.count(once) == 1, said
    assert said.count("I am 1 of 2") == 1
    after = said[said.index("I am ") :].lower()
    assert "warning" not in after and "destroy" not in after and "error" not in after
    assert len(list(tmp_path.rglob("metrics.csv"))) == len(list(tmp_path.rglob("*.ckpt"))) == 1


ALONE = """
import sys
import torch
from lightning.pytorch import Trainer
from oracle import QUIET, Classifier, loader
import lightning_dp

Trainer(accelerator="cpu", devices=2, strategy="dp_custom", max_epochs=1, **QUIET).fit(
    Classifier(), loader(), loader()
)
print(sorted(name for name in sys.modules if name.startswith("lightning_dp.parallel.processes")))
print(torch.distributed.is_initialized())
"""


@pytest.mark.slow
def test_one_process_imports_and_makes_nothing_of_this() -> None:
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=environ, check=False
    )
    assert ran.stdout.splitlines()[-2:] == ["[]", "False"], ran.stdout + ran.stderr
