"""The monitor as a table and as a picture of matplotlib.

The picture is drawn without pyplot: no window opens, and any thread may draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from lightning_dp.monitor.history import DeviceSummary, Period
from lightning_dp.table import table

if TYPE_CHECKING:
    from lightning_dp.monitor.callback import DataParallelMonitor

# Okabe and Ito's colours, which colour-blind people can tell apart too; grey in place of black.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#5A5A5A"]


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
    colors = (COLORS * len(names))[: len(names)]
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
