"""Which mode a strategy's options ask for, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_dp.modes.forward_mode import ForwardMode
from lightning_dp.modes.step_mode import MODES, Mode, StepMode
from lightning_dp.parallel.checks import check_choice, check_names
from lightning_dp.parallel.gradients import LOSS_REDUCTIONS, LossReduction


def mode_maker(
    mode: str, loss_reduction: LossReduction, parallel_modules: Sequence[str], move_batch: bool
) -> Callable[..., Mode]:
    """What makes the mode that these options ask for, once the module and devices are known."""
    check_choice("mode", mode, MODES)
    check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
    _check_forward_options(mode, parallel_modules, move_batch)
    if mode == "step":
        return partial(StepMode, loss_reduction=loss_reduction)
    own: dict[str, Any] = {"parallel_modules": parallel_modules, "move_batch": move_batch}
    return partial(ForwardMode, loss_reduction=loss_reduction, **own)


def _check_forward_options(mode: str, parallel_modules: Sequence[str], move_batch: bool) -> None:
    """Refuses options of forward mode that cannot be, or that step mode would ignore."""
    check_names("parallel_modules", parallel_modules)
    check_choice("move_batch", move_batch, (True, False))
    if mode == "step" and (parallel_modules or not move_batch):
        named = ("parallel_modules", list(parallel_modules))
        key, value = named if parallel_modules else ("move_batch", move_batch)
        raise ValueError(
            f'{key}: expected to be left out in step mode, got {value}. Use mode="forward", in '
            "which it has a meaning."
        )
