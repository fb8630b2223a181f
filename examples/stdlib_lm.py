"""A character language model on Python's own source code: samples of very unequal length.

python examples/stdlib_lm.py --devices 4 --epochs 3
python examples/stdlib_lm.py --compare
python -m lightning_dp experiment=stdlib_lm trainer.devices=4

A sample is a function or class of the standard library, from a dozen characters to 2,000. Cut into
as many samples for each device, one of them often has much more to read, and the others wait. With
`split="cost"` each sample goes where there is least to do; loss, logs and predictions stay those of
one device. `--compare` shows what that gains.

A cost is what the model makes of a sample. This one leaves out the padding, so it is the length. A
model that computes padding takes the time of the longest sample for all samples of a device:
there a split gains little, and batches of similar lengths more.
"""

import ast
import logging
import math
import random
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dp import DataParallelStrategy
from lightning_dp.app.options import check_at_least
from lightning_dp.app.quiet import quiet
from lightning_dp.app.scripts import (
    ScriptParser,
    loss_rows,
    print_rows,
    short_fits,
    train_and_test,
)
from lightning_dp.parallel.split import by_cost, chunk, even

Batch: TypeAlias = dict[str, Tensor]
"""`text`, padded to the longest sample, uint8 of shape [B, L], and `lengths`, of shape [B]."""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

CHARACTERS = 256  # the bytes of UTF-8
START = CHARACTERS  # what stands before the first one
SPLITS = ("chunk", "even", "cost")
COMPARED_STEPS = 12

ADAMW = partial(AdamW, lr=3e-3)


class Layer(nn.Module):
    """Adds to every character what it and the one `distance` before it, if there is one, say.

    A causal convolution (van den Oord et al., WaveNet, 2016) over samples that stand one after
    another, without padding: the work is that of the characters that there are.
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
    """Predicts each character from those before it, as many as 2 to the power of `layers`.

    What it logs and returns is in bits per character: what a file compressed with it would take.

    Args:
        width: features of a character.
        layers: layers; the n-th looks back 2 ** (n - 1) characters.
        optimizer: makes the optimizer from the parameters; by default AdamW.
    """

    def __init__(
        self, width: int = 64, layers: int = 7, optimizer: OptimizerFactory = ADAMW
    ) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        check_at_least("layers", layers, 1)
        self.save_hyperparameters("width", "layers")
        self.make_optimizer = optimizer
        self.embed = nn.Embedding(CHARACTERS + 1, width)
        self.layers = nn.ModuleList(Layer(width, 2**n) for n in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        self.train_bits, self.val_bits, self.test_bits = (MeanMetric() for _ in range(3))

    def sample_cost(self, batch: Batch) -> Tensor:
        """What `split="cost"` asks: the characters of each sample, as padding costs nothing."""
        return batch["lengths"]

    def forward(self, characters: Tensor, places: Tensor) -> Tensor:
        """Logits [N, 256] of N characters, of which the place in its own sample is given."""
        x = self.embed(characters.roll(1).masked_fill(places == 0, START))
        for layer in self.layers:
            x = layer(x, places)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        bits = self._bits(batch)
        self.train_bits.update(bits.mean(), len(bits))
        self.log("train/bits", self.train_bits, on_step=False, on_epoch=True)
        # A mean over characters, of which each device has another number.
        return {"loss": bits.mean(), "num_items": len(bits)}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        bits = self._bits(batch)
        self.val_bits.update(bits.mean(), len(bits))
        self.log("val/bits", self.val_bits)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        bits = self._bits(batch)
        self.test_bits.update(bits.mean(), len(bits))
        self.log("test/bits", self.test_bits)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The bits per character of each sample, [B]: which are the usual ones?"""
        samples = torch.split(self._bits(batch), batch["lengths"].tolist())
        return torch.stack([bits.mean() for bits in samples])

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = self.make_optimizer(self.parameters())
        return optimizer

    @torch.no_grad()
    def write(self, text: str, length: int = 200, seed: int = 0) -> str:
        """Goes on with a text, drawing each next character from what is likely."""
        generator = torch.Generator().manual_seed(seed)
        written = list(text.encode())
        for _ in range(length):
            # Of the place that is to be filled only the place counts.
            characters = torch.tensor([*written, 0], device=self.device)
            logits = self(characters, torch.arange(len(characters), device=self.device))[-1]
            likely = (logits.cpu() / 0.6).softmax(dim=0)
            written.append(int(torch.multinomial(likely, 1, generator=generator)))
        return bytes(written).decode(errors="replace")

    def _bits(self, batch: Batch) -> Tensor:
        """Bits of every character, [N], sample after sample."""
        text, lengths = batch["text"], batch["lengths"]
        places = torch.arange(text.size(1), device=text.device).expand_as(text)
        are_text = places < lengths.unsqueeze(1)
        characters, places = text[are_text].long(), places[are_text]
        nats = F.cross_entropy(self(characters, places), characters, reduction="none")
        return nats / math.log(2)


