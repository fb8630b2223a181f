"""Forward mode: whether a step calls something that is spread over the replicas."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dp.parallel.forward import ForwardParallel


class SpreadCheck:
    """Looks at the first step of each kind that computes something, and warns once.

    One that returns nothing may compute nothing: it is not looked at, but where it trains by hand.
    """

    def __init__(self, module: LightningModule, engine: ForwardParallel) -> None:
        self._module, self._engine = module, engine
        self._to_look_at = {"training_step", "validation_step", "test_step", "predict_step"}
        self._before = (0, 0)

    def begin(self) -> None:
        """A step begins."""
        self._before = (self._engine.num_calls, self._engine.num_cut)

    def end(self, step: str, output: Any) -> None:
        """It has returned something."""
        by_hand = step == "training_step" and not self._module.automatic_optimization
        if step not in self._to_look_at or (output is None and not by_hand):
            return
        self._to_look_at.discard(step)
        calls, cut = self._before
        if self._engine.num_cut == cut:
            self._to_look_at.clear()
            self._tell(step, was_called=self._engine.num_calls > calls)

    def _tell(self, step: str, *, was_called: bool) -> None:
        children = self._module.named_children()
        names = [name for name, child in children if next(child.parameters(), None) is not None]
        if was_called:
            text = (
                "the arguments of the calls had no tensor and no list that could be cut. Pass "
                "tensors with one row per sample, or define split_batch(batch, sizes)."
            )
        else:
            text = (
                "it did not call self(...). Name the submodules that it calls, as in "
                f"DataParallelStrategy(mode='forward', parallel_modules={names[:6]}), or compute "
                "in forward and call self(...)."
            )
        warnings.warn(
            f"{type(self._module).__qualname__}.{step}: expected calls that are spread over the "
            f"devices, got none, so that all ran on {self._engine.devices[0]}: {text}",
            stacklevel=2,
        )
