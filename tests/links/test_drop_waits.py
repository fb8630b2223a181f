"""What `drop_waits.py` takes for a wait, and what becomes of a program without one."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from wait_sites import HELPER, Site, Sites, what_is_in

from lightning_dp import sim

pytestmark = pytest.mark.sim_only("It is about waits whose lack strict devices show.")
SCRIPT = Path(__file__).parents[1] / "drop_waits.py"

ROOM = '''
import torch


def host_waits(device: torch.device) -> None:
    """Only that."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def copies(x: torch.Tensor) -> None:
    x.add_(1)
    x.record_stream(torch.Stream(x.device))


class Way:
    def __init__(self, stream: torch.Stream) -> None:
        self.stream, self.mark = stream, None

    def arrive(self, other: torch.Stream) -> None:
        other.wait_stream(self.stream)

    def left(self) -> torch.Event:
        return self.stream.record_event()

    def note(self) -> None:
        self.mark = self.left()
'''

PROGRAM = """
import torch

def by_stream(x, side, main):
    side.wait_stream(main)
    with torch.sim.stream(side):
        return x + 1

def by_event(x, side, main):
    side.wait_event(main.record_event())
    with torch.sim.stream(side):
        return x + 1

def by_host(x, side, main):
    main.synchronize()
    with torch.sim.stream(side):
        return x + 1

def values(x, side, main):
    return x.cpu()

def more_values(x, side, main):
    return torch.empty(4).copy_(x)

def memory(x, side, main):
    side.wait_stream(main)
    with torch.sim.stream(side):
        y = x + 1
    x.record_stream(side)
    x.untyped_storage().resize_(0)
    torch.ones(4, device="sim:0")
    return y

def no_waits(x, side, main):
    names = ", ".join(["a", "b"])
    return x.to(torch.float64).to("cpu", non_blocking=True)
"""


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    sim.enable(8)
    (tmp_path / "pack" / "room").mkdir(parents=True)
    (tmp_path / "pack" / "room" / "ways.py").write_text(ROOM)
    found = Sites(tmp_path, "pack", "pack/room")
    monkeypatch.setattr(builtins, HELPER, found._called, raising=False)
    return found


def functions_of(sites: Sites, root: Path) -> dict[str, Callable[..., Any]]:
    names: dict[str, Any] = {}
    code = sites.rewritten(PROGRAM.encode(), root / "pack" / "program.py")
    assert code is not None
    exec(code, names)
    return names


def run(function: Callable[..., Any]) -> Any:
    x, side = torch.ones(4, device="sim:0"), torch.Stream("sim:0")
    result = function(x, side, torch.sim.current_stream("sim:0"))
    wrong = result.device.type == "cpu" and not bool((result == 1).all())
    torch.sim.synchronize(0)
    return wrong


PLACES = {"by_stream": 1, "by_event": 2, "by_host": 1, "values": 1, "more_values": 1, "memory": 2}


@pytest.mark.parametrize("name", PLACES)
def test_a_program_without_one_of_its_waits_goes_wrong(
    name: str, sites: Sites, tmp_path: Path
) -> None:
    function = functions_of(sites, tmp_path)[name]
    assert run(function) is False
    reached = sorted(sites.reached)
    assert len(reached) == PLACES[name]
    for site in reached:
        sites.dropped = site
        try:
            assert run(function), f"{site} {site.text} is not missed"
        except torch.sim.RaceError:
            torch.sim.synchronize(0)
        sites.dropped = None
        assert run(function) is False


def test_what_only_looks_like_a_wait_is_none(sites: Sites, tmp_path: Path) -> None:
    functions_of(sites, tmp_path)["no_waits"](torch.ones(4, device="sim:0"), None, None)
    assert not sites.reached


def test_functions_that_only_wait_are_found(sites: Sites, tmp_path: Path) -> None:
    expected = {"host_waits": "none", "arrive": "none", "left": "event", "note": "none"}
    assert what_is_in(tmp_path / "pack" / "room") == expected


def test_sites_tell_where_they_are(sites: Sites, tmp_path: Path) -> None:
    functions_of(sites, tmp_path)
    first = min(sites.all)
    assert str(first) == "pack/program.py:5" and first.text == "side.wait_stream(main)"
    assert isinstance(first, Site) and first.is_sure


@pytest.mark.slow
def test_the_script_tells_what_is_noticed_and_what_is_not() -> None:
    def told(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(SCRIPT), "--sites", "lanes.py", "--", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        return ended.returncode, ended.stdout

    status, table = told("tests/links/test_lanes.py", "tests/links/test_side_streams.py")
    assert status == 0 and "NOT NOTICED" not in table
    assert "wait_stream" in table and "RaceError: Race: " in table
    status, table = told("tests/splitting/test_split.py")  # numbers alone
    assert status == 1 and "NOT NOTICED by 0 tests" in table and "0 of " in table
