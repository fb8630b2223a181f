"""The first-step check says nothing about architectures of transformers in common use."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from support.oracle import trainer
from test_huggingface import Tuned
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("one_thread")]

WORDS, LENGTH, LABELS = 40, 12, 3
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": WORDS}
ENCODER = {**SMALL, "intermediate_size": 32, "num_labels": LABELS}
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": LABELS}


DECODER = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SMALL}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
CLASSES, IMAGES = "ForSequenceClassification", "ForImageClassification"
VIT = {**ENCODER, **IMAGE}
del VIT["vocab_size"]

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": (CLASSES, ENCODER),
    "Roberta": (CLASSES, ENCODER),
    "DistilBert": (
        CLASSES,
        {**ENCODER, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    ),
    "Albert": (CLASSES, {**ENCODER, "embedding_size": 8}),
    "Electra": (CLASSES, {**ENCODER, "embedding_size": 8}),
    "DebertaV2": (CLASSES, ENCODER),
    "GPT2": ("LMHeadModel", {**DECODER, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "Llama": ("ForCausalLM", {**DECODER, "intermediate_size": 32}),
    "Mistral": ("ForCausalLM", {**DECODER, "intermediate_size": 32, "num_key_value_heads": 1}),
    "T5": ("ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "ViT": (IMAGES, VIT),
    "Swin": (
        IMAGES,
        {**IMAGE, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
    ),
}
"""What follows the name in the name of the class, and the options of the configuration."""


def samples(kind: str, n: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        words = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        if kind == IMAGES:
            image = torch.randn(3, 16, 16, generator=generator)
            rows.append({"pixel_values": image, "labels": i % LABELS})
        elif kind == CLASSES:
            mask = (torch.arange(LENGTH) < 6 + i % 6).long()
            rows.append({"input_ids": words * mask, "attention_mask": mask, "labels": i % LABELS})
        else:
            rows.append({"input_ids": words, "labels": words})
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_said_of_architectures_of_transformers(
    name: str, dropout: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{kind}")(config).train()
    if not dropout:
        model.eval()
    module, strategy = Tuned(model), DataParallelStrategy()
    data = DataLoader(samples(kind), 12)
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = trainer(3, strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=1)
        job.fit(module, data, data)
        reports = dict(strategy.first_step)
        job.predict(module, data)
    assert not [str(w.message) for w in caught if "check_first_step" in str(w.message)]
    for report in [*reports.values(), *strategy.first_step.values()]:
        assert report.is_same, str(report)
    assert sum("check_first_step" in message for message in caplog.messages) <= 1
