"""Modes: what becomes of a batch and of a step of the user's LightningModule.

Decided here: what a mode is, and step mode (`step_mode`), in which optimizers act once for all
(`manual_optimization`, and in other steps `schedules`) and a step may take an iterator
(`dataloader_iter`); forward mode (`forward_mode`), in several processes (`forward_in_processes`),
with a warning where nothing is spread (`spread_check`); which of them the options ask for
(`mode_options`), and whose code moves batches, and what it makes of them (`transfer_hooks`).
"""

from lightning_dp.modes.forward_mode import ForwardMode as ForwardMode
from lightning_dp.modes.mode_options import mode_maker as mode_maker
from lightning_dp.modes.step_mode import Mode as Mode
from lightning_dp.modes.step_mode import StepMode as StepMode
from lightning_dp.modes.step_mode import Transfer as Transfer
