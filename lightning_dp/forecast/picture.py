"""The forecast's picture: efficiency against machines, and what a step is made of.

Drawn without pyplot: nothing of matplotlib's global state is touched and no window is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dp.forecast.better import Row

# Okabe and Ito's colours, told apart by colour-blind people too.
COLORS = {
    "compute": "#0072B2",
    "python": "#F0E442",
    "local": "#56B4E9",
    "network": "#E69F00",
    "exchange": "#CC79A7",
    "waiting": "#5A5A5A",
}
LABELS = {
    "compute": "computing",
    "python": "what devices take from each other",
    "local": "links within a machine",
    "network": "sums between machines",
    "exchange": "messages after the forward",
    "waiting": "waiting for the slowest",
}
CURVES = {"lightning_dp": "#0072B2", "DDP": "#E69F00", "FSDP": "#009E73", "wider": "#CC79A7"}
INK, FAINT, LINES = "#222222", "#6B6B6B", "#B0B0B0"
SIZE, DPI, TEXT = (10.0, 3.6), 110, 9


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws a forecast into a PNG or SVG file, by its suffix, in a folder that may be new."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--plot: expected the package matplotlib, which is not installed. Install it: "
            "python -m pip install matplotlib",
            name=error.name,
        ) from error
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot: expected a file named .png or .svg, got {str(path)!r}.")
    figure = Figure(SIZE, DPI, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows)
    _parts(right, rows)
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    nothing: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, facecolor="white", metadata=nothing)


def _curves(axes: Any, rows: Sequence[Row]) -> None:
    """Efficiency: all are compared with one of our machines."""
    for name, color in CURVES.items():
        points = [(row.machines, _efficiency(row, name)) for row in rows]
        known = [(x, y) for x, y in points if y is not None]
        if not known:
            continue
        label = "ours, twice as many devices each" if name == "wider" else name
        width = 2.2 if name == "lightning_dp" else 1.3
        axes.plot(*zip(*known, strict=True), color=color, label=label, linewidth=width, marker=".")
    axes.axhline(1, color=LINES, linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    _plain(axes, "Efficiency, against one machine of ours", rows)


def _efficiency(row: Row, name: str) -> float | None:
    step = {"DDP": row.ddp, "FSDP": row.fsdp, "wider": row.wider}.get(name, row.step)
    return None if step is None else row.efficiency * row.step.seconds / step.seconds


def _parts(axes: Any, rows: Sequence[Row]) -> None:
    """A step's parts as parts of the whole."""
    x = [row.machines for row in rows]
    shares = {name: [vars(row.step)[name] / row.step.seconds for row in rows] for name in COLORS}
    there = [name for name, values in shares.items() if max(values) > 0]
    axes.stackplot(
        x,
        [shares[name] for name in there],
        colors=[COLORS[name] for name in there],
        labels=[LABELS[name] for name in there],
        edgecolor="white",
        linewidth=0.6,
    )
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        reverse=True,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    _plain(axes, "What a step is made of", rows)


def _plain(axes: Any, title: str, rows: Sequence[Row]) -> None:
    counts = [row.machines for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts[::2], [f"{count:,}" for count in counts[::2]])
    axes.minorticks_off()
    axes.set_xlim(counts[0], max(counts[-1], counts[0] + 1))
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("machines", fontsize=TEXT, color=FAINT)
    axes.tick_params(labelsize=8, colors=FAINT, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LINES)
