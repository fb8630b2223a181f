"""Several devices train as one does."""

import lightning as L
import torch

import lightning_dp  # noqa: F401  # makes "dp_custom" known
from lightning_dp.app.template.data import Data
from lightning_dp.app.template.model import Model


def trained(devices: int) -> Model:
    """A model after some steps on so many replicas on the CPU."""
    L.seed_everything(0, verbose=False)
    model, data = Model(), Data(batch_size=50)
    trainer = L.Trainer(
        strategy="dp_custom",
        accelerator="cpu",
        devices=devices,
        max_steps=4,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return model


def test_two_devices_train_as_one_does() -> None:
    """The weights are the same but for rounding."""
    for two, one in zip(trained(2).parameters(), trained(1).parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
