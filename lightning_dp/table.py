"""What the programs share: a table of text, and a parser that refuses in one line."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

MOST_ROWS = 60


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows under headings, one text per column.

    Args:
        headings: one per column.
        rows: of more than `MOST_ROWS` the first ones are shown.
        left: how many columns are aligned to the left; the others are numbers.
    """
    lines = [headings, *rows[:MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    texts = [
        "  ".join(to(cell, width) for to, cell, width in zip(align, line, widths, strict=True))
        for line in lines
    ]
    more = len(rows) - MOST_ROWS
    return "\n".join([*map(str.rstrip, texts), *([f"... and {more} more"] if more > 0 else [])])


class OneLineParser(ArgumentParser):
    """Ends the program with one line on stderr, and exit code 2, if an option cannot be used."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the list of all options."""
        self.exit(2, f"error: {message.rstrip('.')}. --help lists all options.\n")
