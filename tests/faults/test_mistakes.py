"""Mistakes that Lightning tells on one device are told in the same words on several."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from support.oracle import Classifier, loader, trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[[Any, torch.Tensor], Any]
"""What a step does with the module and its own right loss, and what it returns."""

MANUAL = {"automatic_optimization": False}


class Net(Classifier):
    """A module in whose hooks mistakes are made."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.lists: list[Any] = []


def in_step(step: Step, stage: str = "training", **attributes: Any) -> type[Net]:
    """A module one of whose steps is `step`."""

    def own(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, self.loss(batch))

    own.__name__ = f"{stage}_step"
    init = Net.__init__

    def __init__(self: Any) -> None:
        init(self)
        for name, value in attributes.items():
            setattr(self, name, value)

    return type("Mistaken", (Net,), {own.__name__: own, "__init__": __init__})


def in_hook(name: str, hook: Callable[..., Any]) -> type[Net]:
    return type("Mistaken", (Net,), {name: hook})


def loss_and(do: Callable[[Any, torch.Tensor], Any]) -> Step:
    """Does something wrong, and returns the loss."""

    def step(module: Any, loss: torch.Tensor) -> torch.Tensor:
        do(module, loss)
        return loss

    return step


def log(*args: Any, **kwargs: Any) -> Step:
    return loss_and(lambda module, loss: module.log(*args, **kwargs))


def log_twice(module: Any, loss: torch.Tensor) -> torch.Tensor:
    module.log("x", loss, on_step=True)
    module.log("x", loss, on_step=False, on_epoch=True)
    return loss


RETURNED: dict[str, Step] = {
    "a float": lambda module, loss: 0.5,
    "an int": lambda module, loss: 1,
    "a bool": lambda module, loss: True,
    "a str": lambda module, loss: "loss",
    "a list": lambda module, loss: [loss],
    "a tuple": lambda module, loss: (loss, loss),
    "a float's loss": lambda module, loss: loss.item(),
    "an empty dict": lambda module, loss: {},
    "a dict without loss": lambda module, loss: {"los": loss},
    "a dict whose loss is None": lambda module, loss: {"loss": None},
    "a dict whose loss is a float": lambda module, loss: {"loss": 0.5},
    "a dict whose loss is a str": lambda module, loss: {"loss": "x"},
    "a dict whose loss is a list": lambda module, loss: {"loss": [loss]},
    "a loss without a graph": lambda module, loss: loss.detach(),
    "a dict with a loss without a graph": lambda module, loss: {"loss": loss.detach()},
}

LOGGED: dict[str, Step] = {
    "a str": log("x", "value"),
    "a list": log("x", [1.0]),
    "None": log("x", None),
    "a dict": log("x", {"a": 1.0}),
    "an object": log("x", object()),
    "a vector": log("x", torch.ones(3)),
    "no name": log(5, 1.0),
    "an unknown reduce_fx": log("x", 1.0, reduce_fx="banana"),
    "a reduce_fx that is a number": log("x", 1.0, reduce_fx=3),
    "an unknown argument": log("x", 1.0, on_stp=True),
    "the name of a loader": log("x/dataloader_idx_0", 1.0),
    "other arguments": log_twice,
    "a metric of nobody": loss_and(lambda module, loss: module.log("x", torchmetrics.MeanMetric())),
    "a dict of strs": loss_and(lambda module, loss: module.log_dict({"x": "value"})),
    "no dict": loss_and(lambda module, loss: module.log_dict([("x", 1.0)])),
    "a dict of dicts": loss_and(lambda module, loss: module.log_dict({"x": {"y": 1.0}})),
}

MANUALLY: dict[str, Step] = {
    "a float": lambda module, loss: 0.5,
    "a list": lambda module, loss: [loss],
    "a str": lambda module, loss: "loss",
    "a dict whose loss is a float": lambda module, loss: {"loss": 0.5},
}

