"""What the programs share: a table of text, and a parser that refuses in one line."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of texts under headings; the first `left` columns are aligned to the left."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    texts = [
        "  ".join(to(cell, width) for to, cell, width in zip(align, line, widths, strict=True))
        for line in lines
    ]
    return "\n".join(map(str.rstrip, texts))


class OneLineParser(ArgumentParser):
    """Ends the program with one line on stderr, and exit code 2, if an option cannot be used."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the list of all options."""
        self.exit(2, f"error: {message.rstrip('.')}. --help lists all options.\n")