class StdlibSource(L.LightningDataModule):
    """Functions and classes of the running Python's standard library, as bytes.

    Of its files a tenth is for validation and a tenth for testing, so none of these is known from
    training.

    Args:
        batch_size: samples per optimizer step, over all devices.
        max_length: what is longer is cut off.
        files: take only so many files, drawn at random; None for all.
        seed: of which files are for what, and of the order in training.
    """

    def __init__(
        self,
        batch_size: int = 32,
        max_length: int = 2000,
        files: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("max_length", max_length, 1)
        check_at_least("files", 3 if files is None else files, 3)
        self.batch_size = batch_size
        self.max_length = max_length
        self.files = files
        self.seed = seed

    def setup(self, stage: str) -> None:
        if hasattr(self, "train"):
            return
        paths = source_files()
        random.Random(self.seed).shuffle(paths)
        found = list(islice(filter(None, map(definitions, paths)), self.files))
        tenth = max(1, len(found) // 10)
        self.test, self.val, self.train = (
            [text.encode()[: self.max_length] for texts in part for text in texts]
            for part in (found[:tenth], found[tenth : 2 * tenth], found[2 * tenth :])
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(
            self.train, shuffle=True, generator=torch.Generator().manual_seed(self.seed)
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test)

    def unigram_bits(self) -> float:
        """Bits per character of the test, for who knows only how frequent each one is."""
        known, asked = (Counter(b"".join(samples)) for samples in (self.train, self.test))
        total = known.total() + CHARACTERS  # each one once more, as some are not in the training
        bits = sum(n * -math.log2((known[byte] + 1) / total) for byte, n in asked.items())
        return bits / asked.total()

    def _loader(self, samples: list[bytes], **options: Any) -> DataLoader[Batch]:
        dataset: Any = samples
        return DataLoader(dataset, batch_size=self.batch_size, collate_fn=collate, **options)


def source_files() -> list[Path]:
    """The modules of the standard library that are not in packages."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise ValueError(
            f"Expected the source files of the standard library in {folder}, got none. Use a "
            "Python that has them unpacked."
        )
    return files


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


def loads(lengths: Sequence[int], k: int, split: str) -> list[int]:
    """The characters that each of k devices gets of a batch."""
    if split == "cost":
        shares = by_cost(lengths, k)
        return [] if shares is None else [round(load) for load in shares.loads]
    sizes = (chunk if split == "chunk" else even)(len(lengths), k)
    ends = list(accumulate(sizes))
    return [sum(lengths[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


class Loads:
    """Adds up the characters that the fullest device has, by each split of the same batches."""

    def __init__(self) -> None:
        self.devices = 1
        self.characters = 0
        self.fullest: Counter[str] = Counter()

    def add(self, batch: Batch, devices: int) -> None:
        lengths, self.devices = batch["lengths"].tolist(), devices
        self.characters += sum(lengths)
        for split in SPLITS:
            self.fullest[split] += max(loads(lengths, devices, split))

    def imbalance(self, split: str) -> float:
        """How much more the fullest device has than the mean, as their ratio."""
        return self.fullest[split] * self.devices / max(1, self.characters)


class Progress(Callback):
    """Prints each epoch's bits per character, and in the end what has been learnt and gained."""

    def __init__(self) -> None:
        self.loads = Loads()

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self.loads.add(batch, trainer.num_devices)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        bits = [trainer.callback_metrics.get(f"{of}/bits", math.nan) for of in ("train", "val")]
        epoch = trainer.current_epoch + 1
        print("epoch {:3}   train/bits {:.3f}   val/bits {:.3f}".format(epoch, *bits), flush=True)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(f"characters on the fullest of {trainer.num_devices} devices, relative to the mean:")
        print_rows([[split, f"{self.loads.imbalance(split):.3f}"] for split in SPLITS])

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        data, bits = getattr(trainer, "datamodule", None), trainer.callback_metrics["test/bits"]
        if isinstance(data, StdlibSource):
            frequent = f"by each one's frequency alone {data.unigram_bits():.3f}"
            print(f"test/bits {bits:.3f} per character; {frequent}")
        if isinstance(module, CharacterLM):
            print("It writes:", module.write("def "), sep="\n")


def compare(data: StdlibSource, accelerator: str, devices: int) -> None:
    """Prints the same steps on one device, and on several with each split, side by side."""
    fits = short_fits(
        CharacterLM,
        data,
        SPLITS,
        accelerator=accelerator,
        devices=devices,
        steps=COMPARED_STEPS,
    )
    characters = Loads()
    for batch in islice(data.train_dataloader(), COMPARED_STEPS):
        characters.add(batch, devices)
    shares = [f"{characters.imbalance(split):.3f}" for split in SPLITS]
    rows = [*loss_rows(fits), ["fullest device / mean", "", *shares]]
    if accelerator != "cpu":  # whose replicas share its cores: none has a time of its own
        times = [f"{1e3 * fits[split].seconds_per_step:.1f}" for split in SPLITS]
        rows.append([f"ms per step ({accelerator})", "", *times])
    print_rows(rows)


def main() -> None:
    parser = ScriptParser("A language model on Python's source.", devices=4, epochs=3)
    parser.add_argument("--split", default="cost", choices=SPLITS, help="how batches are cut")
    parser.add_argument("--files", type=int, help="read only so many source files")
    parser.add_argument("--compare", action="store_true", help="a few steps with each split")
    args = parser.parse_args()
    if args.compare and args.devices < 2:
        parser.error("--compare: expected at least 2 devices, got --devices=1")

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    data = StdlibSource(files=args.files)
    with quiet():
        if args.compare:
            compare(data, args.accelerator, args.devices)
            return
        train_and_test(
            CharacterLM,
            data,
            Progress(),
            strategy=DataParallelStrategy(split=args.split),
            accelerator=args.accelerator,
            devices=args.devices,
            max_epochs=args.epochs,
        )


if __name__ == "__main__":
    main()