MODULES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    **{f"returns {name}": (in_step(step), {}) for name, step in RETURNED.items()},
    **{f"logs {name}": (in_step(step), {}) for name, step in LOGGED.items()},
    **{
        f"validation logs {name}": (in_step(step, "validation"), {})
        for name, step in LOGGED.items()
    },
    **{f"manual returns {n}": (in_step(step, **MANUAL), {}) for n, step in MANUALLY.items()},
    "manual logs a str": (in_step(log("x", "value"), **MANUAL), {}),
    "manual backward in automatic": (
        in_step(loss_and(lambda module, loss: module.manual_backward(loss))),
        {},
    ),
    "manual with clipping by the Trainer": (
        in_step(lambda m, loss: None, **MANUAL),
        {"gradient_clip_val": 1.0},
    ),
    "manual with accumulation by the Trainer": (
        in_step(lambda m, loss: None, **MANUAL),
        {"accumulate_grad_batches": 2},
    ),
    "manual clips with a wrong algorithm": (
        in_step(lambda m, loss: m.clip_gradients(m.optimizers(), 1.0, "banana"), **MANUAL),
        {},
    ),
    "logs in configure_optimizers": (
        in_hook("configure_optimizers", lambda self: self.log("x", 1.0)),
        {},
    ),
    "logs in setup": (in_hook("setup", lambda self, stage: self.log("x", 1.0)), {}),
    "logs in on_fit_start": (in_hook("on_fit_start", lambda self: self.log("x", 1.0)), {}),
    "logs in on_fit_end": (in_hook("on_fit_end", lambda self: self.log("x", 1.0)), {}),
    "logs per step at the end of an epoch": (
        in_hook("on_train_epoch_end", lambda self: self.log("x", 1.0, on_step=True)),
        {},
    ),
    "logs in a transfer hook": (
        in_hook("on_after_batch_transfer", lambda self, batch, i: (self.log("x", "y"), batch)[1]),
        {},
    ),
    "monitors nothing": (Net, {"callbacks": [EarlyStopping("nothing")]}),
    "no optimizer": (in_hook("configure_optimizers", lambda self: "banana"), {}),
    "a scheduler that monitors nothing": (
        in_hook(
            "configure_optimizers",
            lambda self: {
                "optimizer": (optimizer := torch.optim.SGD(self.parameters(), 0.1)),
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                    "monitor": "nothing",
                },
            },
        ),
        {},
    ),
    "validation raises": (in_step(lambda m, loss: m.nowhere, "validation"), {}),
}

EVALUATED: dict[str, tuple[str, Step]] = {
    **{f"test logs {name}": ("test", step) for name, step in LOGGED.items()},
    "predict logs": ("predict", log("x", 1.0)),
    "predict logs a metric": ("predict", loss_and(lambda m, loss: m.log("x", m.metric))),
    "predict logs a dict": ("predict", loss_and(lambda m, loss: m.log_dict({"x": 1.0}))),
    "test trains by hand": ("test", loss_and(lambda m, loss: m.manual_backward(loss))),
    "test asks for what is not there": ("test", lambda m, loss: m.nowhere),
    "predict asks for what is not there": ("predict", lambda m, loss: m.nowhere),
}

STRATEGIES: dict[str, Any] = {
    "threads": {"executor": "threads"},
    "inorder": {"executor": "inorder"},
    "forward": {"mode": "forward"},
}


SLOW = pytest.mark.slow
WAYS = ["threads", *(pytest.param(way, marks=SLOW) for way in ("inorder", "forward"))]


def mistake(do: Callable[[Any], Any], devices: int, strategy: Any, **options: Any) -> Any:
    """The type and the text of the error that somebody's use of a Trainer comes to."""
    torch.manual_seed(0)
    job = trainer(devices, strategy, max_epochs=1, limit_train_batches=2, **options)
    try:
        do(job)
    except Exception as error:
        return type(error), re.sub(r", device='\w+:0'", "", str(error))
    return None


@functools.cache
def on_one(name: str) -> Any:
    make, options = MODULES[name]
    return mistake(lambda job: job.fit(make(), loader(), loader()), 1, "auto", **options)


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[SLOW] * n.startswith("validation logs")) for n in MODULES]
)
def test_a_fit_ends_in_the_same_words(on: str, name: str, strategy: str) -> None:
    make, options = MODULES[name]
    own = DataParallelStrategy(**STRATEGIES[strategy])
    told = mistake(lambda job: job.fit(make(), loader(), loader()), 3, own, **options)
    assert told == on_one(name)


@functools.cache
def evaluated_on_one(name: str) -> Any:
    stage, step = EVALUATED[name]
    make = in_step(step, stage)
    return mistake(lambda job: getattr(job, stage)(make(), loader()), 1, "auto")


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[SLOW] * n.startswith("test logs")) for n in EVALUATED]
)
def test_an_evaluation_ends_in_the_same_words(on: str, name: str, strategy: str) -> None:
    stage, step = EVALUATED[name]
    own = DataParallelStrategy(**STRATEGIES[strategy])
    told = mistake(lambda job: getattr(job, stage)(in_step(step, stage)(), loader()), 3, own)
    assert told == evaluated_on_one(name) is not None


# Files

Use = Callable[[Any, Path], Any]
"""What somebody does with a Trainer and a folder of files."""


class Renamed(Net):
    """Its weights have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.net
        del self.net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


class Larger(Net):
    """Its weights are of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.Linear(11, 16)


def use(stage: str, file: str | None, make: Any = Net) -> Use:
    data: Any = [loader] * (2 if stage == "fit" else 1)

    def do(job: Any, folder: Path) -> Any:
        path = file if file in ("best", "last", "hpc", None) else folder / str(file)
        return getattr(job, stage)(make(), *[get() for get in data], ckpt_path=path)

    return do


