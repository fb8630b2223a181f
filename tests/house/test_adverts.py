"""What is left out of Lightning's lines is not left out of anybody else's."""

import logging
import warnings

import pytest

from lightning_dp.hints.adverts import leave_out


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_tips_and_one_deprecation_of_lightnings_own(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = "`isinstance(treespec, LeafSpec)` is deprecated, use another"
    callers = [f"{package}.utilities._pytree", "own", f"{package}.callbacks"]
    logger = logging.getLogger(f"{package}.utilities.rank_zero")
    with warnings.catch_warnings(record=True) as shown, caplog.at_level(logging.INFO, logger.name):
        warnings.simplefilter("always")
        leave_out()
        for i, caller in enumerate(callers):
            warnings.warn_explicit(text, FutureWarning, "file.py", i, caller)
        logger.info("💡 Tip: buy this")
        logger.info("not a 💡 Tip:")
    assert [warning.lineno for warning in shown] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == ["not a 💡 Tip:"]
