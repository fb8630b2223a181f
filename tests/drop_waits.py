"""Prints for each wait of the engine which test on strict devices notices that it is gone.

    python tests/drop_waits.py
    python tests/drop_waits.py --sites transfer.py loss.py -- tests/links/test_waits.py -k sim

A wait that can be dropped without a test that fails is either not tested, or not needed. Waits are
those of `wait_sites.py`. The tests run once as they are, and say which waits they come to; then,
for each wait, those that come to it run again without it until one fails. They do so with the
caller on default streams, and if none fails, on side streams. What comes after `--` goes to pytest.

Exits 1 if less than 95 % of the waits are noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from wait_sites import Site, Sites

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/links/test_waits.py",
    "tests/links/test_side_streams.py",
    "tests/links/test_lanes.py",
    "tests/links/test_parameters_that_arrive_late.py",
    "tests/gradients/test_overlap.py",
    "tests/links/test_copies_ahead.py",
    "tests/links/test_values_on_the_host.py",
    "tests/links/test_spans.py",
    "tests/batches/test_gather.py",
    "tests/workers/test_sync_batch_norm.py",
    "tests/first_step/test_first_step.py",
    "tests/programs/test_monitor.py",
    "tests/faults/test_out_of_memory.py",
)
CHOICE = "sim or waits or streams or values or spans or lanes or still"  # on simulated devices
SHARE = 0.95
HANGS_AFTER = 60  # seconds
KEPT = {
    "lightning_dp/first_step/snapshot.py: memory.to('cpu', copy=True)": (
        "whoever reads the values waits, but a copy that does not block takes pinned memory, and "
        "as much as the weights are is dear"
    ),
}
"""Waits that order nothing, and why they are there."""
LEFT_OUT = ("lightning_dp/sim/", "lightning_dp/app/", "lightning_dp/doctor/")
ROOM = "lightning_dp/parallel/links"


class Dropper:
    """The plugin that runs the tests, in a process of its own."""

    def __init__(self, sites: Sites, wanted: Sequence[str], known: Sequence[str]) -> None:
        self._sites, self._wanted, self._known = sites, wanted, set(known)
        self._seconds: dict[str, float] = {}
        self._reach: dict[Site, list[Any]] = {}
        self.result: dict[str, Any] = {"sites": {}, "failed": [], "broken": None}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._run_as_it_is(item)
        reach = {f"{site} {site.text}": len(items) for site, items in self._reach.items()}
        self.result["reach"] = reach
        for site in sorted(self._reach):
            name = f"{site} {site.text}"
            is_wanted = not self._wanted or any(part in str(site) for part in self._wanted)
            if is_wanted and name not in self._known:
                self.result["sites"][name] = self._noticed(site)
            if self.result["broken"]:
                break
        return True

    def _run_as_it_is(self, item: Any) -> None:
        self._sites.reached.clear()
        began = time.perf_counter()
        error = failure(item)
        self._seconds[item.nodeid] = time.perf_counter() - began
        if error is not None:
            self.result["failed"].append(f"{item.nodeid}: {error}")
            return
        for site in self._sites.reached:
            self._reach.setdefault(site, []).append(item)

    def _noticed(self, site: Site) -> dict[str, Any]:
        """By which test, and with what error; or by none of how many."""
        items = sorted(self._reach[site], key=lambda item: self._seconds[item.nodeid])
        for item in items:
            error = self._failure_without(site, item)
            if error is None:
                continue
            if failure(item) is not None:  # what was left behind would fail the next ones, too
                self.result["broken"] = f"{site} {site.text}"
                return {"test": item.nodeid, "error": error}
            if self._failure_without(site, item) is not None:  # not by chance
                return {"test": item.nodeid, "error": error}
        return {"test": None, "tried": len(items)}

    def _failure_without(self, site: Site, item: Any) -> str | None:
        self._sites.dropped = site
        try:
            return failure(item)
        finally:
            self._sites.dropped = None


def failure(item: Any) -> str | None:
    """Runs a test; the last line of its error, or None."""
    item._initrequest()
    with time_limit():
        reports = runtestprotocol(item, log=False, nextitem=None)
    settle()
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            return str(crash.message if crash else report.longrepr).split("\n")[0][:200]
    return None


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not through after {HANGS_AFTER} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS_AFTER)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def settle() -> None:
    """Nothing is under way when the next test begins."""
    import torch

    module = getattr(torch, "sim", None)
    for k in range(module.device_count() if module else 0):
        with suppress(RuntimeError):
            module.synchronize(k)


def work(task: dict[str, Any]) -> None:
    """In a process of its own."""
    sites = Sites(ROOT, "lightning_dp", ROOM, LEFT_OUT)
    sites.install()
    dropper = Dropper(sites, task["wanted"], task["known"])
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *task["options"]]
    dropper.result["status"] = int(pytest.main(options, plugins=[dropper]))
    found = [site for site in sites.all if site.is_sure and site not in sites.others]
    dropper.result["found"] = [f"{site} {site.text}" for site in found]
    Path(task["file"]).write_text(json.dumps(dropper.result))


def in_a_process(wanted: Sequence[str], known: Sequence[str], options: Sequence[str]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        task = {"wanted": wanted, "known": known, "options": options, "file": str(file)}
        command = [sys.executable, __file__, "--work", json.dumps(task)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(
                f"The tests did not run:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
            )
        return json.loads(file.read_text())


def build_devices() -> None:
    """Before tests have a limit of time."""
    code = "from lightning_dp import sim; sim.enable(8)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def drop_all(wanted: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """What became of each site, with the caller on default streams and on side streams."""
    build_devices()
    table: dict[str, Any] = {}
    found: list[str] = []
    for more in ([], ["--side-streams"]):
        while True:
            known = [name for name, result in table.items() if result["test"]]
            result = in_a_process(wanted, known, [*options, *more])
            for line in result["failed"][:10]:
                print(f"fails as it is {more}: {line}", file=sys.stderr)
            for name, noticed in result["sites"].items():
                if noticed["test"] and more:
                    noticed["test"] += " (side streams)"
                if noticed["test"] or name not in table:
                    table[name] = noticed
            found = result["found"]
            if not result["broken"]:
                break
    for name in found:
        if not wanted or any(part in name.split(" ")[0] for part in wanted):
            table.setdefault(name, {"test": None, "tried": 0})
    return table


def show(table: dict[str, Any]) -> float:
    """Prints the table; the share that is noticed."""
    kept = {name for name in table if "{}: {}".format(*without_line(name)) in KEPT}
    for name in sorted(table):
        site, text = name.split(" ", 1)
        result = table[name]
        if name in kept:
            path, _ = without_line(name)
            print(f"{site}\n    {text}\n    not counted: {KEPT[f'{path}: {text}']}")
            continue
        by = result["test"] or f"NOT NOTICED by {result['tried']} tests that come to it"
        print(f"{site}\n    {text}\n    {by}")
        if result["test"]:
            print(f"    {result['error']}")
    counted = [bool(table[name]["test"]) for name in table if name not in kept]
    share = sum(counted) / len(counted) if counted else 1.0
    print(f"\n{sum(counted)} of {len(counted)} waits are noticed: {share:.0%}")
    return share


def without_line(name: str) -> tuple[str, str]:
    """The path and the text of a site."""
    site, text = name.split(" ", 1)
    return site.rsplit(":", 1)[0], text


def main(arguments: Sequence[str]) -> int:
    options: Sequence[str] = ()
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sites", nargs="*", default=[], help="parts of path:line; default: all")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        work(json.loads(chosen.work))
        return 0
    existing = [*(test for test in TESTS if (ROOT / test).exists()), "-k", CHOICE]
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    return int(show(drop_all(chosen.sites, options or existing)) < SHARE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
