"""The monitor's picture: each device's share over time, its time and its memory.

Drawn without pyplot: nothing of matplotlib's global state is touched and no window is opened, so
that any thread of any program may draw.
"""

from __future__ import annotations

import itertools
import operator
import textwrap
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_dp.monitor.history import Fit, Period
from lightning_dp.monitor.table import memory_unit

DATES = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""The kinds of files, and what of each would change from day to day, or with matplotlib."""

# Okabe and Ito's colours, told apart by colour-blind people too, with a grey in place of black.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#5A5A5A"]
HATCHES = ["", "///", "...", "xxx"]
WAITING, INK, FAINT, LINES = "#D4D4D4", "#222222", "#6B6B6B", "#B0B0B0"

WIDTH, DPI = 10.0, 120  # inches, and pixels per inch
BAR = 0.68  # of a row's height
TEXT = 10  # points: to be read in half the width, too


def figure_of(fit: Fit) -> Any:
    """Draws a fit, in total and over time."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: expected the package matplotlib, which is not installed. Install it: "
            "python -m pip install matplotlib",
            name=error.name,
        ) from error
    names, total = fit.names, fit.total
    counts_memory = any(total.peak_bytes)
    height = 4.2 + 0.26 * max(0, len(names) - 6)
    # A panel's texts keep away from the names of the next one.
    layout = ConstrainedLayoutEngine(wspace=0.06, rect=(0, 0, 0.99, 0.985))
    figure = Figure((WIDTH, height), DPI, facecolor="white", layout=layout)
    widths = [1.4, 1.25, 1.1] if counts_memory else [1.5, 1.3]
    grid = figure.add_gridspec(2, len(widths), width_ratios=widths, height_ratios=[3.2, 1])
    _shares(figure.add_subplot(grid[0, 0]), names, fit.periods)
    _waiting(figure.add_subplot(grid[1, 0]), fit.periods)
    _time(figure.add_subplot(grid[:, 1]), names, total)
    if counts_memory:
        _memory(figure.add_subplot(grid[:, 2]), fit.devices, total, fit.capacities)
    figure.suptitle(headline(fit), color=INK, fontsize=TEXT + 2, x=0.01, ha="left")
    if fit.note:
        note = "\n".join(textwrap.wrap(fit.note, 130))
        figure.supxlabel(note, color=FAINT, fontsize=TEXT, x=0.01, ha="left")
    # IPython shows it also where nobody has asked it for matplotlib.
    vars(figure)["_repr_png_"] = partial(as_png, figure)
    return figure


def as_png(figure: Any) -> bytes:
    """The figure's PNG."""
    content = BytesIO()
    save(figure, content, ".png")
    return content.getvalue()


def check_suffix(path: Path) -> str:
    """The suffix of a file, if a picture can be written into such a one."""
    suffix = path.suffix.lower()
    if suffix not in DATES:
        raise ValueError(
            f"plot: expected a file that ends in {', '.join(DATES)}, got {path.name!r}. Write for "
            f"example {path.stem or 'devices'}.png."
        )
    return suffix


def save(figure: Any, file: Path | BytesIO, suffix: str) -> None:
    """Writes a figure; the same one gives the same file at any time."""
    figure.savefig(file, format=suffix[1:], facecolor="white", metadata={DATES[suffix]: None})


def headline(fit: Fit) -> str:
    """What there is to say in one line."""
    devices, total = fit.devices, fit.total
    steps = f"{total.steps:,} training step" + "s" * (total.steps != 1)
    what = "devices" if len(set(devices)) == len(devices) else "replicas"
    parts = [
        f"{len(devices)} {what}, {steps}",
        f"busiest {total.imbalance(total.busy_seconds):.2f} times the mean",
    ]
    if any(total.peak_bytes):
        # Once per device, and only of those that count it.
        of_devices = dict(zip(devices, total.peak_bytes, strict=True)).values()
        peaks = [peak for peak in of_devices if peak]
        parts.append(f"fullest memory {total.imbalance(peaks):.2f} times the mean")
    return "   |   ".join(parts)


