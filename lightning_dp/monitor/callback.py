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
from lightning_dp.monitor.history import DeviceSummary, History, Period


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

    Args:
        max_points: how many points over time are kept for the picture, at least 2. In longer
            trainings each stands for several steps.

    Raises:
        ValueError: `max_points` is not an integer of at least 2.

    Attributes:
        devices: the names of the replicas' devices in the latest fit, root first; empty if there
            was nothing to measure.
        replicas: the replicas' names, in the same order.
        total: all steps of the latest fit together; see `Period`.
    """

    def __init__(self, *, max_points: int = 512) -> None:
        if isinstance(max_points, bool) or not isinstance(max_points, int) or max_points < 2:
            raise ValueError(
                f"max_points: expected an integer of at least 2, got {max_points!r}. The default "
                "of 512 is as fine as the picture can show."
            )
        self._max_points = max_points
        self._begin()

    def _begin(self, devices: Sequence[torch.device] = (), names: Sequence[str] = ()) -> None:
        self.devices, self.replicas = tuple(map(str, devices)), tuple(names)
        self.total = Period()
        self._history = History(self._max_points)
        self._unlogged = Period()

    @property
    def periods(self) -> list[Period]:
        """The latest fit over time, oldest first: `total` in at most `max_points` parts."""
        return list(self._history.periods)

    @property
    def note(self) -> str | None:
        """That replicas took turns on the CPU, if they did so in at least half the steps.

        The numbers alone do not say it: each replica then waits for the others.
        """
        count, steps = self.total.in_turns, self.total.steps
        if not count or 2 * count < steps:
            return None
        which = "all" if count == steps else f"{count:,} of {steps:,}"
        return f"The replicas took turns in {which} steps: while one works, the others wait."

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
            path: a file whose ending is a format of matplotlib, such as .png, .svg or .pdf; its
                folder is made where it is missing. None for a notebook to show it.

        Returns:
            The path as a `Path`; without one the `matplotlib.figure.Figure`.

        Raises:
            ValueError: matplotlib writes no such file, or no training on several devices has been
                measured.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if not self.total.steps:
            raise ValueError(
                "plot: expected a training step on several devices under DataParallelStrategy "
                "(strategy='dp_custom'), got none. Give this callback to such a Trainer, and plot "
                "after trainer.fit(...)."
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
        return table_of(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What notebooks show: picture and table."""
        if not self.total.steps:
            return {"text/plain": str(self)}
        try:
            content = base64.b64encode(as_png(self.plot())).decode()
            picture = f'<img alt="{headline(self)}" src="data:image/png;base64,{content}"/>'
        except ModuleNotFoundError as error:
            picture = f"<p>{escape(str(error))}</p>"
        return {"text/plain": str(self), "text/html": f"{picture}<pre>{escape(str(self))}</pre>"}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before."""
        self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to measure, where there are several devices to compare."""
        strategy: Any = trainer.strategy
        if hasattr(strategy, "measured_steps") and len(strategy.parallel_devices or ()) > 1:
            self._begin(strategy.parallel_devices, strategy.replica_names)
            strategy.watch()
            strategy.measured_steps()  # drops steps before training (to find a learning rate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the steps that the devices have finished, and logs if it is time to."""
        self._add_steps(trainer)
        if self._unlogged.steps and _is_time_to_log(trainer):
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
            self._history.add(period)

    def _log(self, trainer: Trainer) -> None:
        period, self._unlogged = self._unlogged, Period()
        values: dict[tuple[str, ...], float] = {}
        for k, name in enumerate(self.replicas):
            path = "dp", *name.replace(":", "_").split("/")  # MLflow refuses ":" on Windows
            of_replica = {
                "samples": period.samples[k] / period.steps,
                "busy_seconds": period.busy_seconds[k] / period.steps,
                "waiting_seconds": period.waiting_seconds[k] / period.steps,
                "peak_MiB": period.peak_bytes[k] / 2**20,
            }
            if not period.peak_bytes[k]:
                del of_replica["peak_MiB"]
            values |= {(*path, what): value for what, value in of_replica.items()}
        for logger in trainer.loggers:
            row = {logger.group_separator.join(path): value for path, value in values.items()}
            # Lightning's own rows count steps so: a logger gets them in order.
            logger.log_metrics(row, step=logged_step(trainer))


def _is_time_to_log(trainer: Trainer) -> bool:
    """Whether Lightning logs the values of this step, too."""
    if trainer.lightning_module.automatic_optimization and is_accumulating(trainer):
        return False
    return is_time_to_log(trainer) or bool(getattr(trainer, "fast_dev_run", False))