STAGES = ("fit", "validate", "test", "predict")
FILES: dict[str, Use] = {
    **{f"{stage} from a missing file": use(stage, "missing.ckpt") for stage in STAGES},
    **{f"{stage} from a missing folder": use(stage, "no/missing.ckpt") for stage in STAGES},
    **{f"{stage} from the best": use(stage, "best") for stage in STAGES},
    **{f"{stage} from hpc": use(stage, "hpc") for stage in STAGES},
    **{f"{stage} renamed": use(stage, "whole.ckpt", Renamed) for stage in STAGES},
    **{f"{stage} larger": use(stage, "whole.ckpt", Larger) for stage in STAGES},
    "fit from weights only": use("fit", "weights.ckpt"),
    "fit from weights only, renamed": use("fit", "weights.ckpt", Renamed),
    "fit from a longer training": use("fit", "long whole.ckpt"),
    "fit from weights of a longer training": use("fit", "long weights.ckpt"),
    "fit with another optimizer": use(
        "fit",
        "whole.ckpt",
        in_hook(
            "configure_optimizers",
            lambda self: [torch.optim.SGD([p], 0.1) for p in self.parameters()],
        ),
    ),
    "load_from_checkpoint": lambda job, folder: Net.load_from_checkpoint(folder / "missing.ckpt"),
    "validate a module that was never there": lambda job, folder: job.validate(),
    "save before anything": lambda job, folder: job.save_checkpoint(folder / "x.ckpt"),
    "validate nothing": lambda job, folder: job.validate(Net()),
    "fit nothing": lambda job, folder: job.fit(Net()),
    "fit no module": lambda job, folder: job.fit(torch.nn.Linear(1, 1)),
    "test what has no test": lambda job, folder: job.test(LightningModule(), loader()),
    "train what has no step": lambda job, folder: job.fit(LightningModule(), loader()),
}


@pytest.fixture(autouse=True)
def loaders_have_their_methods() -> Iterator[None]:
    """Lightning replaces some while it asks for a loader, and leaves them so where that fails."""
    bases = [DataLoader, BatchSampler]
    classes: list[type] = [*bases, *(cls for base in bases for cls in base.__subclasses__())]
    names = ("__init__", "__setattr__", "__delattr__")
    before = {cls: {name: vars(cls).get(name) for name in names} for cls in classes}
    yield
    for cls, methods in before.items():
        for name, method in methods.items():
            if method is not None:
                setattr(cls, name, method)
            elif name in vars(cls):
                delattr(cls, name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of one device."""
    folder = tmp_path_factory.mktemp("files")
    for epochs, name in ((1, ""), (3, "long ")):
        job = trainer(1, "auto", max_epochs=epochs, limit_val_batches=0)
        job.fit(Net(), loader(), loader())
        job.save_checkpoint(folder / f"{name}whole.ckpt")
        job.save_checkpoint(folder / f"{name}weights.ckpt", weights_only=True)
    return folder


@pytest.mark.parametrize("mode", ["step", pytest.param("forward", marks=SLOW)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[SLOW] * n.startswith(STAGES[1:])) for n in FILES],
)
def test_a_file_is_refused_in_the_same_words(on: str, name: str, mode: Any, files: Path) -> None:
    one = mistake(lambda job: FILES[name](job, files), 1, "auto")
    told = mistake(lambda job: FILES[name](job, files), 3, DataParallelStrategy(mode=mode))
    assert told == one is not None


# Hooks

HOOKS = tuple(
    name
    for name, value in vars(Strategy).items()
    if callable(value) and (name.startswith(("on_", "setup", "teardown", "post_", "pre_")))
)


def recording(strategy: type[Any]) -> tuple[type[Any], list[str]]:
    """A strategy between whose own methods and Lightning's stands one that notes the calls."""
    seen: list[str] = []

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return getattr(super(base, self), name)(*args, **kwargs)

        return hook

    base = type("Noting", (Strategy,), {name: noting(name) for name in HOOKS})
    return type("Recording", (strategy, base), {}), seen


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_lightnings_own_hooks_are_called(on: str, stage: str, fails: bool) -> None:
    name = {"fit": "training", "validate": "validation"}.get(stage, stage)
    make = in_step(lambda m, loss: m.nowhere, name) if fails else Net
    seen = []
    for strategy, devices in ((SingleDeviceStrategy, 1), (DataParallelStrategy, 3)):
        own, calls = recording(strategy)
        job = trainer(devices, own("cpu") if devices == 1 else own(), max_epochs=1)
        with pytest.raises(AttributeError) if fails else nullcontext():
            getattr(job, stage)(make(), *[loader() for _ in range(1 + (stage == "fit"))])
        seen.append(calls)
    assert seen[0] == seen[1] and ("on_exception" in seen[0]) == fails
