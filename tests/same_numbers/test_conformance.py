"""Conformance: many kinds of models x options, each against one device in the same precision.

By default every family is tried without options on CPU replicas and on simulated devices, and the
i-th option on every sixth family from the i-th on, by turns on the two kinds of devices: so an
option meets two or three families, and a family four or five options. The rest of the product is
marked slow, each case on one of the kinds of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from support import oracle
from support.device_kinds import as_parameters
from support.families import FAMILIES, Family
from support.oracle import GPU_ROUNDING, assert_equal_trees, closeness, devices_of
from torch import Tensor

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = 6
KINDS = as_parameters()


# What an option changes in a module


class Steadily:
    """Gradient descent: an adaptive optimizer turns rounding of small gradients into full steps."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.trained(), self.lr, momentum=0.9)


class SteadilyInTurns(Steadily):
    """The same for an adversarial family."""

    def configure_optimizers(self: Any) -> Any:
        parts = (self.head, self.backbone)
        return [torch.optim.SGD(part.parameters(), self.lr, momentum=0.9) for part in parts]


class WithClosures:
    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.trained(), lr=0.1, max_iter=3)


def counted(loss: Tensor, num_items: int) -> Tensor:
    """A loss that tells what it is a mean over."""
    loss.num_items = num_items
    return loss


class TwoOptimizers:
    """Manual optimisation: one optimizer for the backbone and one for everything else, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.toggle_optimizer(optimizer)
            output = self.step("train", batch)
            optimizer.zero_grad()
            self.manual_backward(output if isinstance(output, Tensor) else counted(**output))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self: Any) -> Any:
        backbone = {id(p) for p in self.backbone.parameters()}
        parts = [[p for p in self.trained() if (id(p) in backbone) is own] for own in (True, False)]
        return [torch.optim.AdamW(part, self.lr) for part in parts if part]


class ScheduledBySteps:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.trained(), self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ScheduledByEpochs:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.trained(), self.lr)
        halves = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        watching = {"scheduler": plateau, "monitor": "val/loss", "interval": "epoch"}
        return [optimizer], [{"scheduler": halves, "interval": "epoch"}, watching]


class Finetuned:
    """The backbone is frozen until the second epoch."""

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]


class MadeLate:
    """All parameters come in `configure_model`."""

    def prepare(self) -> None:
        pass

    def configure_model(self: Any) -> None:
        if not hasattr(self, "head"):
            super().prepare()


# Options


@dataclass
class Option:
    """One way to train.

    Attributes:
        trainer: arguments of the Trainer, on both sides.
        strategy: arguments of the strategy on so many devices; one has no use for them.
        mixin: what it changes in the module.
        precision: "double" to be exact, or a precision of the Trainer.
        manual: whether it makes sense for modules with manual optimisation.
        devices: how many.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: Callable[[int], dict[str, Any]] = lambda _: {}
    mixin: type | None = None
    precision: str = "double"
    manual: bool = True
    devices: int = 3


def strategy(**options: Any) -> Option:
    return Option(strategy=lambda _: options)


