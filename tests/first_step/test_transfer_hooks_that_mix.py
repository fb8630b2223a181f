"""Hooks that each shard goes through on its device: samples that meet there are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from oracle import ByHand, Classifier, assert_same, loader, run, trainer
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on", "one_thread")

TOLD = "^on_after_batch_transfer: expected outputs that samples have by themselves, got "
INSTEAD = "on_before_batch_transfer has the batch."


def mixed(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.flip(0)


class Mixing(Classifier):
    """As Lightning's documentation has it: augmentation on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [mixed(batch[0]), batch[1]] if self.trainer.training else batch


class MixingBefore(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [mixed(batch[0]), batch[1]] if self.trainer.training else batch


class Centring(Classifier):
    """While it moves."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, *args: Any) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, *args)
        return [x - x.mean(0), y]


class Each(Classifier):
    """Of each sample by itself, and some of them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        x = F.normalize(x.clamp(-2, 2), dim=1)
        return [torch.where(x[:, :1] > 0, x.flip(1), x), y]


@pytest.mark.parametrize("bases", [(), (ByHand,)], ids=["automatic", "manual"])
def test_mixup_is_told_once_and_is_not_one_devices(bases: tuple[type, ...]) -> None:
    make: Any = type("Mixing", (*bases, Mixing), {})
    with pytest.warns(UserWarning, match=TOLD + "another order of samples") as records:
        several = run(make, 3)
    told = [str(r.message) for r in records if "on_after_batch_transfer:" in str(r.message)]
    assert len(told) == 1 and told[0].endswith(INSTEAD)
    one = run(make, 1)
    assert not torch.allclose(several.module.net[0].weight.cpu(), one.module.net[0].weight)


def test_what_it_advises_is_as_on_one_device() -> None:
    assert_same(run(MixingBefore, 3), run(Mixing, 1), atol=1e-5)


def test_statistics_of_what_moves_are_told_for_each_method() -> None:
    with pytest.warns(UserWarning, match="^transfer_batch_to_device: expected outputs") as records:
        run(Centring, 3)
    told = [str(r.message) for r in records if "transfer_batch_to_device:" in str(r.message)]
    assert all("sub of samples and of mean over all of them" in text for text in told)


def test_what_samples_have_by_themselves_is_as_on_one_device_and_is_not_told() -> None:
    assert_same(run(Each, 3), run(Each, 1), atol=1e-5)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [mixed(batch[0]), batch[1]]


def test_those_of_a_data_module_are_looked_at_too() -> None:
    with pytest.warns(UserWarning, match=TOLD + "another order of samples"):
        trainer(3).fit(Classifier(), Data())


def test_hooks_that_the_instance_has_are_looked_at_too() -> None:
    net = Classifier()
    net.on_after_batch_transfer = lambda batch, _: [mixed(batch[0]), batch[1]]  # type: ignore[method-assign]  # as people do
    with pytest.warns(UserWarning, match=TOLD + "another order of samples"):
        trainer(3).fit(net, loader(), loader())
