"""A table on the terminal: with rich where it is installed, plain otherwise."""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROWS = 60


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under headings; of very many the first ones, and how many there are more."""
    shown = rows[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (headings, ["-" * width for width in widths], *shown):
            print("  ".join(map(str.ljust, row, widths)).rstrip())
    else:
        table = Table(*headings)
        for row in shown:
            table.add_row(*row)
        # Into a file or pipe rows are not broken.
        frame = 3 * len(headings) + 1
        width = None if Console().is_terminal else sum(widths) + frame
        Console(width=width, markup=False, highlight=False).print(table)
    if len(rows) > len(shown):
        print(f"... and {len(rows) - len(shown)} more")