def unevenly(n: int, devices: list[torch.device]) -> tuple[int, ...]:
    """The last but one gets most, and those before it nothing."""
    k = len(devices)
    return (*[0] * (k - 2), n - n // 3, n // 3) if k > 1 else (n,)


def repeated(k: int) -> list[str]:
    """Each device twice."""
    return [str(device) for device in devices_of(max(1, k // 2)) for _ in "ab"][:k]


OPTIONS: dict[str, Option] = {
    "plain": Option(),
    # Precision
    "16-mixed": Option(precision="16-mixed"),
    "bf16-mixed": Option(precision="bf16-mixed"),
    "16-true": Option(precision="16-true"),
    "bf16-true": Option(precision="bf16-true"),
    "32-true": Option(precision="32-true"),
    "64-true": Option(precision="64-true", devices=2),
    # Optimisation
    "accumulation": Option({"accumulate_grad_batches": 2}, manual=False),
    "clip-norm": Option({"gradient_clip_val": 0.1}, manual=False, devices=2),
    "clip-value": Option(
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, manual=False
    ),
    "lbfgs": Option(mixin=WithClosures, manual=False, devices=2),
    "two-optimizers": Option(
        strategy=lambda _: {"mode": "forward"}, mixin=TwoOptimizers, manual=False
    ),
    "schedule-step": Option(mixin=ScheduledBySteps, manual=False, devices=4),
    "schedule-epoch": Option(mixin=ScheduledByEpochs, manual=False),
    "finetuning": Option(mixin=Finetuned, manual=False),
    "configure-model": Option(mixin=MadeLate, devices=2),
    # Splits
    "split-chunk": strategy(split="chunk"),
    "split-memory": strategy(split="memory"),
    "split-adaptive": strategy(split="adaptive"),
    "split-auto": strategy(split="auto"),
    "split-cost": strategy(split="cost"),
    "split-own": strategy(split=unevenly),
    "weights": Option(strategy=lambda k: {"weights": [1, 3, 2, 1, 2, 5][:k]}),
    # Places and ways
    "forward": strategy(mode="forward"),
    "output-cpu": strategy(output_device="cpu"),
    "output-1": strategy(output_device=1),
    "buffers-mean": strategy(buffers="mean"),
    "threads": strategy(executor="threads"),
    "inorder": Option(strategy=lambda _: {"executor": "inorder"}, devices=4),
    "manual": Option(mixin=TwoOptimizers, manual=False),
    "repeated": Option(strategy=lambda k: {"devices": repeated(k)}, devices=4),
}


# Running


@dataclass(frozen=True)
class Rounding:
    """How far two runs may be from each other that add up the same samples in another order.

    Attributes:
        values: of everything, relative to 1 + its size.
        training: of all parameters together, relative to how far training has moved them. A loss
            with wrong weights, or gradients of a wrong scale, would be an error of order 1.
    """

    values: float
    training: float


DOUBLE = Rounding(1e-10, 1e-9)  # a gradient that is 0 but for rounding makes Adam step 1e-11 wide
SINGLE, HALF, BRAIN = (torch.finfo(d).eps for d in (torch.float32, torch.float16, torch.bfloat16))
ROUNDING = {
    "double": DOUBLE,
    "64-true": DOUBLE,
    # Six steps of momentum add up the rounding of six gradients, where a parameter of size 1 that
    # moves by 0.01 in all is itself rounded to eps in each.
    "32-true": Rounding(8 * SINGLE, 64 * SINGLE),
    "16-true": Rounding(8 * HALF, 8 * HALF),
    "bf16-true": Rounding(8 * BRAIN, 8 * BRAIN),
    # Parameters and sums of gradients are float32 here: of a step only products are rounded.
    "16-mixed": Rounding(8 * HALF, 2 * HALF),
    "bf16-mixed": Rounding(8 * BRAIN, 2 * BRAIN),
}


def kind_of(name: str, option: Option) -> type[Family]:
    """The family's class as the option changes it."""
    family = FAMILIES[name]
    mixins = [option.mixin] if option.mixin else []
    if ROUNDING[option.precision] is not DOUBLE:
        mixins.append(SteadilyInTurns if name == "adversarial" else Steadily)
    return type(family.__name__, (*mixins, family), {})


def trainer_of(devices: int, where: str, option: Option, **options: Any) -> Trainer:
    precision: dict[str, Any] = {"precision": option.precision}
    if option.precision == "16-mixed":  # by its name Lightning has it on GPUs only
        scaler = torch.amp.GradScaler(where, init_scale=1024.0)
        precision = {"plugins": [MixedPrecision("16-mixed", where, scaler)]}
    elif option.precision == "double":
        precision = {}
    options |= {"accelerator": where, "max_epochs": 2, **precision, **option.trainer}
    return oracle.trainer(devices, **options)


def record(job: Trainer, module: Family) -> dict[str, Any]:
    """Fits, saves, tests and predicts; all that is left behind."""
    start = {name: value.clone() for name, value in module.state_dict().items()}
    data = module.loader()
    job.fit(module, data, data)
    with TemporaryDirectory() as folder:
        job.save_checkpoint(path := Path(folder) / "saved.ckpt")
        saved = job.is_global_zero and torch.load(path, map_location="cpu", weights_only=True)
    checkpoint: Any = oracle.of_first(job, saved)
    checkpoint.pop("lightning_dp", None)  # what an adaptive split has learnt
    return {
        "start": start,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "checkpoint": checkpoint,
        "callback_metrics": dict(job.callback_metrics),
        "logged_metrics": dict(job.logged_metrics),
        "tested": job.test(module, data, verbose=False),
        "predictions": oracle.predicted(job, module, data),
    }


@cache
def one_device(name: str, key: str, where: str) -> dict[str, Any]:
    option = OPTIONS[key]
    with oracle.as_only_process():
        return record(trainer_of(1, where, option, strategy="auto"), kind_of(name, option)())


def expected(name: str, key: str) -> dict[str, Any]:
    """What one device leaves behind, to which the strategy's own options are nothing."""
    option = OPTIONS[key]
    same = (option.trainer, option.mixin, option.precision)
    first = next(k for k, o in OPTIONS.items() if (o.trainer, o.mixin, o.precision) == same)
    # What autocast casts depends on the device; in full precision the CPU speaks for all.
    return one_device(name, first, oracle.accelerator() if "mixed" in option.precision else "cpu")


def several_devices(name: str, key: str) -> dict[str, Any]:
    option = OPTIONS[key]
    module = kind_of(name, option)()
    mode = {"mode": module.mode} if module.mode == "forward" else {}
    devices = option.devices
    strategy = DataParallelStrategy(**{**option.strategy(devices), **mode})
    return record(trainer_of(devices, oracle.accelerator(), option, strategy=strategy), module)


def distance(a: dict[str, Tensor], b: dict[str, Tensor], names: list[str]) -> float:
    return sum((a[n].cpu().double() - b[n].cpu().double()).square().sum() for n in names) ** 0.5


def cases() -> list[Any]:
    """The whole product, on kinds of devices by turns; all but the cases named above are slow."""
    found = []
    for (i, option), (j, family) in product(enumerate(OPTIONS), enumerate(FAMILIES)):
        if OPTIONS[option].manual or family != "adversarial":
            quick = i == 0 or (j - i) % EVERY == 0
            turn = j if quick else j - i // EVERY
            for on in KINDS if i == 0 else [KINDS[turn % len(KINDS)]]:
                marks = [*on.marks, *([] if quick else [pytest.mark.slow])]
                found.append(pytest.param(family, option, *on.values, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # asked for by `flags`
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist within another")
@pytest.mark.parametrize(("family", "option", "on"), cases(), indirect=["on"])
def test_as_one_device(family: str, option: str, on: str) -> None:
    closest = dict(GPU_ROUNDING)
    if family == "reparametrised":  # see `weight_norms`; and L-BFGS divides by differences
        closest[torch.float64] = 1e-3 if option == "lbfgs" else 1e-6
    with mock.patch.dict(GPU_ROUNDING, closest):
        assert_as_one_device(family, option)


def assert_as_one_device(family: str, option: str) -> None:
    precision = OPTIONS[option].precision
    rounding = ROUNDING[precision]
    torch.set_default_dtype(torch.float64 if precision == "double" else torch.float32)
    with torch.backends.mkldnn.flags(
        enabled=family != "recurrent"
    ):  # it has no LSTM under autocast
        one, several = expected(family, option), several_devices(family, option)
    values = {"atol": rounding.values, "rtol": rounding.values}
    assert_equal_trees(several, one, "run", **values)
    start, after = one["start"], one["checkpoint"]["state_dict"]
    names = [name for name, value in start.items() if value.is_floating_point()]
    moved = distance(after, start, names)
    closest = closeness(torch.get_default_dtype(), rtol=rounding.training)["rtol"]
    assert distance(several["checkpoint"]["state_dict"], after, names) <= closest * moved
