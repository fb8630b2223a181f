"""A callback that watches the devices: their samples, their time and their memory."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, overload

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dp.lightning_private import is_accumulating, is_time_to_log, logged_step
from lightning_dp.monitor.history import DeviceSummary, Fit, History, Period, Turns
from lightning_dp.monitor.picture import as_png, check_suffix, figure_of, headline, save
from lightning_dp.monitor.table import as_html, as_text
from lightning_dp.parallel.devices import memory_capacity

MIB = 2**20


class DataParallelMonitor(Callback):
    """Shows whether the devices share the work well: samples, time and memory of each.

    Every training step of `DataParallelStrategy` with several devices is measured. Where there is
    one device or another strategy, the callback does nothing. Of several processes each watches its
    own devices; loggers hear of those of the first one.

    Into every logger of the Trainer go, in the rows of `Trainer(log_every_n_steps=...)`:

    - `dp/<device>/samples`: samples per step
    - `dp/<device>/busy_seconds`: seconds per step in which the device worked
    - `dp/<device>/waiting_seconds`: seconds per step in which it had nothing to do, since others
      still worked
    - `dp/<device>/peak_MiB`: the most memory in use on it, where devices count it

    The first three are means over the steps since the row before, the last is the largest in them,
    so that nothing between two rows is lost. `<device>` is the replica's name: that of its device
    (`cuda:1`), with a number where several replicas share it (`cpu:2`), and after the process where
    there are several (`process1/cuda:4`). Errors, tables and pictures name replicas so, too.

    In a notebook it shows itself, as picture and table; `print(monitor)` prints the table.

    A step is a call of `training_step`: each micro-batch of gradient accumulation, each evaluation
    of a closure. In forward mode it is a spread call of the module, and its time the forward's.
    When a device is busy is told

    - by its own clock, on an accelerator whose module counts `busy_seconds`;
    - by events on GPUs, from the step's start until the device is through with it, gaps included;
      nothing waits for a GPU until training ends, so that a row may be without the latest steps;
    - elsewhere by the calls of its worker: on the CPU forward and backward, so that the rest of the
      step (logs, the joint loss, other replicas' turns) counts as waiting; else the forward.

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

    Example:
        >>> monitor = DataParallelMonitor()
        >>> trainer = Trainer(
        ...     strategy="dp_custom", accelerator="cpu", devices=4, callbacks=[monitor]
        ... )
        >>> trainer.fit(model, data)  # doctest: +SKIP
        >>> monitor.plot("devices.png")  # doctest: +SKIP
    """

    def __init__(self, *, max_points: int = 512) -> None:
        if isinstance(max_points, bool) or not isinstance(max_points, int) or max_points < 2:
            raise ValueError(
                f"max_points: expected an integer of at least 2, got {max_points!r}. The default "
                "of 512 is as fine as the picture can show."
            )
        self._max_points = max_points
        self._begin()

    @property
    def periods(self) -> list[Period]:
        """The latest fit over time, oldest first: `total` in at most `max_points` parts."""
        return list(self._history.periods)

    def summary(self) -> list[DeviceSummary]:
        """What each replica did in the latest fit: a row for each, root first.

        The rows are named tuples, see `DeviceSummary`; `pandas.DataFrame(monitor.summary())` makes
        columns of their names. There is none if nothing was measured.
        """
        return self._fit().rows() if self.total.steps else []

    def figure(self) -> Any:
        """The latest fit as a `matplotlib.figure.Figure`: shares, times, and memory.

        Needs matplotlib. Notebooks show it; pyplot knows nothing of it. Can be called during the
        fit, too, for what there is by then.

        Raises:
            ValueError: no training on several devices has been measured.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if not self.total.steps:
            raise ValueError(
                "plot: expected a training step on several devices under DataParallelStrategy "
                "(strategy='dp_custom'), got none. Give this callback to such a Trainer, and plot "
                "after trainer.fit(...)."
            )
        return figure_of(self._fit())

    @overload
    def plot(self, path: None = None) -> Any: ...

    @overload
    def plot(self, path: str | os.PathLike[str]) -> Path: ...

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the latest fit into a file, or without a path for a notebook to show.

        Args:
            path: a file that ends in .png, .svg or .pdf; its folder is made where it is missing.

        Returns:
            The path; without one the figure, see `figure`.

        Raises:
            ValueError: the file ends in something else, or no training on several devices has been
                measured.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if path is None:
            return self.figure()
        file = Path(path)
        suffix, figure = check_suffix(file), self.figure()
        file.parent.mkdir(parents=True, exist_ok=True)
        save(figure, file, suffix)
        return file

    @property
    def note(self) -> str | None:
        """What the numbers alone do not say: that replicas took turns on the CPU, and why."""
        return self._turns.note(of=self.total.steps)

    def __str__(self) -> str:
        """The table of the latest fit."""
        if not self.total.steps:
            return f"{type(self).__qualname__}: no training step on several devices was measured"
        return as_text(self._fit())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What notebooks show: picture and table."""
        if not self.total.steps:
            return {"text/plain": str(self)}
        try:
            content = base64.b64encode(as_png(self.figure())).decode()
            picture = f'<img alt="{headline(self._fit())}" src="data:image/png;base64,{content}"/>'
        except ModuleNotFoundError as error:
            picture = f"<p>{escape(str(error))}</p>"
        return {"text/plain": str(self), "text/html": as_html(self._fit(), picture)}

    def _fit(self) -> Fit:
        own = self.replicas, self.devices, self.total, self.periods, self._capacities
        return Fit(*own, self.note)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the fit before."""
        self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to measure, where there are several devices to compare."""
        strategy: Any = trainer.strategy
        # It is ours, in either of Lightning's packages.
        devices = (strategy.parallel_devices or []) if hasattr(strategy, "measured_steps") else []
        self._begin(*((devices, strategy.replica_names) if len(devices) > 1 else ()))
        if self.devices:
            strategy.watch()
            strategy.measured_steps()  # what came before (to find a learning rate) is no training

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Notes what the devices are through with, and logs if it is time to."""
        self._note(trainer)
        if self._unlogged.steps and _is_time_to_log(trainer):
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for what the devices are still at."""
        self._note(trainer, wait=True)

    def _begin(self, devices: Sequence[torch.device] = (), names: Sequence[str] = ()) -> None:
        self.devices, self.replicas = tuple(map(str, devices)), tuple(names)
        self.total = Period()
        self._history = History(self._max_points)
        self._unlogged = Period()
        self._turns = Turns()
        self._capacities: tuple[int, ...] = ()

    def _note(self, trainer: Trainer, *, wait: bool = False) -> None:
        strategy: Any = trainer.strategy
        steps = strategy.measured_steps(wait=wait) if self.devices else []
        for step in steps:
            period = Period.of(step)
            if not self.total.steps:
                self._capacities = tuple(
                    memory_capacity(torch.device(device)) if peak else 0
                    for device, peak in zip(self.devices, period.peak_bytes, strict=True)
                )
            self.total += period
            self._unlogged += period
            self._history.add(period)
            self._turns.add(step)
        if steps and self._turns.steps:
            self._turns.why = strategy.why_in_turns()

    def _log(self, trainer: Trainer) -> None:
        # As Lightning's own rows count steps, so that a logger sees them in order.
        step = logged_step(trainer)
        values = _values(self.replicas, self._unlogged)
        for logger in trainer.loggers:
            separator = logger.group_separator
            row = {separator.join(names): value for names, value in values.items()}
            logger.log_metrics(row, step=step)
        self._unlogged = Period()


def _is_time_to_log(trainer: Trainer) -> bool:
    """Whether Lightning logs the values of this step, too."""
    module = trainer.lightning_module
    if module.automatic_optimization and is_accumulating(trainer):
        return False
    return is_time_to_log(trainer) or bool(getattr(trainer, "fast_dev_run", False))


def _values(names: Sequence[str], period: Period) -> dict[tuple[str, ...], float]:
    """What is logged of a period, each under the parts of its name."""
    values: dict[tuple[str, ...], float] = {}
    for k, name in enumerate(names):
        measured = {
            "samples": period.samples[k] / period.steps,
            "busy_seconds": period.busy_seconds[k] / period.steps,
            "waiting_seconds": period.waiting_seconds[k] / period.steps,
        }
        if period.peak_bytes[k]:
            measured["peak_MiB"] = period.peak_bytes[k] / MIB
        values |= {("dp", *name.split("/"), what): value for what, value in measured.items()}
    return values
