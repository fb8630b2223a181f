"""The figure: efficiency against the number of devices, ours and the peers, model by model.

    python tests/benchmarks/figure.py RESULTS.json FIGURE.svg

Drawn without pyplot: nothing of matplotlib's global state is touched and no window is opened.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import ONE, OURS, SHARE, names_of

# Okabe and Ito's colours, told apart by colour-blind people too; ours has the strongest.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
MARKERS = "osD^vPX"
INK, FAINT, LINES = "#222222", "#6B6B6B", "#B0B0B0"
COLUMNS, WIDTH, HEIGHT, DPI = 4, 2.7, 2.3, 110


def curves(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[Any, ...]]]]:
    """By model and contestant the points: devices, and the efficiency's median, low and high."""
    found: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
    for one in sorted(results, key=lambda result: result["devices"]):
        for name, own in one["contestants"].items():
            value = own.get("efficiency")
            if value and name not in (ONE, SHARE):
                point = one["devices"], value["median"], value["low"], value["high"]
                found.setdefault(one["model"], {}).setdefault(name, []).append(point)
    return found


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws results into a PNG or SVG file in a folder that may be new."""
    from matplotlib.figure import Figure

    models = curves(results)
    if not models:
        raise ValueError("Expected results of several devices beside one device, got none.")
    names = [n for n in names_of(results) if any(n in own for own in models.values())]
    names.sort(key=lambda name: name != OURS)
    columns = min(COLUMNS, len(models))
    rows = -(-len(models) // columns)
    size = (WIDTH * columns + 0.4, HEIGHT * rows + 0.6)
    figure = Figure(size, DPI, facecolor="white", layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axes, (model, lines) in zip(grid.flat, models.items(), strict=False):
        _plot(axes, model, lines, names)
    for axes in list(grid.flat)[len(models) :]:
        axes.set_axis_off()
    separate = any(result["device"] != "cpu" for result in results)
    figure.supylabel(
        "speed-up / devices" if separate else "speed against one device, same cores",
        fontsize=9,
        color=INK,
    )
    figure.supxlabel("devices", fontsize=9, color=INK)
    handles = [_line(names, name) for name in names]
    figure.legend(handles=handles, loc="outside upper left", ncols=6, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    nothing: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, facecolor="white", metadata=nothing)


def _style(names: Sequence[str], name: str) -> dict[str, Any]:
    i = names.index(name)
    style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
    return {**style, "linewidth": 2.0 if name == OURS else 1.2, "markersize": 4}


def _line(names: Sequence[str], name: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **_style(names, name))


def _plot(
    axes: Any, model: str, lines: Mapping[str, Sequence[tuple[Any, ...]]], names: Sequence[str]
) -> None:
    axes.axhline(1, color=LINES, linewidth=0.8, zorder=0)
    counts = sorted({point[0] for points in lines.values() for point in points})
    for name, points in lines.items():
        x, middle, low, high = zip(*points, strict=True)
        below = [m - a for m, a in zip(middle, low, strict=True)]
        above = [b - m for m, b in zip(middle, high, strict=True)]
        bars = [below, above]
        axes.errorbar(x, middle, bars, **_style(names, name), elinewidth=0.8, capsize=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(model.replace("_", " "), loc="left", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draws a file's results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what run.py --json has written")
    parser.add_argument("figure", type=Path, help="a .png or .svg file")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text(encoding="utf-8"))["results"], options.figure)


if __name__ == "__main__":
    main()
