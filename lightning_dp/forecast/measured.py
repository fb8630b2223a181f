"""Measured: one machine's step, as the benchmark and the doctor have written it down."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, SHARE = "dp_custom", "one share"
_WAYS = ("threads", "inorder")
_FILES = "what tests/benchmarks/run.py --json, scaling.py --json or the doctor has written"


@dataclass(frozen=True)
class Measured:
    """One machine's step.

    Args:
        name: of what was trained.
        seconds: of a step on all its devices.
        devices: how many.
        kind: of them, such as `"cpu"`; "" where nobody says.
        share: seconds of one device alone with its share of the batch, if measured.
        size: bytes of the parameters, if known.
        samples: in the batch, if known.
    """

    name: str
    seconds: float
    devices: int
    kind: str = ""
    share: float | None = None
    size: float | None = None
    samples: int | None = None


def read(
    content: Mapping[str, Any], model: str | None = None, devices: int | None = None
) -> Measured:
    """The step in a file of the benchmark or the doctor.

    Args:
        content: of the file.
        model: which one, if there are several.
        devices: how many, if there are several numbers.

    Raises:
        ValueError: there is none, or more than one.
    """
    if "results" in content:
        found = [one for result in content["results"] for one in _of_benchmark(result)]
    elif "timings" in content:
        found = [one for timing in content["timings"] for one in _of_doctor(timing, content)]
    else:
        raise ValueError(f"expected {_FILES}, got keys {sorted(content)[:6]}")
    return _only(found, model, devices)


def _only(found: Sequence[Measured], model: str | None, devices: int | None) -> Measured:
    chosen = [one for one in found if model in (None, one.name) and devices in (None, one.devices)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(f"{one.name!r} on {one.devices} devices" for one in found) or "none"
    asked = " on ".join([model or "any model", f"{devices or 'any number of'} devices"])
    raise ValueError(
        f"expected one step of {OURS}, {len(chosen)} are of {asked}. There are: {there}. "
        "Say which by --model and --devices."
    )


def _of_benchmark(result: Mapping[str, Any]) -> list[Measured]:
    own = result["contestants"]
    seconds = _median(own.get(OURS, {}))
    if seconds is None:
        return []
    share = result.get("share") or _median(own.get(SHARE, {}))
    return [
        Measured(
            result["model"],
            seconds,
            result["devices"],
            result.get("device", ""),
            share,
            own[OURS].get("parameter_bytes"),
            result.get("samples"),
        )
    ]


def _median(contestant: Mapping[str, Any]) -> float | None:
    """Seconds of a step; None for one who has failed."""
    seconds = contestant.get("seconds")
    if not seconds or contestant.get("failure"):
        return None
    return statistics.median(seconds) if isinstance(seconds, list) else float(seconds)


def _of_doctor(timing: Mapping[str, Any], content: Mapping[str, Any]) -> list[Measured]:
    times = [timing["seconds"][way] for way in _WAYS if way in timing["seconds"]]
    devices = content["devices"]
    if not times:
        return []
    kind = devices[0].partition(":")[0]
    return [
        Measured(timing["workload"], min(times), len(devices), kind, samples=timing.get("samples"))
    ]
