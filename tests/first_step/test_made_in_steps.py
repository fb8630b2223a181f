"""Parameters and buffers that a step makes are told: each replica makes its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import Classifier, loader, trainer
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on", "one_thread")

WORDS = r"A step makes {}: every replica makes its own.*Make them in __init__"


class Head(Classifier):
    """The first step makes a layer."""

    validation_step = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "head"):
            self.head = nn.Linear(3, 3).to(batch[0].device)
            self.optimizers().add_param_group({"params": list(self.head.parameters())})
        return F.cross_entropy(self.head(self(batch[0])), batch[1])


class Anew(Head):
    """The second step binds a parameter anew."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.5)
        return self.loss(batch)


class Centred(Head):
    """A buffer has the mean of the first shard."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "mean" not in dict(self.named_buffers()):
            self.register_buffer("mean", batch[0].mean(0))
        return F.cross_entropy(self(batch[0] - self.mean), batch[1])


CASES = {
    Head: r"Head\.head\.weight, Head\.head\.bias",
    Anew: r"Anew\.net\.0\.weight",
    Centred: r"Centred\.mean",
}


@pytest.mark.filterwarnings("ignore:.*got sub of samples and of mean over all of them")
@pytest.mark.parametrize("made", CASES, ids=lambda made: made.__name__)
def test_what_a_step_makes_is_told(made: type[Classifier]) -> None:
    with pytest.warns(UserWarning, match=WORDS.format(CASES[made])) as told:
        trainer(2, max_epochs=1).fit(made(), loader())
    assert sum("A step makes" in str(each.message) for each in told) == 1


class OnDemand(Head):
    """A buffer that is the same on every replica, and a layer without parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "drop"):
            self.drop = nn.Identity()
            self.register_buffer("steps", torch.arange(10.0, device=batch[0].device))
        return F.cross_entropy(self.drop(self(batch[0] + self.steps)), batch[1])


class InHooks(OnDemand):
    """What a hook makes is the root's, and the replicas follow."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(3, 3).to(self.device)


@pytest.mark.parametrize("made", [OnDemand, InHooks])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_one_devices_is_not(made: type[Classifier], devices: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A step makes")
        trainer(devices, max_epochs=1).fit(made(), loader())
