"""Adverts: what any Trainer says that is not about the program, and that nobody could change."""

from __future__ import annotations

import logging
import warnings

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_TIP = "💡 Tip:"
_OF_TORCH = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
_LIGHTNINGS_CALL = r"(lightning\.pytorch|pytorch_lightning)\.utilities\._pytree"


def leave_out() -> None:
    """Keeps Lightning's tips for other products, and one deprecation of torch's, off the screen.

    The deprecated call is Lightning's own; one of anybody else's is shown, as everything is.
    """
    warnings.filterwarnings("ignore", _OF_TORCH, FutureWarning, _LIGHTNINGS_CALL)
    for package in _PACKAGES:
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_TIP)
