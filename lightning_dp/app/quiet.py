"""Keeps a few of Lightning's messages, and no others, off the screen."""

import logging
import warnings
from collections.abc import Iterator

from lightning_dp.parallel.contexts import context

# Where Lightning's rank_zero_info logs.
_LOGGER = "lightning.pytorch.utilities.rank_zero"
_MESSAGES = (
    "💡 Tip:",
    "TPU available: False",
    "HPU available: False",
    # Said twice: "Loaded model weights from ..." follows.
    "Restoring states from the checkpoint path",
)
# Regular expressions, matched from the start of the warning.
_WARNINGS = (
    # With images in memory, worker processes only cost time.
    r"The '\w+' does not have many workers",
    # The run folder is ours; Hydra has put its own files there.
    r"Experiment logs directory .* exists and is not empty",
    r"Checkpoint directory .* exists and is not empty",
    # A resumed run has a run folder of its own.
    r"The dirpath has changed from",
    # Lightning's own use of torch, nothing that a user could change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Asked for: the test of strategy=ddp runs on the same devices as its training.
    r"Using `DistributedSampler` with the dataloaders",
)


@context
def quiet(enabled: bool = True) -> Iterator[None]:
    """Leaves out those of Lightning's messages that say nothing about these programs."""
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
