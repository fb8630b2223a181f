"""`model.validation_step = None`, or any other step: what comes of it is what one device does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_equal_trees, loader, trainer

from lightning_dp import DataParallelStrategy

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def outcome(devices: int, strategy: Any, missing: tuple[str, ...], when: str, stage: str) -> Any:
    """The weights and metrics that a stage leaves, or its error; and what is warned of."""
    torch.manual_seed(0)
    module = Classifier()
    if when == "before":
        for step in missing:
            setattr(module, step, None)
    else:
        module.setup = lambda stage: [setattr(module, step, None) for step in missing]
    job = trainer(devices, strategy, max_epochs=1)
    data = [loader(10, 5)] * (2 if stage == "fit" else 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = getattr(job, stage)(module, *data)
        except Exception as error:
            result = (type(error), str(error))
    told = sorted(str(w.message) for w in caught if "step" in str(w.message))
    return result, dict(job.callback_metrics), module.state_dict(), told


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize(
    ("missing", "when"),
    [
        (STEPS[1:2], "before"),
        (STEPS, "before"),
        *(
            pytest.param((step,), "before", marks=pytest.mark.slow)
            for step in STEPS
            if step != STEPS[1]
        ),
        pytest.param(STEPS[1:], "in setup", marks=pytest.mark.slow),
    ],
)
def test_a_missing_step_is_as_on_one_device(
    on: str, missing: tuple[str, ...], when: str, stage: str
) -> None:
    one = outcome(1, "auto", missing, when, stage)
    for mode in ("step", "forward"):
        several = outcome(3, DataParallelStrategy(mode=mode), missing, when, stage)
        assert_equal_trees(several, one, mode, atol=1e-5, rtol=0.0)
