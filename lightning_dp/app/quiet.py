"""Leaves out those of Lightning's messages that say nothing about these programs."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = "lightning.pytorch.utilities.rank_zero"  # of Lightning's rank_zero_info
_MESSAGES = (
    "💡 Tip:",  # for other products
    "GPU available: False",
    "TPU available: False",
    "HPU available: False",
    # Said twice: "Loaded model weights from ..." follows.
    "Restoring states from the checkpoint path",
)
# Regular expressions, matched from the start of the warning.
_WARNINGS = (
    # With images in memory, worker processes only cost time.
    r"The '\w+' does not have many workers",
    # Hydra has put its own files into the run folder.
    r"Experiment logs directory .* exists and is not empty",
    r"Checkpoint directory .* exists and is not empty",
    # A resumed run has a run folder of its own.
    r"The dirpath has changed from",
    # A test needs none of the training's callbacks.
    r"Be aware that when using `ckpt_path`, callbacks",
    # The test of strategy=ddp runs on the same devices as its training.
    r"Using `DistributedSampler` with the dataloaders",
    # Lightning's own call of torch.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Keeps these messages off screen and log while it lasts."""
    if not enabled:
        yield
        return
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_wanted)
    try:
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MESSAGES)
