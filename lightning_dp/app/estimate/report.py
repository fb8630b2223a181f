"""What ``python -m lightning_dp estimate`` prints: tables, where the imbalance comes from."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_dp.app.estimate.bench import PARTS, STEPS, Run, Use
from lightning_dp.app.estimate.search import Largest, Split
from lightning_dp.forecast import shown_bytes

WIDTH = 96
ALIKE = 0.02
"""Relative difference below which devices are equally full."""

WORTH = 0.05
"""Share of a difference from which a part of it is told."""

COLUMNS = (*PARTS, "other", "peak")
WHY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's state, which is where the optimizer is: on the root",
    "activations": "activations",
    "other": "what comes from the other devices and what is on its way (gradients in buckets, "
    "gathered outputs), and what a step needs for a moment",
}
LEGEND = (
    "gradients: as many as are there at the peak. activations: what the forward keeps for the "
    "backward. other: the batch, buckets of gradients and weights on their way, gathered outputs, "
    "what an operation needs for a moment."
)


def report(name: str, n: int, splits: Sequence[Split], limit: int | None) -> list[str]:
    """All lines."""
    first = splits[0].run
    head = f"{name}: {n:,} samples, {len(first.uses)} devices, split even, {STEPS} steps taken"
    lines = [head, "", *_table(_of_devices(first)), *textwrap.wrap(LEGEND, WIDTH), ""]
    lines += [*_table(_of_splits(splits, limit)), ""]
    lines += [_point(_cause(split)) for split in splits]
    return [*lines, *textwrap.wrap(_closing(n, splits, limit), WIDTH)]


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in cells]


def _of_devices(run: Run) -> list[list[str]]:
    rows = [["device", "samples", *COLUMNS]]
    for use in run.uses:
        sizes = [shown_bytes(getattr(use, column)) for column in COLUMNS]
        rows.append([use.device, f"{use.samples:,}", *sizes])
    return rows


def _of_splits(splits: Sequence[Split], limit: int | None) -> list[list[str]]:
    rows = [["split", "fullest", "peak"]]
    rows += [[s.name, s.run.fullest.device, shown_bytes(s.run.fullest.peak)] for s in splits]
    if limit is None:
        return rows
    columns = [[f"largest batch in {shown_bytes(limit)}", "shares of it"]]
    columns += [[_shown(split.largest), _shares(split.largest)] for split in splits]
    return [[*row, *more] for row, more in zip(rows, columns, strict=True)]


def _shown(found: Largest | None) -> str:
    if found is None:
        return "-"
    return f"{'' if found.is_proven else 'about '}{found.samples:,}"


def _shares(found: Largest | None) -> str:
    """The samples of the devices, as far as they fit on the line."""
    if found is None or found.run is None:
        return "-"
    text = " ".join(map(str, found.run.sizes))
    return text if len(text) <= 36 else f"{min(found.run.sizes)} to {max(found.run.sizes)}"


def _cause(split: Split) -> str:
    """Why the fullest device is fuller than the emptiest one that works, part by part."""
    most = split.run.fullest
    least = min((u for u in split.run.uses if u.samples), key=lambda use: use.peak)
    more = most.peak - least.peak
    if more <= ALIKE * most.peak:
        return f"split {split.name}: all devices that work hold about as much."
    parts = [_part(name, most, least) for name in WHY if _differs(name, most, least, more)]
    return (
        f"split {split.name}: {most.device} holds {shown_bytes(more)} more than {least.device}: "
        f"{'; '.join(parts)}."
    )


def _differs(name: str, most: Use, least: Use, more: int) -> bool:
    return bool(abs(getattr(most, name) - getattr(least, name)) >= WORTH * more)


def _part(name: str, most: Use, least: Use) -> str:
    more = getattr(most, name) - getattr(least, name)
    why = WHY[name]
    if name == "activations" and most.samples != least.samples:
        why += f", of {most.samples:,} samples and not {least.samples:,}"
    return f"{'+' if more > 0 else '-'} {shown_bytes(abs(more))} for {why}"


def _closing(n: int, splits: Sequence[Split], limit: int | None) -> str:
    best = min(splits, key=lambda split: split.run.fullest.peak)
    if limit is None:
        fullest = best.run.fullest
        return (
            f"A step of {n:,} samples takes {shown_bytes(fullest.peak)} on its fullest device at "
            f"best, with split={best.name}; --memory SIZE says the largest batch."
        )
    found = [(s, s.largest) for s in splits if s.largest is not None]
    split, most = max(found, key=lambda pair: pair[1].samples)
    how = "it has run, and one sample more has not"
    if not most.is_proven:
        how = "computed from smaller batches, as this machine cannot try it"
    return (
        f"The largest batch in {shown_bytes(limit)} on each of {len(split.run.uses)} devices is "
        f"{_shown(most)} samples, with split={split.name}: {how}."
    )


def _point(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")
