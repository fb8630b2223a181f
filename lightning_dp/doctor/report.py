"""The report: a table on the terminal, and a file to attach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dp.doctor.advice import DDP, NO_TIME, WAYS, Timing
from lightning_dp.doctor.law import Result
from lightning_dp.table import print_table

GIB = 2**30
WIDTH = 60  # of a remark in the table; the file has all of it
_MARKS = {"pass": "pass", "fail": "FAIL", "skip": "skipped"}


@dataclass
class Report:
    """What the doctor has found; parts that it has not come to are empty."""

    devices: Sequence[str]
    environment: Mapping[str, Any] = field(default_factory=dict)
    proof: Sequence[Result] = ()
    timings: Sequence[Timing] = ()
    advice: Sequence[str] = ()
    seconds: float = 0.0
    unfinished: str = ""  # what it was at when it was given up

    @property
    def failed(self) -> list[Result]:
        """The laws that do not hold."""
        return [result for result in self.proof if result.verdict == "fail"]

    @property
    def is_healthy(self) -> bool:
        """Whether every law holds that could be looked at."""
        return not self.failed and not self.unfinished

    @property
    def culprits(self) -> list[str]:
        """The devices, links and waits that were named, each once."""
        named = (culprit for result in self.failed for culprit in result.culprits)
        return list(dict.fromkeys(named))

    def write(self, path: Path) -> None:
        """Writes the file."""
        content = {
            "verdict": "pass" if self.is_healthy else "fail",
            "culprits": self.culprits,
            "devices": list(self.devices),
            "seconds": round(self.seconds, 1),
            "unfinished": self.unfinished,
            "environment": self.environment,
            "proof": [result.as_json() for result in self.proof],
            "timings": [timing.as_json() for timing in self.timings],
            "advice": list(self.advice),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def show_environment(environment: Mapping[str, Any]) -> None:
    """Prints what the machine has."""
    for name, text in _facts(environment):
        print(f"  {name:<12}{text}")
    links = environment["links"]
    if links:
        print("\nLinks, GB/s (from the row to the column; * without peer access)")
        _show_links(links)


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, cuda = found["machine"], found["cuda"]
    memory = machine["memory_bytes"]
    versions = [f"{name} {version}" for name, version in found["versions"].items()]
    missing = found["compilers"]["missing_for_sim"]
    takes = found["dp_custom_takes"]
    if not isinstance(takes, str):
        takes = f"Trainer(strategy='dp_custom') takes {', '.join(takes)}"
    facts = [
        ("versions", ", ".join(versions)),
        ("system", machine["system"]),
        (
            "host",
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
            + f", load {machine['load']:.1f}"
            + (f", {memory / GIB:.0f} GiB" if memory else ""),
        ),
        *((entry["device"], _of_device(entry)) for entry in found["devices"]),
        ("GIL", "yes" if found["gil"] else "no (free-threaded Python)"),
        ("CUDA", "none" if cuda is None else ", ".join(f"{k} {v}" for k, v in cuda.items())),
        ("NCCL", found["nccl"] or "none"),
        (
            "compiler",
            f"{found['compilers']['c++'] or 'none'}; simulated devices "
            + (f"lack {' and '.join(missing)}" if missing else "can be built"),
        ),
        ("dp_custom", takes),
    ]
    if found["variables"]:
        facts.append(("variables", ", ".join(f"{k}={v}" for k, v in found["variables"].items())))
    return facts


def _of_device(entry: Mapping[str, Any]) -> str:
    parts = [entry["name"]]
    if entry["memory_bytes"] and entry["device"] != "cpu":
        parts.append(f"{entry['memory_bytes'] / GIB:.1f} GiB")
    if entry["free_bytes"] is not None:
        parts.append(f"{entry['free_bytes'] / GIB:.1f} free")
    if entry["compute_capability"] is not None:
        parts.append(f"compute capability {entry['compute_capability']}")
    return ", ".join(parts)


def _show_links(links: Sequence[Mapping[str, Any]]) -> None:
    ends = list(dict.fromkeys(link["source"] for link in links))
    speeds = {(link["source"], link["target"]): link for link in links}
    rows = []
    for source in ends:
        row = [source]
        for target in ends:
            link = speeds.get((source, target))
            mark = "*" if link and link["peer_access"] is False else ""
            row.append(f"{link['bytes_per_second'] / 1e9:.2g}{mark}" if link else "")
        rows.append(row)
    print_table(["", *ends], rows)


def show_proof(results: Sequence[Result]) -> None:
    """Prints a row for each law."""
    rows = [
        [
            result.law,
            _MARKS[result.verdict],
            "" if result.difference is None else f"{result.difference:.1e}",
            "" if result.allowed is None else f"{result.allowed:.0e}" if result.allowed else "0",
            f"{result.seconds:.1f}",
            _remark(result),
        ]
        for result in results
    ]
    print_table(["law", "result", "difference", "allowed", "s", "remark"], rows)


def _remark(result: Result) -> str:
    named = ", ".join(result.culprits)
    first = result.remark.strip().partition("\n")[0]
    return ": ".join(part for part in (named, first[:WIDTH]) if part)


def show_timings(found: Sequence[Timing]) -> None:
    """Prints a row for each workload: milliseconds per step."""
    ways = [way for way in WAYS if any(way in timing.seconds for timing in found)]
    rows = [
        [
            timing.workload,
            "" if timing.samples is None else str(timing.samples),
            *(f"{1e3 * timing.seconds[way]:.1f}" if way in timing.seconds else "" for way in ways),
        ]
        for timing in found
    ]
    names = {"threads": "dp_custom, threads", "inorder": "dp_custom, in order"}
    if ways:
        print_table(["ms per step", "batch", *(names.get(way, way) for way in ways)], rows)
    for reason in dict.fromkeys(timing.why_not.get(DDP, "") for timing in found):
        if reason not in ("", NO_TIME):
            print(f"No DDP: {reason}.")
    left_out = [
        timing.workload if way == "all" else f"{timing.workload} with {names.get(way, way)}"
        for timing in found
        for way, reason in timing.why_not.items()
        if reason == NO_TIME
    ]
    if left_out:
        print(f"Not timed, as {NO_TIME}: {'; '.join(left_out)}.")


def show_verdict(report: Report, path: Path) -> None:
    """Prints what it comes to."""
    counts = {v: sum(r.verdict == v for r in report.proof) for v in ("pass", "fail", "skip")}
    counted = f"{len(report.proof)} laws: {counts['pass']} hold, {counts['fail']} do not"
    verdict = "Healthy" if report.is_healthy else "NOT HEALTHY"
    print(f"{verdict}: {counted}, {counts['skip']} skipped; {report.seconds:.0f} s.")
    for result in report.failed:
        if len(result.remark) > WIDTH:
            print(f"{result.law}: {result.remark}")
    if report.culprits:
        print(f"Culprits: {', '.join(report.culprits)}.")
    if report.failed and not report.culprits:
        print("No single device, link or wait was found to be the cause.")
    print(f"The report to attach: {path}")
