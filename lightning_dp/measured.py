"""Measured: what a strategy reports of the steps that its devices have done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lightning_dp.auto_split import AutoSplitSteps
from lightning_dp.mode import Mode
from lightning_dp.options import OptionsMixin
from lightning_dp.parallel.split import StepUsage
from lightning_dp.parallel.usage import DeviceUsage


class MeasuredMixin(OptionsMixin):
    """What monitors, callbacks and people read."""

    _mode: Mode | None
    last_sizes: tuple[int, ...] = ()
    """Samples per device in the latest step."""
    usage: Sequence[DeviceUsage] = ()
    """What every device did in the training steps of the latest fit."""
    _auto: AutoSplitSteps | None = None  # with split="auto"

    def watch(self) -> None:
        """Measures every training step of this fit from now on, for `measured_steps`."""
        if self._mode is not None:
            self._mode.engine.meter.watch()

    def measured_steps(self, *, wait: bool = False) -> list[StepUsage]:
        """Takes the training steps measured since the last call, in order, each of them once.

        Empty with one device, after the fit, and if nothing is watched: see `watch`. In forward
        mode each spread call of the module is a step. Of several processes each sees its own
        devices.

        Args:
            wait: whether to wait for GPUs to be through with all steps; else those that they are
                still at are in a later call.
        """
        return [] if self._mode is None else self._mode.engine.meter.take(wait=wait)

    def why_in_turns(self) -> str:
        """Why replicas on the CPU run one after another in the training steps of this fit."""
        engine = cast(Mode, self._mode).engine
        why = engine.executor.why_in_order(engine.meter.kind)
        is_ours = why == 'executor="inorder"' and self.given_options.get("executor") != "'inorder'"
        return "two threads would apply the max_norm of an embedding twice" if is_ours else why
