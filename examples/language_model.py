"""A character language model on Python's own source code: samples of very unequal length.

python examples/language_model.py --devices 4 --epochs 3
python examples/language_model.py --devices 4 --split even
python -m lightning_dp experiment=language_model trainer.devices=4

A sample is a function or class of the standard library, from a dozen characters to 2,000. With an
even split one device often has much more to read than the others, which wait for it. `split="cost"`
asks the module's `sample_cost` and gives all devices about as many characters; losses, logs and
predictions stay those of one device. The loss is a mean over characters, so the step says over how
many: `num_items`.
"""

import argparse
import ast
import math
import random
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dp import DataParallelMonitor, DataParallelStrategy

Batch = dict[str, Tensor]  # "text", padded, uint8 [B, L], and "lengths" [B]

CHARACTERS = 256  # the bytes of UTF-8
START = CHARACTERS  # stands before the first one


class Layer(nn.Module):
    """Adds to every character what it and the one `distance` before it in its sample say.

    A causal convolution (van den Oord et al., WaveNet, 2016) over samples that stand one after
    another, without padding: the work grows with the number of characters.
    """

    def __init__(self, width: int, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        now = self.norm(x)
        before = F.pad(now, (0, 0, self.distance, 0))[: len(now)]
        in_sample = (places >= self.distance).unsqueeze(1)
        mixed: Tensor = self.mix(torch.cat([now, before * in_sample], dim=1))
        return x + mixed


class CharacterLM(L.LightningModule):
    """Predicts each character from those before it; logs bits per character.

    Args:
        width: features of a character.
        layers: the n-th looks back 2 ** (n - 1) characters.
        lr: learning rate of AdamW.
    """

    def __init__(self, width: int = 64, layers: int = 7, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(CHARACTERS + 1, width)
        self.layers = nn.ModuleList(Layer(width, 2**n) for n in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        self.train_bits, self.val_bits, self.test_bits = (MeanMetric() for _ in range(3))

    def sample_cost(self, batch: Batch) -> Tensor:
        """The characters of each sample, for `split="cost"`."""
        return batch["lengths"]

    def forward(self, characters: Tensor, places: Tensor) -> Tensor:
        """Logits [N, 256] of N characters, of which the place in its own sample is given."""
        x = self.embed(characters.roll(1).masked_fill(places == 0, START))
        for layer in self.layers:
            x = layer(x, places)
        logits: Tensor = self.head(x)
        return logits

    def bits_of(self, batch: Batch) -> Tensor:
        """Bits of every character, [N], sample after sample."""
        text, lengths = batch["text"], batch["lengths"]
        places = torch.arange(text.size(1), device=text.device).expand_as(text)
        are_text = places < lengths.unsqueeze(1)
        characters, places = text[are_text].long(), places[are_text]
        nats = F.cross_entropy(self(characters, places), characters, reduction="none")
        return nats / math.log(2)

    def step(self, batch: Batch, name: str, metric: MeanMetric) -> dict[str, Any]:
        bits = self.bits_of(batch)
        metric.update(bits.mean(), len(bits))
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True)
        return {"loss": bits.mean(), "num_items": len(bits)}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return self.step(batch, "train/bits", self.train_bits)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(batch, "val/bits", self.val_bits)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(batch, "test/bits", self.test_bits)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The bits per character of each sample, [B]."""
        samples = torch.split(self.bits_of(batch), batch["lengths"].tolist())
        return torch.stack([bits.mean() for bits in samples])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class StdlibSource(L.LightningDataModule):
    """Functions and classes of the running Python's standard library, as bytes.

    A tenth of the files is for validation and a tenth for the test.

    Args:
        batch_size: samples per optimizer step, over all devices.
        max_length: what is longer is cut off.
        files: read so many files, at least 3, drawn at random; None for all.
    """

    def __init__(
        self, batch_size: int = 32, max_length: int = 2000, files: int | None = None
    ) -> None:
        super().__init__()
        self.batch_size, self.max_length, self.files = batch_size, max_length, files

    def setup(self, stage: str) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        random.Random(0).shuffle(paths)
        found = [texts for texts in map(definitions, paths[: self.files]) if texts]
        tenth = max(1, len(found) // 10)
        self.test, self.val, self.train = (
            [text.encode()[: self.max_length] for texts in part for text in texts]
            for part in (found[:tenth], found[tenth : 2 * tenth], found[2 * tenth :])
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def _loader(self, samples: Any, shuffle: bool = False) -> DataLoader[Batch]:
        return DataLoader(samples, self.batch_size, shuffle=shuffle, collate_fn=collate)


def definitions(path: Path) -> list[str]:
    """The source of a file's functions and classes, those within classes as part of these."""
    with tokenize.open(path) as file:  # decodes as Python does
        lines = file.readlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for node in ast.parse("".join(lines)).body if isinstance(node, kinds))
    return ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]


def collate(samples: list[bytes]) -> Batch:
    """A batch, padded with zeros."""
    texts = [torch.frombuffer(bytearray(sample), dtype=torch.uint8) for sample in samples]
    lengths = torch.tensor([len(text) for text in texts])
    return {"text": pad_sequence(texts, batch_first=True), "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model on Python's source")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--split", default="cost")
    parser.add_argument("--files", type=int, help="read only so many source files")
    args = parser.parse_args()
    L.seed_everything(42)
    monitor = DataParallelMonitor()
    trainer = L.Trainer(
        strategy=DataParallelStrategy(split=args.split),
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
    )
    model, data = CharacterLM(), StdlibSource(files=args.files)
    trainer.fit(model, data)
    print(f"train/bits {trainer.callback_metrics['train/bits']:.4f}")
    trainer.test(model, data)
    print(monitor)


if __name__ == "__main__":
    main()
