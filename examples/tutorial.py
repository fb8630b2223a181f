"""What every device sees of a batch: sizes and devices, printed inside and outside of `forward`.

python examples/tutorial.py --devices 2
python examples/tutorial.py --devices 8 --split chunk
python examples/tutorial.py --accelerator gpu --device-ids 2,0
python -m lightning_dp experiment=tutorial trainer.devices=3

Without `--accelerator gpu` the devices are replicas on the CPU, as many as you like.
"""

from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.app.options import check_at_least
from lightning_dp.app.quiet import quiet
from lightning_dp.app.scripts import ScriptParser, script_trainer, whole_numbers

Outputs = tuple[Tensor, dict[str, Any]]


class TutorialModel(L.LightningModule):
    """A linear layer that tells what it sees.

    Args:
        input_size: features of a row.
        output_size: features of the output.
        talk: print sizes and devices in every forward.
    """

    def __init__(self, input_size: int = 5, output_size: int = 2, talk: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(input_size, output_size)
        self.talk = talk

    def forward(self, rows: Tensor) -> Outputs:
        output = self.layer(rows)
        # Made where the output is: elsewhere the addition below would raise on GPUs.
        noise = torch.randn(output.shape, device=output.device)
        if self.talk:
            sizes = f"input size {tuple(rows.shape)}, output size {tuple(output.shape)}"
            print(f"    in forward: {sizes} on {output.device}")
        return output, {"image": {"output": output + noise, "noise": noise}, "scalar": 1.0}

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(rows)[0].square().mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self(rows)[0].square().mean())

    def predict_step(self, rows: Tensor, batch_idx: int) -> Outputs:
        return cast(Outputs, self(rows))

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
        check_at_least("input_size", input_size, 1)
        check_at_least("rows", rows, 1)
        check_at_least("batch_size", batch_size, 1)
        self.rows = torch.randn(rows, input_size)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader()

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self._loader()

    def _loader(self) -> DataLoader[Tensor]:
        return DataLoader(cast(Any, self.rows), batch_size=self.batch_size)


class Outside(Callback):
    """Prints what comes out of a step."""

    def on_predict_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Tensor, *_: Any
    ) -> None:
        print(f"batch of size {tuple(batch.shape)}")

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Outputs, *_: Any
    ) -> None:
        output, more = outputs
        noise = more["image"]["noise"]
        sizes = getattr(trainer.strategy, "last_sizes", ())
        print(f"  outside: output size {tuple(output.shape)} on {output.device}")
        print(f"  outside: noise size {tuple(noise.shape)}, scalar {more['scalar']}")
        print(f"  samples per device: {', '.join(map(str, sizes)) or len(output)}")


def main() -> None:
    parser = ScriptParser(__doc__.splitlines()[0], devices=2, epochs=1)
    parser.add_argument("--device-ids", type=whole_numbers, help="instead of a number: 2,0")
    parser.add_argument(
        "--split", default="even", choices=("even", "chunk"), help="chunk: as torch.chunk cuts"
    )
    parser.add_argument("--output-device", help="where outputs end up; None: the first device")
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    # One device after another, so that the lines come in their order.
    strategy = DataParallelStrategy(
        split=args.split, output_device=args.output_device, executor="inorder"
    )
    with quiet():
        trainer = script_trainer(
            Outside(),
            strategy=strategy,
            accelerator=args.accelerator,
            devices=args.device_ids or args.devices,
            max_epochs=args.epochs,
        )
        model, data = TutorialModel(), RandomRows()
        trainer.predict(model, data, return_predictions=False)
        model.talk = False
        trainer.fit(model, data)
        trainer.test(model, data)


if __name__ == "__main__":
    main()
