"""What fits a terminal: a table, with rich where it is installed, and a program's help."""

from __future__ import annotations

import re
import textwrap
from argparse import Action, ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

MOST_ROWS = 60


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Prints rows under headings; of very many the first ones, and how many there are more.

    Args:
        headings: one per column.
        rows: one text per column.
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


SCREEN = (24, 80)
"""Lines and columns of the smallest terminal that is thought of."""


class ScreenParser(OneLineParser):
    """Its `--help` fits a screen; where the whole does not, `--help-all` prints that."""

    def __init__(self, program: str, **options: Any) -> None:
        def of_screen(prog: str) -> HelpFormatter:
            return RawDescriptionHelpFormatter(prog, width=SCREEN[1])

        super().__init__(program, formatter_class=of_screen, **options)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="explain every option")

    def format_help(self) -> str:
        """What `--help` prints."""
        whole = super().format_help()
        if whole.count("\n") <= SCREEN[0]:
            return whole
        names = re.findall(r"^  (?:-\w[^-\n]*)?(--[\w-]+)", whole, re.MULTILINE)
        options = textwrap.wrap(" ".join(names), SCREEN[1] - 2, break_on_hyphens=False)
        usage = " ".join(whole.partition("\n\n")[0].split())
        takes = re.search(r"(?<=\]) (\[[^][]*\.\.\.\]|[A-Z]+(?: [A-Z]+)*)$", usage)
        return "\n".join(
            [
                f"usage: {self.prog} [options]{takes[0] if takes else ''}",
                "",
                (self.description or "").strip(),
                "",
                "options (--help-all explains them):",
                *(f"  {line}" for line in options),
                "",
            ]
        )

    def format_all(self) -> str:
        """What `--help-all` prints."""
        return super().format_help()


class _HelpAll(Action):
    """Prints everything and ends the program."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        print(parser.format_all() if isinstance(parser, ScreenParser) else parser.format_help())
        parser.exit()
