"""What the programs share: a table for terminals, and a parser that refuses in one line."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from typing import NoReturn

MOST_ROWS = 60


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Prints rows under headings, with rich where it is installed.

    Args:
        headings: one per column.
        rows: one text per column; of more than `MOST_ROWS` the first ones are shown.
        right: the headings of columns that are aligned to the right, as numbers are.
    """
    shown = rows[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        align = [str.rjust if heading in right else str.ljust for heading in headings]
        for row in (headings, ["-" * width for width in widths], *shown):
            cells = zip(align, row, widths, strict=True)
            print("  ".join(to_width(cell, width) for to_width, cell, width in cells).rstrip())
    else:
        table = Table()
        for heading in headings:
            table.add_column(heading, justify="right" if heading in right else "left")
        for row in shown:
            table.add_row(*row)
        # Into a file or pipe rows are not broken.
        frame = 3 * len(headings) + 1
        width = None if Console().is_terminal else sum(widths) + frame
        Console(width=width, markup=False, highlight=False).print(table)
    if len(rows) > len(shown):
        print(f"... and {len(rows) - len(shown)} more")


class OneLineParser(ArgumentParser):
    """Ends the program with one line on stderr, and exit code 2, if an option cannot be used."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the list of all options."""
        self.exit(2, f"error: {message.rstrip('.')}. --help lists all options.\n")
