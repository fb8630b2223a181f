"""A contest as a table for people, and as values for a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arithmetic import Summary, efficiency, overhead, ratios, summary
from benchmarks.contest import Turns

ONE, SHARE, OURS = "one device", "one share", "dp_custom"
OTHER_LOSS = 1e-3
"""Relative difference from one device's loss after the warm-up that is told."""


def result(
    model: str, about: str, device: str, devices: int, samples: int, contest: Mapping[str, Turns]
) -> dict[str, Any]:
    """What is kept of a contest: all that was measured, and what follows."""
    return {
        "model": model,
        "about": about,
        "device": device,
        "devices": devices,
        "samples": samples,
        "contestants": {
            name: {**dataclasses.asdict(turns), **comparisons(name, contest, device, devices)}
            for name, turns in contest.items()
        },
    }


def comparisons(
    name: str, contest: Mapping[str, Turns], device: str, devices: int
) -> dict[str, Any]:
    """What follows from the times of a contestant and of those it is compared with."""
    own = contest[name]
    if own.failure:
        return {}
    found: dict[str, Any] = {"step": summary(own.seconds)}
    there = {key: turns.seconds for key, turns in contest.items() if not turns.failure}
    if ONE in there:
        found["to_one_device"] = ratios(own.seconds, there[ONE])
        if name != SHARE:
            separate = device != "cpu"
            found["efficiency"] = efficiency(there[ONE], own.seconds, devices, separate=separate)
    if OURS in there and name != SHARE:
        found["ours_to_it"] = ratios(there[OURS], own.seconds)
    if SHARE in there and name not in (ONE, SHARE):
        found["overhead"] = overhead(own.seconds, there[SHARE])
    return {key: value._asdict() for key, value in found.items()}


HEADER = (
    "",
    "ms per step",
    "to one device",
    "dp_custom to it",
    "overhead, ms",
    "memory, MiB",
    "loss",
)


def table(found: Mapping[str, Any]) -> list[str]:
    """The lines of a result for the terminal: medians, and ranges in brackets."""
    rows = [HEADER, *(_row(name, own) for name, own in found["contestants"].items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(r, widths, strict=True)) for r in rows]
    about = f"{found['model']} ({found['about']}), {found['devices']} x {found['device']}"
    remark = "memory of all processes: on the CPU nobody counts that of a replica"
    if found["device"] != "cpu":
        remark = "memory of the worst device"
    return [f"{about}, {found['samples']} samples; {remark}", *map(str.rstrip, lines)]


def _row(name: str, own: Mapping[str, Any]) -> tuple[str, ...]:
    if own["failure"]:
        return name, f"failed: {own['failure']}", *[""] * (len(HEADER) - 2)
    last = own["last"]
    size = max(last["device_bytes"], default=0) or last["process_bytes"]
    return (
        name,
        _text(own.get("step"), 1e3),
        _text(own.get("to_one_device")),
        _text(own.get("ours_to_it")),
        _text(own.get("overhead"), 1e3),
        f"{size / 2**20:.1f}",
        f"{own['loss']:.5g}",
    )


def _text(value: Mapping[str, float] | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    middle, low, high = (x * scale for x in Summary(**value))
    return f"{middle:.3g} [{low:.3g} to {high:.3g}]" if low < high else f"{middle:.4g}"


def other_losses(found: Mapping[str, Any]) -> list[str]:
    """Who has not trained the same as one device, so that its times say little."""
    contestants = found["contestants"]
    expected = contestants.get(ONE, {}).get("loss")
    if expected is None:
        return []
    return [
        f"{name}: a loss of {own['loss']:.6g} after the warm-up, one device has {expected:.6g}"
        for name, own in contestants.items()
        if name not in (ONE, SHARE)
        and own["loss"] is not None
        and abs(own["loss"] - expected) > OTHER_LOSS * abs(expected)
    ]


def stages(name: str, turns: Turns) -> list[str]:
    """The lines of a step's breakdown; what no stage is, is the Trainer's loop and callbacks."""
    if turns.failure or turns.last is None:
        return [f"{name}, by stage: failed: {turns.failure}"]
    parts = dict(turns.last.stages)
    parts["between them"] = turns.last.seconds - sum(parts.values())
    text = "  ".join(f"{part} {s * 1e3:.2f}" for part, s in parts.items())
    return [f"{name}, ms of a step of {turns.last.seconds * 1e3:.2f} by stage: {text}"]


def names_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Contestants of all results, in their order."""
    return list(dict.fromkeys(name for found in results for name in found["contestants"]))
