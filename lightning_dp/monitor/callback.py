"""A callback that watches the devices: their samples, their time and their memory."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dp.lightning_private import is_accumulating, is_time_to_log, logged_step
from lightning_dp.monitor.display import as_png, figure_of, headline, table_of
from lightning_dp.monitor.history import DeviceSummary, Period

MOST_PERIODS = 512  # as fine as the picture can show


class DataParallelMonitor(Callback):
    """Shows whether the devices share the work well: samples, time and memory of each.

    Every training step of `DataParallelStrategy` with several devices is measured. Where there is
    one device or another strategy, the callback does nothing. Of several processes each watches its
    own devices; loggers get those of the first one.

    Into every logger of the Trainer go, in the rows of `Trainer(log_every_n_steps=...)`:

    - `dp/<device>/samples`: samples per step
    - `dp/<device>/busy_seconds`: seconds per step in which the device worked
    - `dp/<device>/waiting_seconds`: seconds per step in which it waited for others
    - `dp/<device>/peak_MiB`: the most memory in use on it, where devices count it

    The first three are means over the steps since the row before, the last is the largest in them.
    `<device>` is the replica's name with `_` for `:`, which some loggers refuse: `cuda_1`, `cpu_2`.

    In a notebook it shows itself, as picture and table; `print(monitor)` prints the table.

    A step is a call of `training_step`: each micro-batch of gradient accumulation, each evaluation
    of a closure. In forward mode it is a spread call of the module, and its time the forward's.
    The time of GPUs comes from events; nothing waits for a GPU until training ends, so that a row
    may be without the latest steps. On the CPU it is what workers spend in forward and backward.

    Attributes:
        devices: the names of the replicas' devices in the latest fit, root first; empty if there
            was nothing to measure.
        replicas: the replicas' names, in the same order.
        total: all steps of the latest fit together; see `Period`.
        periods: the latest fit over time, oldest first: `total` in at most 512 parts, of which all
            but the last span equally many steps.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self, devices: Sequence[torch.device] = (), names: Sequence[str] = ()) -> None:
        self.devices, self.replicas = tuple(map(str, devices)), tuple(names)
        self.total, self.periods = Period(), list[Period]()
        self._unlogged, self._span = Period(), 1

    def summary(self) -> list[DeviceSummary]:
        """What each replica did in the latest fit: a row for each, root first; see `DeviceSummary`.

        `pandas.DataFrame(monitor.summary())` makes columns of their names.
        """
        total = self.total
        columns = total.samples, total.shares, total.busy_seconds, total.waiting_seconds
        rows = zip(self.replicas, *columns, total.busy_shares, total.peak_bytes, strict=False)
        return [DeviceSummary(*row) for row in rows]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the latest fit, also while it runs: shares, times, and memory.

        Args:
            path: a file whose ending is a format of matplotlib, such as .png, .svg or .pdf; None
                for a notebook to show it.

        Returns:
            The path as a `Path`; without one the `matplotlib.figure.Figure`.
        """
        if not self.total.steps:
            raise ValueError(
                "plot: expected a training step on several devices under DataParallelStrategy, got "
                "none. Give this callback to such a Trainer, and plot after trainer.fit(...)."
            )
        figure = figure_of(self)
        if path is None:
            return figure
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format=file.suffix[1:] or "png")
        return file

    def __str__(self) -> str:
        """The table of the latest fit."""
        if not self.total.steps:
            return f"{type(self).__qualname__}: no training step on several devices was measured"
        return table_of(self.summary())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What notebooks show: picture and table."""
        if not self.total.steps:
            return {"text/plain": str(self)}
        try:
            content = base64.b64encode(as_png(self.plot())).decode()
        except ModuleNotFoundError:  # matplotlib
            return {"text/plain": str(self)}
        picture = f'<img alt="{headline(self)}" src="data:image/png;base64,{content}"/>'
        return {"text/plain": str(self), "text/html": f"{picture}<pre>{escape(str(self))}</pre>"}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before."""
        self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to measure, where there are several devices to compare."""
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "measured_steps"):
            return
        if len(strategy.parallel_devices or ()) * trainer.world_size > 1:
            self._begin(strategy.parallel_devices, strategy.replica_names)
            strategy.watch()
            strategy.measured_steps()  # drops steps before training (to find a learning rate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the steps that the devices have finished, and logs if it is time to."""
        self._add_steps(trainer)
        # As Lightning logs the values of this step.
        is_step = not (trainer.lightning_module.automatic_optimization and is_accumulating(trainer))
        is_time = is_time_to_log(trainer) or bool(getattr(trainer, "fast_dev_run", False))
        if self._unlogged.steps and is_step and is_time:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the steps that are still running on devices."""
        self._add_steps(trainer, wait=True)

    def _add_steps(self, trainer: Trainer, *, wait: bool = False) -> None:
        strategy: Any = trainer.strategy
        for step in strategy.measured_steps(wait=wait) if self.devices else []:
            period = Period.of(step)
            self.total += period
            self._unlogged += period
            if self.periods and self.periods[-1].steps < self._span:
                self.periods[-1] += period
            else:
                self.periods.append(period)
            if len(self.periods) > MOST_PERIODS:  # every two become one
                starts = range(0, len(self.periods), 2)
                self.periods = [sum(self.periods[i : i + 2], Period()) for i in starts]
                self._span *= 2

    def _log(self, trainer: Trainer) -> None:
        period, self._unlogged = self._unlogged, Period()
        values: dict[tuple[str, ...], float] = {}
        for k, name in enumerate(self.replicas):
            path = ("dp", *name.replace(":", "_").split("/"))  # MLflow refuses ":" on Windows
            for what in ("samples", "busy_seconds", "waiting_seconds"):
                values |= {(*path, what): getattr(period, what)[k] / period.steps}
            if period.peak_bytes[k]:
                values |= {(*path, "peak_MiB"): period.peak_bytes[k] / 2**20}
        for logger in trainer.loggers:
            row = {logger.group_separator.join(path): value for path, value in values.items()}
            # Lightning's own rows count steps so: a logger gets them in order.
            logger.log_metrics(row, step=logged_step(trainer))
