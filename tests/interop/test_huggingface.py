"""Hugging Face transformers, built from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import Job, as_one_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import transformers

pytestmark = pytest.mark.interop

WORDS, LENGTH = 40, 9


class Tuned(LightningModule):
    """As in the tutorials: the step calls the model and takes the loss that it returns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(**batch)
        self.log("val/loss", output.loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch).logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sentences(n: int = 46) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        words = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < 4 + i % 6).long()
        rows.append({"input_ids": words * mask, "attention_mask": mask, "labels": words.sum() % 3})
    return rows


def classifier() -> LightningModule:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return Tuned(transformers.BertForSequenceClassification(config))


def labelled() -> DataLoader[Any]:
    return DataLoader(sentences(), batch_size=10)  # the last batch has 6


class Writer(Tuned):
    """A language model, whose loss is a mean over words and not over sentences: it says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(**batch)
        words = (batch["labels"][:, 1:] != -100).sum()
        self.log("train/loss", output.loss, batch_size=int(words), on_step=True, on_epoch=True)
        return {"loss": output.loss, "num_items": words}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        words = (batch["labels"][:, 1:] != -100).sum()
        self.log("val/loss", self(**batch).loss, batch_size=int(words))


class WriterByHand(Writer):
    """In forward mode: the step has all words, and takes its loss of them itself."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        return self.model(**inputs).logits

    def loss(self, batch: Any) -> Tensor:
        found, labels = self(**batch)[:, :-1], batch["labels"][:, 1:]
        return cross_entropy(found.flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch)


def writer(cls: type[Tuned] = Writer) -> LightningModule:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return cls(transformers.GPT2LMHeadModel(config))


def unlabelled() -> DataLoader[Any]:
    rows = sentences()
    for row in rows:
        row["labels"] = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
    return DataLoader(rows, batch_size=10)


DOUBLE = {"precision": "64-true"}
BERT = Job("transformers", "BERT", classifier, labelled, trainer=DOUBLE)
# The library computes this loss in single precision.
GPT = Job("transformers", "GPT-2", writer, unlabelled, trainer=DOUBLE, close=1e-6)
GPT_BY_HAND = Job("transformers", "GPT-2", lambda: writer(WriterByHand), unlabelled, trainer=DOUBLE)


FORWARD = {"mode": "forward"}
test_as_one_device = as_one_device((BERT, {}), (BERT, FORWARD), (GPT, {}), (GPT_BY_HAND, FORWARD))
