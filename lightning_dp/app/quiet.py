"""Keeps a few of Lightning's messages, and no others, off the screen."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Where Lightning's rank_zero_info logs.
_LOGGER = "lightning.pytorch.utilities.rank_zero"
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
    # The run folder is ours; Hydra has put its own files there.
    r"Experiment logs directory .* exists and is not empty",
    r"Checkpoint directory .* exists and is not empty",
    # A resumed run has a run folder of its own.
    r"The dirpath has changed from",
    # Asked for: the test of strategy=ddp runs on the same devices as its training.
    r"Using `DistributedSampler` with the dataloaders",
    # Lightning's own call of torch.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Leaves out those of Lightning's messages that say nothing about these programs."""
    if not enabled:
        yield
        return
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_wanted)
    try:
        with warnings.catch_warnings(), _beside_progress_bars():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MESSAGES)


@contextmanager
def _beside_progress_bars() -> Iterator[None]:
    """Lightning's messages appear above a progress bar, not behind its last word.

    A bar replaces `sys.stderr` while it is drawn; Lightning's handler keeps the one of its start.
    """
    own = [
        h
        for h in logging.getLogger("lightning.pytorch").handlers
        if type(h) is logging.StreamHandler
    ]
    streams = [handler.setStream(_Stderr()) for handler in own]
    try:
        yield
    finally:
        for handler, stream in zip(own, streams, strict=True):
            handler.setStream(stream)


class _Stderr:
    """`sys.stderr` as it is at the time of writing."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
