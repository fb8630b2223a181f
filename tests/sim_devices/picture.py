"""The timeline's picture: streams, copies and waits of the host as rows, in one PNG.

Drawn without pyplot: nothing of matplotlib's global state is touched and no window is opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim_devices.timeline import Row, Span, Timeline

# Okabe and Ito's colours, told apart by colour-blind people too.
COLORS = {"compute": "#0072B2", "copy": "#E69F00", "wait": "#CC79A7"}
LABELS = {"compute": "compute", "copy": "copies", "wait": "the host waits"}
IDLE, INK, FAINT, LINES = "#EDEDED", "#222222", "#6B6B6B", "#B0B0B0"
WIDTH, ROW, DPI = 11.0, 0.3, 110  # inches, inches, and pixels per inch
BAR = 0.72  # of a row's height


def draw(path: Path, timeline: Timeline) -> None:
    """Draws a timeline into a PNG file in a folder that may be new."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw_timeline: expected the package matplotlib, which is not installed. Install it: "
            "python -m pip install matplotlib",
            name=error.name,
        ) from error
    rows, seconds = timeline.rows, timeline.schedule.elapsed / 1e9
    figure = Figure((WIDTH, 1.4 + ROW * len(rows)), DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, rows, timeline.spans, seconds)
    _lines_between_places(axes, rows)
    _labels(axes, rows, seconds)
    _legend(figure, {span.kind for span in timeline.spans})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})


def _bars(axes: Any, rows: Sequence[Row], spans: Sequence[Span], seconds: float) -> None:
    """Each row's spans on the grey of idle time, and how much of it they take."""
    for y, row in enumerate(rows):
        own = [span for span in spans if span.row == row]
        edges = y - BAR / 2, BAR
        axes.broken_barh([(0, seconds)], edges, facecolors=IDLE, linewidth=0)
        bars = [(span.start / 1e9, (span.end - span.start) / 1e9) for span in own]
        colors = [COLORS[span.kind] for span in own]
        # A thin white line tells neighbours apart, where there is room for it.
        line = 0.4 if len(own) < 200 else 0.0
        axes.broken_barh(bars, edges, facecolors=colors, edgecolor="white", linewidth=line)
        share = sum(length for _, length in bars) / seconds
        text = f"{share:.0%}" + (" busy" if row.place != "host" else " waiting")
        axes.text(seconds * 1.01, y, text, va="center", fontsize=8, color=FAINT)


def _lines_between_places(axes: Any, rows: Sequence[Row]) -> None:
    for y, (row, following) in enumerate(itertools.pairwise(rows)):
        if row.place != following.place:
            axes.axhline(y + 0.5, color=LINES, linewidth=0.8)


def _labels(axes: Any, rows: Sequence[Row], seconds: float) -> None:
    from matplotlib.ticker import EngFormatter

    names = [f"{row.place}  {row.name}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, seconds or 1)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_title(
        f"Virtual time: {EngFormatter('s', places=3)(seconds)}", loc="left", fontsize=11, color=INK
    )
    axes.tick_params(labelsize=8, colors=FAINT, labelcolor=INK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINES)


def _legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    shown = [Patch(color=COLORS[kind], label=LABELS[kind]) for kind in COLORS if kind in kinds]
    figure.legend(
        handles=[*shown, Patch(color=IDLE, label="idle")],
        loc="outside lower left",
        ncols=4,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
