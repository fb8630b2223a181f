"""A callback that watches the devices: their samples, their time and their memory.

`Period` has what they did over many training steps, in few numbers; the monitor shows it as a table
and as a picture of matplotlib, which is drawn without pyplot: no window opens, and any thread may
draw.
"""

from __future__ import annotations

import base64
import itertools
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dp.lightning_private import is_accumulating, is_time_to_log, logged_step
from lightning_dp.parallel.split import StepUsage
from lightning_dp.table import table

_MOST_PERIODS = 512  # as fine as the picture can show
# Okabe and Ito's colours, which colour-blind people can tell apart too; grey in place of black.
_COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#5A5A5A"]


@dataclass(frozen=True)
class Period:
    """What the devices did over some training steps together; one entry per replica, root first.

    Periods are added with `+`; an empty one changes nothing.

    Attributes:
        waiting_seconds: how long a device had nothing to do while others worked.
        peak_bytes: the most in use in any of the steps; 0 where devices do not count it.

    Example:
        >>> step = StepUsage((3, 1), (0.75, 0.25), step_seconds=0.75, peak_bytes=(10, 20))
        >>> period = Period.of(step) + Period.of(step)
        >>> period.steps, period.samples, period.imbalance(period.busy_seconds)
        (2, (6, 2), 1.5)
    """

    steps: int = 0
    samples: tuple[int, ...] = ()
    busy_seconds: tuple[float, ...] = ()
    waiting_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: StepUsage) -> Period:
        """The period of one step."""
        peaks = step.peak_bytes or (0,) * len(step.sizes)
        return cls(1, step.sizes, step.busy_seconds, step.waiting_seconds, peaks)

    def __add__(self, other: Period) -> Period:
        """Both periods as one."""
        if not self.steps or not other.steps:
            return self if self.steps else other
        return Period(
            self.steps + other.steps,
            tuple(map(operator.add, self.samples, other.samples)),
            tuple(map(operator.add, self.busy_seconds, other.busy_seconds)),
            tuple(map(operator.add, self.waiting_seconds, other.waiting_seconds)),
            tuple(map(max, self.peak_bytes, other.peak_bytes)),
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """Each replica's part of the samples, from 0 to 1."""
        total = sum(self.samples) or 1
        return tuple(n / total for n in self.samples)

    @property
    def busy_shares(self) -> tuple[float, ...]:
        """The part of the time, from 0 to 1, in which each replica's device worked."""
        pairs = zip(self.busy_seconds, self.waiting_seconds, strict=True)
        return tuple(busy / (busy + waiting or 1) for busy, waiting in pairs)

    @staticmethod
    def imbalance(values: Sequence[float]) -> float:
        """The largest value over the mean: 1 where all are equal, K where one has everything."""
        return max(values) * len(values) / sum(values) if any(values) else 1.0


class DeviceSummary(NamedTuple):
    """What a replica did in a fit: a row of `DataParallelMonitor.summary()`, see `Period`.

    `share` is its part of all samples, `busy_share` its busy time over busy and waiting time.
    """

    device: str
    samples: int
    share: float
    busy_seconds: float
    waiting_seconds: float
    busy_share: float
    peak_bytes: int


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
            if len(self.periods) > _MOST_PERIODS:  # every two become one
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


# Table and picture


def memory_text(size: int) -> str:
    """Bytes for people; nothing where a device does not count them."""
    power = 3 if size >= 2**30 else 2 if size >= 2**20 else 1
    return f"{size / 2 ** (10 * power):,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}" if size else ""


def table_of(rows: Sequence[DeviceSummary]) -> str:
    """A line of headings and one for each replica; memory where a device counts it."""
    columns = {
        "device": [row.device for row in rows],
        "samples": [f"{row.samples:,}" for row in rows],
        "share": [f"{row.share:.1%}" for row in rows],
        "busy": [f"{row.busy_seconds:.2f} s" for row in rows],
        "waiting": [f"{row.waiting_seconds:.2f} s" for row in rows],
        "of the time busy": [f"{row.busy_share:.0%}" for row in rows],
    }
    if any(row.peak_bytes for row in rows):
        columns["peak memory"] = [memory_text(row.peak_bytes) for row in rows]
    return table(list(columns), list(zip(*columns.values(), strict=True)))


def headline(monitor: DataParallelMonitor) -> str:
    """The fit in one line."""
    total, count = monitor.total, len(monitor.replicas)
    busiest = f"busiest {total.imbalance(total.busy_seconds):.2f} times the mean"
    return f"{count} replicas, {total.steps:,} training steps   |   {busiest}"


def figure_of(monitor: DataParallelMonitor) -> Any:
    """Draws each replica's share over time, its time per step and its device's peak of memory."""
    from matplotlib.figure import Figure

    names, total = monitor.replicas, monitor.total
    colors = (_COLORS * len(names))[: len(names)]
    widths = [1.4, 1.25, 1.1] if any(total.peak_bytes) else [1.5, 1.3]
    size = (10, 4.2 + 0.26 * max(0, len(names) - 6))
    figure: Any = Figure(size, dpi=120, layout="constrained")
    axes = figure.subplots(1, len(widths), width_ratios=widths)
    _draw_shares(axes[0], names, monitor.periods, colors)
    _draw_time(axes[1], names, total, colors)
    if any(total.peak_bytes):  # replicas on one device share its memory
        first = [colors[monitor.devices.index(device)] for device in dict.fromkeys(monitor.devices)]
        peaks = dict(zip(monitor.devices, total.peak_bytes, strict=True))
        texts = [memory_text(peak) or "not counted" for peak in peaks.values()]
        _bars(axes[2], "Peak memory", list(peaks), list(peaks.values()), texts, color=first)
        axes[2].set_xticks([])
    figure.suptitle(headline(monitor), x=0.01, ha="left")
    # IPython shows a figure by itself only after `%matplotlib`.
    figure._repr_png_ = partial(as_png, figure)
    return figure


def as_png(figure: Any) -> bytes:
    """The figure's PNG."""
    content = BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _draw_shares(
    axes: Any, names: Sequence[str], periods: Sequence[Period], colors: Sequence[str]
) -> None:
    """Stacked bands, the root device's on top, and their names in the same order."""
    # Over some steps: the very last batch may be smaller.
    latest = sum(periods[-max(1, len(periods) // 10) :], Period()).shares
    labels = [f"{name}  {share:.1%}" for name, share in zip(names, latest, strict=True)]
    shares = [[period.shares[k] for period in (*periods, periods[-1])] for k in range(len(names))]
    edges = [0, *itertools.accumulate(period.steps for period in periods)]
    bottom_up = {"labels": labels[::-1], "colors": colors[::-1]}
    axes.stackplot(edges, shares[::-1], step="post", edgecolor="white", **bottom_up)
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}
    axes.legend(reverse=True, title="latest", alignment="left", handlelength=1, **place)
    axes.set_title("Share of the samples", loc="left", fontsize="medium")
    axes.set(xlabel="training step", xlim=(0, edges[-1]), ylim=(0, 1))
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_time(axes: Any, names: Sequence[str], total: Period, colors: Sequence[str]) -> None:
    """A bar per replica, busy and then waiting."""
    from matplotlib.ticker import EngFormatter

    busy = [seconds / total.steps for seconds in total.busy_seconds]
    both = [b + w / total.steps for b, w in zip(busy, total.waiting_seconds, strict=True)]
    texts = [f"{share:.0%} busy" for share in total.busy_shares]
    _bars(axes, "Time per step (grey: waiting)", names, both, texts, color="#D4D4D4")
    axes.barh(range(len(names)), busy, height=0.68, color=colors)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.locator_params(axis="x", nbins=4)


def _bars(
    axes: Any,
    title: str,
    names: Sequence[str],
    lengths: Sequence[float],
    texts: Sequence[str],
    **style: Any,
) -> None:
    """A bar for each name, the first on top, with a text at its end."""
    bars = axes.barh(range(len(names)), lengths, height=0.68, tick_label=names, **style)
    axes.bar_label(bars, texts, padding=4)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlim=(0, max(lengths) * 1.5 or 1), ylim=(len(names) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
