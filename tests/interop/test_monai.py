"""MONAI: batches of MetaTensors with a record of what was done to them, and metrics of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from comparison import Job, as_one_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

pytest.importorskip("monai")

from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureTyped, ScaleIntensityd

pytestmark = pytest.mark.interop

VOLUMES, SIDE = 23, 16


class Segmentation(LightningModule):
    """As in MONAI's tutorials for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            channels=(4, 8),
            strides=(2,),
            num_res_units=1,
            norm="instance",
        )
        self.criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        self.dice = DiceMetric(include_background=False, reduction="mean")
        self.of_prediction = AsDiscrete(argmax=True, to_onehot=2)
        self.of_label = AsDiscrete(to_onehot=2)

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.criterion(self(batch["image"]), batch["label"])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        found = sliding_window_inference(batch["image"], (SIDE, SIDE), 2, self.forward)
        self.log("val/loss", self.criterion(found, batch["label"]), batch_size=len(found))
        return {"found": found, "label": batch["label"]}

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        """The metric is no metric of torchmetrics: here it sees the whole batch, on one device."""
        predictions = [self.of_prediction(one) for one in decollate_batch(outputs["found"])]
        labels = [self.of_label(one) for one in decollate_batch(outputs["label"])]
        self.dice(y_pred=predictions, y=labels)

    def on_validation_epoch_end(self) -> None:
        self.log("val/dice", self.dice.aggregate().item())
        self.dice.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        names = [image.meta["filename_or_obj"] for image in decollate_batch(batch["image"])]
        return {"found": self(batch["image"]), "of": names}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@cache
def volumes() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(VOLUMES):
        image = torch.rand(1, SIDE, SIDE, generator=generator, dtype=torch.float64)
        meta = {"filename_or_obj": f"volume {i}"}
        label = (image > 0.5).long()
        rows.append({"image": MetaTensor(image, meta=meta), "label": MetaTensor(label, meta=meta)})
    return rows


def loader() -> Any:
    steps = Compose([ScaleIntensityd("image", dtype=None), EnsureTyped(["image", "label"])])
    return DataLoader(Dataset(volumes(), steps), batch_size=5)  # the last batch has 3


def predict(module: LightningModule, trainer: dict[str, Any]) -> list[Any]:
    """Also what each sample's record says, which has to follow the sample to a replica and back."""
    found = Trainer(**trainer).predict(module, loader())
    return [(one, one["found"].meta["filename_or_obj"]) for one in found]


UNET = Job("MONAI", "UNet", Segmentation, loader, predict=predict, trainer={"precision": "64-true"})


test_as_one_device = as_one_device((UNET, {}), (UNET, {"mode": "forward"}))
