"""Mistakes that Lightning tells on one device are told in the same words on several."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from support.oracle import Classifier, loader, trainer

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
    "a str": lambda module, loss: "loss",
    "a list": lambda module, loss: [loss],
    "a dict without loss": lambda module, loss: {"los": loss},
    "a dict whose loss is None": lambda module, loss: {"loss": None},
    "a dict whose loss is a float": lambda module, loss: {"loss": 0.5},
    "a loss without a graph": lambda module, loss: loss.detach(),
}

LOGGED: dict[str, Step] = {
    "a str": log("x", "value"),
    "None": log("x", None),
    "an object": log("x", object()),
    "a vector": log("x", torch.ones(3)),
    "an unknown reduce_fx": log("x", 1.0, reduce_fx="banana"),
    "an unknown argument": log("x", 1.0, on_stp=True),
    "other arguments": log_twice,
    "a metric of nobody": loss_and(lambda module, loss: module.log("x", torchmetrics.MeanMetric())),
    "no dict": loss_and(lambda module, loss: module.log_dict([("x", 1.0)])),
}

MODULES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    **{f"returns {name}": (in_step(step), {}) for name, step in RETURNED.items()},
    **{f"logs {name}": (in_step(step), {}) for name, step in LOGGED.items()},
    "manual logs a str": (in_step(log("x", "value"), **MANUAL), {}),
    "manual backward in automatic": (
        in_step(loss_and(lambda module, loss: module.manual_backward(loss))),
        {},
    ),
    "manual with clipping by the Trainer": (
        in_step(lambda m, loss: None, **MANUAL),
        {"gradient_clip_val": 1.0},
    ),
    "manual clips with a wrong algorithm": (
        in_step(lambda m, loss: m.clip_gradients(m.optimizers(), 1.0, "banana"), **MANUAL),
        {},
    ),
    "logs in configure_optimizers": (
        in_hook("configure_optimizers", lambda self: self.log("x", 1.0)),
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

MODULES |= {
    "test: logs a str": (in_step(LOGGED["a str"], "test"), {}),
    "predict: logs": (in_step(log("x", 1.0), "predict"), {}),
    "test: trains by hand": (
        in_step(loss_and(lambda m, loss: m.manual_backward(loss)), "test"),
        {},
    ),
    "predict: asks for what is not there": (in_step(lambda m, loss: m.nowhere, "predict"), {}),
}
"""Whose names begin with the entry point, if it is not `fit`."""


def mistake(name: str, devices: int, strategy: Any) -> Any:
    """The type and the text of the error that the use of a Trainer comes to."""
    make, options = MODULES[name]
    entry, _, rest = name.partition(": ")
    torch.manual_seed(0)
    job = trainer(devices, strategy, max_epochs=1, limit_train_batches=2, **options)
    data = [loader()] if rest else [loader(), loader()]
    try:
        getattr(job, entry if rest else "fit")(make(), *data)
    except Exception as error:
        return type(error), re.sub(r", device='\w+:0'", "", str(error))
    return None


@functools.cache
def on_one(name: str) -> Any:
    return mistake(name, 1, "auto")


@pytest.mark.parametrize("mode", ["step", pytest.param("forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODULES)
def test_it_ends_in_the_same_words(on: str, name: str, mode: Any) -> None:
    assert mistake(name, 3, DataParallelStrategy(mode=mode)) == on_one(name) is not None
