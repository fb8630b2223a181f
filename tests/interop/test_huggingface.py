"""Hugging Face transformers, built from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import Job, compare
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")

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


BERT = Job("transformers", "BERT", classifier, labelled, trainer={"precision": "64-true"})


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_classifier(on: str, mode: str, record_property: Any) -> None:
    record_property("interop", BERT.row(mode, on, compare(BERT, on, mode=mode)))
