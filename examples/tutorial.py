"""What every device sees of a batch: sizes and devices, printed inside and outside of `forward`.

python examples/tutorial.py --devices 2
python examples/tutorial.py --devices 8 --split chunk     # the sizes of nn.DataParallel
python -m lightning_dp experiment=tutorial trainer.devices=3
"""

import argparse
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy


class TutorialModel(L.LightningModule):
    """A linear layer that prints what it sees.

    Args:
        input_size: features of a row.
        output_size: features of the output.
    """

    def __init__(self, input_size: int = 5, output_size: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(input_size, output_size)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.layer(rows)
        print(f"    in forward: input {tuple(rows.shape)} on {rows.device}")
        return output

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(rows).square().mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self(rows).square().mean())

    def predict_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return cast(Tensor, self(rows))

    def on_predict_batch_start(self, batch: Tensor, *_: Any) -> None:
        print(f"batch {tuple(batch.shape)}")

    def on_predict_batch_end(self, outputs: Any, *_: Any) -> None:
        sizes = getattr(self.trainer.strategy, "last_sizes", (len(outputs),))
        print(f"  outside: output {tuple(outputs.shape)} on {outputs.device}, of {sizes} samples")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RandomRows(L.LightningDataModule):
    """A random data set.

    Args:
        input_size: features of a row.
        rows: how many rows there are.
        batch_size: rows per batch, over all devices.
    """

    def __init__(self, input_size: int = 5, rows: int = 100, batch_size: int = 30) -> None:
        super().__init__()
        self.rows, self.batch_size = torch.randn(rows, input_size), batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(cast(Any, self.rows), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = train_dataloader


def main() -> None:
    parser = argparse.ArgumentParser(description="What every device sees of a batch")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--split", default="even", choices=("even", "chunk"))
    parser.add_argument("--output-device", help="where outputs end up; default: the first device")
    args = parser.parse_args()
    trainer = L.Trainer(
        # One device after another, so that the lines come in their order.
        strategy=DataParallelStrategy(
            split=args.split, output_device=args.output_device, executor="inorder"
        ),
        accelerator=args.accelerator,
        devices=args.devices,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.predict(TutorialModel(), RandomRows(), return_predictions=False)


if __name__ == "__main__":
    main()