def _shares(axes: Any, names: Sequence[str], periods: Sequence[Period]) -> None:
    """Stacked bands, the root device's on top, and their names in the same order."""
    edges = _edges(periods)
    shares = [[period.shares[k] for period in (*periods, periods[-1])] for k in range(len(names))]
    # Over some steps: the very last may be of a smaller batch.
    latest = sum(periods[-max(1, len(periods) // 10) :], Period()).shares
    labels = [f"{name}  {share:.1%}" for name, share in zip(names, latest, strict=True)]
    bands = axes.stackplot(
        edges,
        shares[::-1],  # from the bottom up
        labels=labels[::-1],
        colors=_colors(len(names))[::-1],
        step="post",
        edgecolor="white",
        linewidth=0.8,
    )
    for band, hatch in zip(bands, _hatches(len(names))[::-1], strict=True):
        band.set_hatch(hatch)
    legend = axes.legend(
        reverse=True,
        title="latest",
        title_fontproperties={"size": TEXT},
        alignment="left",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        fontsize=TEXT,
        labelcolor=INK,
        handlelength=1,
    )
    legend.get_title().set_color(INK)
    _plain(axes, "Share of the samples", "")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    _over_steps(axes, edges, labels=False)


def _waiting(axes: Any, periods: Sequence[Period]) -> None:
    """How much of the devices' time goes by waiting."""
    edges = _edges(periods)
    shares = [period.waiting_share for period in periods]
    axes.fill_between(edges, [*shares, shares[-1]], step="post", color="#8C8C8C", linewidth=0)
    _plain(axes, "Part of the time spent waiting", "training step")
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    _over_steps(axes, edges, labels=True)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _time(axes: Any, names: Sequence[str], total: Period) -> None:
    """A bar per replica, busy and then waiting."""
    from matplotlib.ticker import EngFormatter

    busy = [seconds / total.steps for seconds in total.busy_seconds]
    waiting = [seconds / total.steps for seconds in total.waiting_seconds]
    both = list(map(operator.add, busy, waiting))
    texts = [f"{x / y if y else 0:.0%} busy" for x, y in zip(busy, both, strict=True)]
    _bars(axes, names, both, texts, color=WAITING)
    _bars(axes, names, busy, color=_colors(len(names)), hatch=_hatches(len(names)))
    _plain(axes, "Time per step (grey: waiting)", "")
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlim(0, max(both) * 1.3 or 1)


def _memory(axes: Any, devices: Sequence[str], total: Period, capacities: Sequence[int]) -> None:
    """A bar per device, as replicas on one device share its memory; framed by what it has."""
    first = [k for k, device in enumerate(devices) if device not in devices[:k]]
    names, colors, hatches = (
        [of_all[k] for k in first]
        for of_all in (devices, _colors(len(devices)), _hatches(len(devices)))
    )
    most, largest = max(total.peak_bytes), max(capacities)
    framed = most >= largest / 10  # else the bars could not be told apart
    scale, unit = memory_unit(most)
    peaks = [total.peak_bytes[k] * scale for k in first]
    frames = [capacities[k] * scale * framed for k in first]
    texts = [
        f"{peak:,.1f}{f' of {frame:,.1f}' if frame else ''} {unit}" if peak else "not counted"
        for peak, frame in zip(peaks, frames, strict=True)
    ]
    _bars(
        axes,
        names,
        list(map(max, peaks, frames)),
        texts,
        color="white",
        edgecolor=LINES,
        linewidth=0.8,
    )
    _bars(axes, names, peaks, color=colors, hatch=hatches)
    _plain(axes, "Peak memory", unit)
    end = max(most, largest * framed) * scale
    axes.set_xlim(0, end * (1.75 if framed and largest else 1.4))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end * 1.001])


def _bars(
    axes: Any, names: Sequence[str], lengths: Sequence[float], texts: Any = (), **style: Any
) -> None:
    """A bar for each name, the first on top, with a text at its end."""
    # No line around them: it would hide a small one.
    style = {"edgecolor": "white", "linewidth": 0} | style
    bars = axes.barh(range(len(names)), lengths, height=BAR, tick_label=names, **style)
    if texts:
        axes.bar_label(bars, texts, padding=4, fontsize=TEXT, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _over_steps(axes: Any, edges: Sequence[int], labels: bool) -> None:
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(labelbottom=labels)


def _edges(periods: Sequence[Period]) -> list[int]:
    """Where the periods begin, and where the last one ends."""
    return [0, *itertools.accumulate(period.steps for period in periods)]


def _colors(count: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(COLORS), count))


def _hatches(count: int) -> list[str]:
    """What tells those with the same colour apart."""
    return [HATCHES[k // len(COLORS) % len(HATCHES)] for k in range(count)]


def _plain(axes: Any, title: str, unit: str) -> None:
    """Set here and not by rcParams, which are the program's own."""
    axes.set_title(title, loc="left", fontsize=TEXT + 1, color=INK)
    axes.set_xlabel(unit, fontsize=TEXT, color=FAINT)
    axes.set_facecolor("white")
    axes.tick_params(labelsize=TEXT, colors=FAINT, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LINES)
