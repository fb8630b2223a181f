"""The monitor's table: plain text for terminals, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_dp.monitor.history import DeviceSummary, Fit

LEFT, RIGHT = "text-align: left", "text-align: right"


def memory_text(size: int, of: int | None = None) -> str:
    """So many bytes for people, in the unit of a size like `of`."""
    scale, unit = memory_unit(of or size)
    return f"{size * scale:,.1f} {unit}"


def memory_unit(size: int) -> tuple[float, str]:
    """How many of a unit a byte is, and its name, for sizes of about so many bytes."""
    if size >= 2**30:
        return 1 / 2**30, "GiB"
    return (1 / 2**20, "MiB") if size >= 2**20 else (1 / 2**10, "KiB")


def cells(rows: Sequence[DeviceSummary]) -> list[list[str]]:
    """A line of headings, and one for each replica; no memory where no device counts it."""
    found = {
        "device": [row.device for row in rows],
        "samples": [f"{row.samples:,}" for row in rows],
        "share": [f"{row.share:.1%}" for row in rows],
        "busy": [f"{row.busy_seconds:.2f} s" for row in rows],
        "waiting": [f"{row.waiting_seconds:.2f} s" for row in rows],
        "of the time busy": [f"{row.busy_share:.0%}" for row in rows],
        "peak memory": [memory_text(row.peak_bytes) if row.peak_bytes else "" for row in rows],
    }
    if not any(found["peak memory"]):
        del found["peak memory"]
    return [list(found), *map(list, zip(*found.values(), strict=True))]


def as_text(fit: Fit) -> str:
    """The table in plain text, names on the left, numbers on the right."""
    lines = cells(fit.rows())
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()
        for name, *numbers in lines
    ]
    return "\n".join([*table, *([fit.note] if fit.note else [])])


def as_html(fit: Fit, picture: str) -> str:
    """The picture, which is HTML already, and the table under it."""
    headings, *rows = cells(fit.rows())
    body = "".join(f"<tr>{_row('td', row)}</tr>" for row in rows)
    note = f"<p>{escape(fit.note)}</p>" if fit.note else ""
    table = f"<table><thead><tr>{_row('th', headings)}</tr></thead><tbody>{body}</tbody></table>"
    return f"{picture}{table}{note}"


def _row(tag: str, texts: Sequence[str]) -> str:
    styles = [LEFT, *[RIGHT] * (len(texts) - 1)]
    return "".join(
        f'<{tag} style="{style}">{escape(text)}</{tag}>'
        for style, text in zip(styles, texts, strict=True)
    )
