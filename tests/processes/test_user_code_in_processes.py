"""Ordinary user code in several processes: callbacks, hooks, loaders that nobody wrote for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from oracle import Classifier, assert_equal_trees, loader, samples
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`weights_only` was not set"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

Job = Callable[[int, Path], Any]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    """One that gives the same on one device and in several processes."""
    JOBS[function.__name__] = function
    return function


Net = Classifier


def trained(devices: int, module: Any = None, *data: Any, **options: Any) -> Any:
    """A Trainer after a fit, and all that it left on the module."""
    module = Net() if module is None else module
    strategy = options.pop("strategy", {})
    own = DataParallelStrategy(**strategy) if devices > 1 else "auto"
    trainer = oracle.trainer(devices, own, **options)
    trainer.fit(module, *(data or (loader(), loader())))
    return trainer


def left(trainer: Any, *more: Any) -> Any:
    module = trainer.lightning_module
    counts = trainer.global_step, trainer.current_epoch
    return dict(module.state_dict()), dict(trainer.callback_metrics), counts, *more


@job
def best_of_many(devices: int, folder: Path) -> Any:
    saving = ModelCheckpoint(
        folder, "{epoch}-{val/loss:.3f}", "val/loss", save_top_k=2, auto_insert_metric_name=False
    )
    trainer = trained(devices, callbacks=[saving], max_epochs=4, enable_checkpointing=True)
    names = [Path(path).name for path in saving.best_k_models]
    scores = [float(score) for score in saving.best_k_models.values()]
    tested = trainer.test(dataloaders=loader(), ckpt_path="best", verbose=False)
    return left(trainer, names, scores, saving.best_model_score, tested)


@job
def accumulation_by_schedule(devices: int, folder: Path) -> Any:
    callback = GradientAccumulationScheduler({0: 1, 1: 3})
    return left(trained(devices, callbacks=[callback], max_epochs=3))


class Backboned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(10, 10)
        self.backbone_lr = 0.01

    def forward(self, x: Tensor) -> Any:
        return self.net(self.backbone(x).tanh())

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@job
def backbone_unfrozen_later(devices: int, folder: Path) -> Any:
    return left(trained(devices, Backboned(), callbacks=[BackboneFinetuning(1)], max_epochs=3))


class OneCycle(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@job
def one_cycle(devices: int, folder: Path) -> Any:
    return left(trained(devices, OneCycle(), loader(shuffle=True), loader()))


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"},
        }


@job
def plateau(devices: int, folder: Path) -> Any:
    return left(trained(devices, Plateau(), max_epochs=5))


class Outputs(Net):
    """Hooks read what steps return and what has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "count": torch.tensor(float(len(batch[1])))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.log("hook", outputs["loss"] * 2, on_step=True)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["train/loss_epoch"] + 1)
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.broadcast(self.current_epoch) == self.current_epoch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


@job
def outputs_in_hooks(devices: int, folder: Path) -> Any:
    module = Outputs()
    trainer = trained(devices, module, logger=CSVLogger(folder))
    return left(trainer, module.losses)


@job
def csv_files(devices: int, folder: Path) -> Any:
    trainer = trained(devices, Outputs(), logger=CSVLogger(folder, "log", "one"))
    # The first process writes the file, maybe after another one has come here.
    trainer.strategy.barrier()
    file = folder / "log" / "one" / "metrics.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()] if file.exists() else []
    return [[float(x) if x and x[0] in "-0123456789" else x for x in row] for row in rows]


