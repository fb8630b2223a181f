"""The monitor as a table and as a picture of matplotlib.

The picture is drawn without pyplot: no window opens, and any thread may draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from lightning_dp.monitor.history import Period
from lightning_dp.table import table

if TYPE_CHECKING:
    from lightning_dp.monitor.callback import DataParallelMonitor

# Okabe and Ito's colours, which colour-blind people can tell apart too; grey in place of black.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#5A5A5A"]


def memory_text(size: int) -> str:
    """Bytes for people; nothing where a device does not count them."""
    power = 3 if size >= 2**30 else 2 if size >= 2**20 else 1
    return f"{size / 2 ** (10 * power):,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}" if size else ""


def table_of(monitor: DataParallelMonitor) -> str:
    """A line of headings, one for each replica, and the note; memory where a device counts it."""
    rows = monitor.summary()
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
    text = table(list(columns), list(zip(*columns.values(), strict=True)))
    return "\n".join([text, *([monitor.note] if monitor.note else [])])


def headline(monitor: DataParallelMonitor) -> str:
    """The fit in one line."""
    total, count = monitor.total, len(monitor.replicas)
    busiest = f"busiest {total.imbalance(total.busy_seconds):.2f} times the mean"
    return f"{count} replicas, {total.steps:,} training steps   |   {busiest}"


def figure_of(monitor: DataParallelMonitor) -> Any:
    """Draws each replica's share over time, and its time and memory in total."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: expected the package matplotlib, which is not installed. Install it: "
            "python -m pip install matplotlib",
            name=error.name,
        ) from error
    names, total = monitor.replicas, monitor.total
    has_memory = any(total.peak_bytes)
    size = (10, 4.2 + 0.26 * max(0, len(names) - 6))
    figure: Any = Figure(size, dpi=120, layout="constrained")
    widths = [1.4, 1.25, 1.1] if has_memory else [1.5, 1.3]
    axes = figure.subplots(1, len(widths), width_ratios=widths)
    _draw_shares(axes[0], names, monitor.periods)
    _draw_time(axes[1], names, total)
    if has_memory:
        _draw_memory(axes[2], monitor.devices, total.peak_bytes)
    figure.suptitle(headline(monitor), x=0.01, ha="left")
    if monitor.note:
        figure.supxlabel(monitor.note, fontsize="medium", x=0.01, ha="left")
    # IPython shows a figure by itself only after `%matplotlib`.
    figure._repr_png_ = partial(as_png, figure)
    return figure


def as_png(figure: Any) -> bytes:
    """The figure's PNG."""
    content = BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _draw_shares(axes: Any, names: Sequence[str], periods: Sequence[Period]) -> None:
    """Stacked bands, the root device's on top, and their names in the same order."""
    # Over some steps: the very last batch may be smaller.
    latest = sum(periods[-max(1, len(periods) // 10) :], Period()).shares
    labels = [f"{name}  {share:.1%}" for name, share in zip(names, latest, strict=True)]
    shares = [[period.shares[k] for period in (*periods, periods[-1])] for k in range(len(names))]
    edges = [0, *itertools.accumulate(period.steps for period in periods)]
    axes.stackplot(
        edges,
        shares[::-1],  # from the bottom up
        labels=labels[::-1],
        colors=_colors(names)[::-1],
        step="post",
        edgecolor="white",
    )
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}
    axes.legend(reverse=True, title="latest", alignment="left", handlelength=1, **place)
    _label(axes, "Share of the samples", "training step")
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1))
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _draw_time(axes: Any, names: Sequence[str], total: Period) -> None:
    """A bar per replica, busy and then waiting."""
    from matplotlib.ticker import EngFormatter

    busy = [seconds / total.steps for seconds in total.busy_seconds]
    both = [b + w / total.steps for b, w in zip(busy, total.waiting_seconds, strict=True)]
    _bars(axes, names, both, [f"{share:.0%} busy" for share in total.busy_shares], color="#D4D4D4")
    _bars(axes, names, busy, color=_colors(names))
    _label(axes, "Time per step (grey: waiting)")
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlim(0, max(both) * 1.3 or 1)


def _draw_memory(axes: Any, devices: Sequence[str], peaks: Sequence[int]) -> None:
    """A bar per device, as replicas on one device share its memory."""
    colors, of_devices = _colors(devices), dict(zip(devices, peaks, strict=True))
    texts = [memory_text(peak) or "not counted" for peak in of_devices.values()]
    first = [colors[devices.index(device)] for device in of_devices]
    _bars(axes, list(of_devices), list(of_devices.values()), texts, color=first)
    _label(axes, "Peak memory")
    axes.set_xticks([])
    axes.set_xlim(0, max(peaks) * 1.6)


def _bars(
    axes: Any, names: Sequence[str], lengths: Sequence[float], texts: Any = (), **style: Any
) -> None:
    """A bar for each name, the first on top, with a text at its end."""
    bars = axes.barh(range(len(names)), lengths, height=0.68, tick_label=names, **style)
    if texts:
        axes.bar_label(bars, texts, padding=4)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _colors(names: Sequence[str]) -> list[str]:
    return list(itertools.islice(itertools.cycle(COLORS), len(names)))


def _label(axes: Any, title: str, unit: str = "") -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