class Several(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = sum(self.loss(part) for part in batch.values())
        self.log("train/loss", loss, batch_size=len(batch["a"][1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", self.loss(batch))


@job
def loaders_by_name(devices: int, folder: Path) -> Any:
    both = {"a": loader(50, 10), "b": loader(30, 10, shuffle=True)}
    data = CombinedLoader(both, "max_size_cycle")
    return left(trained(devices, Several(), data, [loader(53), loader(31)]))


@job
def sequential_loaders(devices: int, folder: Path) -> Any:
    data = CombinedLoader([loader(53), loader(31)], "sequential")
    return left(trained(devices, Several(), {"a": loader(), "b": loader()}, data))


@job
def nothing_returned(devices: int, folder: Path) -> Any:
    trainer = trained(devices)
    found = trainer.predict(trainer.lightning_module, loader(), return_predictions=False)
    return left(trainer, found)


@job
def evaluated_alone(devices: int, folder: Path) -> Any:
    strategy = DataParallelStrategy() if devices > 1 else "auto"
    trainer, module = oracle.trainer(devices, strategy), Several()
    found = trainer.validate(module, [loader(), loader(31)], verbose=False)
    return found, trainer.test(module, loader(51), verbose=False)


class Kept(Net):
    def __init__(self, lr: float = 0.05, width: int = 3) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


@job
def hyperparameters(devices: int, folder: Path) -> Any:
    trainer = trained(devices, Kept(0.02, 5), logger=CSVLogger(folder, "log", "one"))
    path = folder / "own.ckpt"
    trainer.save_checkpoint(path)
    module = Kept.load_from_checkpoint(path)
    return left(trainer, dict(module.hparams), dict(module.state_dict()))


class StopsOfLosses(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if float(outputs["loss"]) < 0.9:
            trainer.should_stop = True


@job
def stopped_by_a_loss(devices: int, folder: Path) -> Any:
    return left(trained(devices, callbacks=[StopsOfLosses()], max_epochs=9))


class ScalesLosses(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure)
        else:
            closure()


@job
def own_backward_and_step(devices: int, folder: Path) -> Any:
    return left(trained(devices, ScalesLosses(), max_epochs=3))


class Weighted(LightningDataModule):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(53)], 40, generator=generator)
        return DataLoader(samples(53), batch_size=12, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> Any:
        return loader(31)

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        self.stage = stage


@job
def weighted_sampler_of_a_data_module(devices: int, folder: Path) -> Any:
    strategy = DataParallelStrategy() if devices > 1 else "auto"
    trainer = oracle.trainer(devices, strategy, max_epochs=3)
    trainer.fit(Net(), datamodule=Weighted())
    return left(trainer)


class Summing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", float(len(batch[1])), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("most", batch[0].max(), reduce_fx="max", on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("lr", self.optimizers().param_groups[0]["lr"], sync_dist=True)
        self.log("rank_zero", 3.0, rank_zero_only=True)


@job
def reductions(devices: int, folder: Path) -> Any:
    return left(trained(devices, Summing()))


class Mixed(Net):
    """Changes its batches in the hooks."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * 2, y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + 1, y


@job
def transfer_hooks(devices: int, folder: Path) -> Any:
    return left(trained(devices, Mixed()))


@job
def lambdas_and_timers(devices: int, folder: Path) -> Any:
    seen: list[int] = []
    note = LambdaCallback(
        on_train_batch_end=lambda trainer, *args: seen.append(trainer.global_step)
    )
    timer = Timer({"hours": 3})
    trainer = trained(devices, callbacks=[note, timer])
    return left(trainer, seen, timer.time_elapsed("train") > 0)


@job
def loaders_by_functions(devices: int, folder: Path) -> Any:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(53, 10 + self.trainer.current_epoch)

        def val_dataloader(self) -> Any:
            return loader(31)

    strategy = DataParallelStrategy() if devices > 1 else "auto"
    trainer = oracle.trainer(devices, strategy, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Net(), datamodule=Data())
    return left(trainer, trainer.num_training_batches)


@job
def validated_in_between(devices: int, folder: Path) -> Any:
    module = Several()
    options: Any = {"val_check_interval": 0.5, "limit_train_batches": 4, "max_epochs": 2}
    data = {"a": loader(48, 8), "b": loader(40, 8, shuffle=True)}
    trainer = trained(devices, module, data, [loader(31), loader(7)], **options)
    return left(trainer)


@job
def few_and_overfitted(devices: int, folder: Path) -> Any:
    return left(trained(devices, None, loader(53, 8), loader(), overfit_batches=0.5))


class Lazy(Net):
    """Its layers, its loaders and its callbacks are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    def configure_callbacks(self) -> Any:
        return [StopsOfLosses()]

    def train_dataloader(self) -> Any:
        return loader(53, 9, shuffle=True)

    def val_dataloader(self) -> Any:
        return [loader(31), loader(7)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", self.loss(batch))


@job
def all_in_the_module(devices: int, folder: Path) -> Any:
    strategy = DataParallelStrategy() if devices > 1 else "auto"
    trainer = oracle.trainer(devices, strategy, max_epochs=4)
    trainer.fit(Lazy())
    return left(trainer)


class Accumulating(Net):
    """Keeps what the steps of a validation saw, and computes from it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(self(batch[0]).softmax(1))

    def on_validation_epoch_end(self) -> None:
        rows = self.all_gather(torch.cat(self.rows))
        self.log("spread", rows.sort(0).values.std(0).sum())
        self.rows.clear()


@job
def gathered_at_the_end(devices: int, folder: Path) -> Any:
    return left(trained(devices, Accumulating()))


class Teacher(Net):
    """An average of its own weights, kept by a hook, looks at every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + (self(batch[0]) - self.teacher(batch[0])).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other, 0.1)


@job
def averaged_teacher(devices: int, folder: Path) -> Any:
    return left(trained(devices, Teacher()))


class Unused(Net):
    """A branch that is used in every other step, and layers that are frozen in between."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(10, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.other(batch[0]).square().mean() if batch_idx % 2 else loss

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch % 2 == 0)


@job
def branches_and_freezing(devices: int, folder: Path) -> Any:
    return left(trained(devices, Unused(), max_epochs=3))


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[0].parameters(), "lr": 0.1},
            {"params": self.net[2].parameters()},
        ]
        optimizer = torch.optim.Adam(groups, 0.01, fused=False)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@job
def own_clipping_and_schedule(devices: int, folder: Path) -> Any:
    return left(trained(devices, Clipping(), accumulate_grad_batches=2, max_epochs=3))


class Resumed(Net):
    """Keeps more in its checkpoints."""

    seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


@job
def gone_on(devices: int, folder: Path) -> Any:
    options: Any = {"enable_checkpointing": True, "default_root_dir": folder}
    first = trained(devices, Resumed(), max_epochs=1, **options)
    first.save_checkpoint(folder / "own.ckpt")
    strategy = DataParallelStrategy() if devices > 1 else "auto"
    saving = ModelCheckpoint(folder / "more", every_n_train_steps=2, save_top_k=-1, save_last=True)
    again = oracle.trainer(devices, strategy, max_epochs=3, callbacks=[saving], **options)
    again.fit(Resumed(), loader(), loader(), ckpt_path=folder / "own.ckpt")
    names = sorted(path.name for path in (folder / "more").iterdir())
    return left(again, again.lightning_module.seen, names)


@job
def found_learning_rate(devices: int, folder: Path) -> Any:
    finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None)
    trainer = trained(
        devices, callbacks=[finder], default_root_dir=folder, enable_checkpointing=True, max_steps=4
    )
    return left(trainer, trainer.lightning_module.lr)


class Noting(Callback):
    """What a callback can ask a Trainer about."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        self.seen.append((i, trainer.is_last_batch, trainer.num_training_batches, metrics))


@job
def callbacks_that_ask(devices: int, folder: Path) -> Any:
    noting = Noting()
    return left(trained(devices, callbacks=[noting]), noting.seen)


class ClippingEach(Net):
    """Clips the gradients after every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class Emptying(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.zero_grad()


class SeenByFirst(Callback):
    """Looks at gradients in the first process alone."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.global_rank == 0:
            vars(self)["on_after_backward"] = self.look

    def look(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.net[0].weight.grad.clone())


@job
def gradients_clipped_between_micro_batches(devices: int, folder: Path) -> Any:
    trainer = trained(devices, ClippingEach(), accumulate_grad_batches=2)
    return left(trainer, trainer.lightning_module.norms)


@job
def gradients_emptied_between_micro_batches(devices: int, folder: Path) -> Any:
    return left(trained(devices, Emptying(), accumulate_grad_batches=2))


@job
def gradients_seen_in_the_first_process(devices: int, folder: Path) -> Any:
    look = SeenByFirst()
    trainer = trained(devices, callbacks=[look], accumulate_grad_batches=2)
    return left(trainer, trainer.strategy.broadcast(look.seen))


def found_by(names: list[str], devices: int, folder: str) -> dict[str, Any]:
    """What each job gives, or the error that it comes to."""
    torch.set_default_dtype(torch.float64)
    answers: dict[str, Any] = {}
    for name in names:
        own = Path(folder, name)
        own.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        answers[name] = JOBS[name](devices, own)
    return answers


def check(names: list[str], processes: int, devices: int, folder: Path) -> None:
    one = found_by(names, 1, f"{folder}/one")
    several = run_in_processes(found_by, processes, names, processes * devices, f"{folder}/more")
    for rank, answers in enumerate(several):
        for name in names:
            assert_equal_trees(
                answers[name], one[name], f"{name}, process {rank}", atol=1e-10, rtol=0
            )


def names() -> list[str]:
    return list(JOBS)


def test_steps_are_counted_before_training(tmp_path: Path) -> None:
    check(["one_cycle"], 2, 2, tmp_path)


def test_gradients_between_micro_batches(tmp_path: Path) -> None:
    check([name for name in JOBS if name.startswith("gradients_")], 2, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_all_of_them(processes: int, devices: int, tmp_path: Path) -> None:
    check(names(), processes, devices, tmp_path)


# What one process does alone


class Skipping(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.global_rank == 1 and batch_idx == 1 else None


class SavingAlone(Net):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "x.ckpt"))


class LoggingAlone(Net):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("x", 1.0, sync_dist=True)


class GatheringAlone(Net):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.all_gather(torch.ones(2))


ALONE = [Skipping, LoggingAlone, GatheringAlone, SavingAlone]


def alone(make: Any, folder: str) -> str:
    """The error that it comes to; a Trainer has no others in this process afterwards."""
    own = DataParallelStrategy(timeout=20)
    trainer = oracle.trainer(2, own, default_root_dir=folder, limit_val_batches=0)
    try:
        trainer.fit(make(), loader(), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("make", ALONE)
def test_what_one_process_does_alone_is_told_as_such(make: Any, tmp_path: Path) -> None:
    told = run_in_processes(alone, 2, make, str(tmp_path))
    assert any("Expected all processes at the same collective" in text for text in told), told
    assert not any("draw the same samples" in text or "TypeError" in text for text in told), told
