"""Curves of efficiency: the bound that links set, the model that takes time, and the program."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import figure, nets, scaling
from benchmarks.models import VIRTUAL, WORKLOADS, workload
from benchmarks.scaling import BOUND, OURS, RING, THEIRS, Case, least_seconds
from hypothesis import given
from hypothesis import strategies as st
from oracle import gradients
from program_runs import ROOT, read_json
from sim_devices.links import PRESETS, Link
from sim_devices.schedule import Command, replay

PROGRAM = ROOT / "tests" / "benchmarks" / "scaling.py"
BYTE_PER_NANOSECOND = 1e9

layers = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=8
)
"""Of each the nanoseconds of its forward and of its backward, and its bytes."""


def run_on_one_replica(found: list[tuple[int, int, int]], latency: int = 0) -> int:
    """Nanoseconds of a step in which everything leaves as soon as it can, layer by layer."""
    commands, count = [], len(found)
    for _, _, size in found:
        commands.append(Command(0, 1, size + latency, ("in",)))
    for i, (forward, _, _) in enumerate(found):
        commands.append(Command(0, 0, forward, ("compute",), needs=(i,)))
    for _, backward, size in reversed(found):
        commands.append(Command(0, 0, backward, ("compute",)))
        commands.append(Command(0, 2, size + latency, ("out",), needs=(len(commands) - 1,)))
    assert len(commands) == 4 * count
    return replay(commands).elapsed


def least(found: list[tuple[int, int, int]], latency: int = 0) -> float:
    forward, backward, sizes = zip(*found, strict=True)
    link = Link(BYTE_PER_NANOSECOND, latency * 1e-9)
    seconds = least_seconds([1e-9 * f for f in forward], [1e-9 * b for b in backward], sizes, link)
    return 1e9 * seconds


@given(layers)
def test_the_bound_is_what_one_replica_takes_that_sends_all_at_once(found: Any) -> None:
    assert least(found) == pytest.approx(run_on_one_replica(found))


@given(layers, st.integers(0, 20))
def test_the_bound_is_one_whatever_a_copy_takes_by_itself(found: Any, latency: int) -> None:
    assert least(found, latency) <= run_on_one_replica(found, latency) + 1e-6


@given(layers, st.permutations(range(8)), st.integers(0, 200))
def test_no_order_of_the_parameters_is_faster(found: Any, order: list[int], more: int) -> None:
    """Layers compute in their order; parameters come in any."""
    order = [i for i in order if i < len(found)]
    arrive = dict(zip(order, itertools.accumulate(found[i][2] for i in order), strict=True))
    time = 0
    for i, (forward, _, _) in enumerate(found):
        time = max(time, arrive[i]) + forward
    assert least([(f, 0, s) for f, _, s in found]) - sum(s for *_, s in found) <= time + 1e-6
    larger = [(f, b, s + more) for f, b, s in found]
    assert least(larger) >= least(found) - 1e-6


def test_where_nothing_travels_the_bound_is_compute() -> None:
    link = Link(26e9, 0.0)
    assert least_seconds([0.1, 0.2], [0.2, 0.4], [0, 0], link, rest=0.5) == pytest.approx(1.4)


def test_the_way_through_the_cpu_has_the_seconds_of_both() -> None:
    through = scaling.link_between_devices("pcie4")
    assert through == Link(26e9, 15e-6)
    assert scaling.link_between_devices("nvlink4") == PRESETS["nvlink4"].peer


def test_the_bound_of_a_case_is_close_to_its_compute_where_that_is_long() -> None:
    long, short = Case("weak", "pcie4_peer", 8), Case("strong", "pcie4_peer", 16)
    assert long.seconds == 0.1 and short.seconds == 0.1 / 16
    assert 0.1 < scaling.bound(long, share=0.1003) < 0.101
    # Both ways are longer than the compute beside them: 101 MB at 26 GB/s take 3.9 ms.
    assert 2 * 3.87e-3 < scaling.bound(short, share=0.0066) < 2 * 3.87e-3 + 1e-3


# --- the model ------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEPTH": 3, "WIDTH": 16, "ROWS": 5}.items():
        monkeypatch.setattr(nets.EvenLayers, name, value)


@pytest.mark.usefixtures("small")
def test_what_takes_time_leaves_values_and_gradients_alone() -> None:
    torch.manual_seed(0)
    net = nets.EvenLayers()
    plain = torch.nn.Sequential(*net.layers, net.head)
    x = torch.randn(2, 16)
    found, expected = net(x), plain(x)
    assert torch.equal(found, expected)
    found.square().mean().backward()
    own = list(gradients(net).values())
    net.zero_grad()
    expected.square().mean().backward()
    for gradient, other in zip(own, gradients(plain).values(), strict=True):
        assert torch.equal(gradient, other)


def test_it_is_no_model_of_the_contest_that_measures() -> None:
    assert not WORKLOADS.keys() & VIRTUAL.keys()
    model = workload("even_layers").make()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 100e6 < weights < 102e6


# --- what is told ---------------------------------------------------------------------------------


def made_up() -> list[dict[str, Any]]:
    cases = [Case(r, "pcie4_peer", k) for r in ("weak", "strong") for k in (2, 4)]
    seconds = {OURS: 0.11, THEIRS: 0.22, RING: 0.1}
    return [scaling.result(case, seconds, share=0.099) for case in cases]


def test_efficiency_is_that_of_a_share() -> None:
    found = made_up()[0]
    own = found["contestants"]
    assert own[OURS]["efficiency"]["median"] == pytest.approx(0.9)
    assert own[BOUND]["seconds"] == scaling.bound(Case("weak", "pcie4_peer", 2), 0.099)
    first, header, line, *_ = scaling.table([found])
    assert first.startswith("weak, pcie4_peer") and RING in header
    assert line.split()[:2] == ["2", "99.00"]
    assert line.split()[-3:-1] == ["0.500", "1.100"]


def test_the_figure_has_a_panel_for_each_reading_and_preset(tmp_path: Path) -> None:
    results = made_up()
    curves = figure.curves(results)
    assert [*curves] == ["weak, pcie4_peer", "strong, pcie4_peer"]
    assert [*curves["weak, pcie4_peer"]] == [OURS, THEIRS, RING, BOUND]
    figure.draw(results, tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").stat().st_size > 5_000


def program(file: Path, *arguments: str) -> tuple[dict[int, Any], str]:
    """By numbers of devices, what each took."""
    command = [sys.executable, str(PROGRAM), "--links", "pcie4_peer", "--readings", "weak"]
    command += ["--depth", "6"]
    done = subprocess.run(
        [*command, "--json", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {found["devices"]: found for found in read_json(file)["results"]}, done.stdout


@pytest.mark.slow
def test_two_runs_of_the_program_have_the_same_numbers(tmp_path: Path) -> None:
    first, text = program(tmp_path / "one.json", "--devices", "2", "3")
    second, _ = program(
        tmp_path / "two.json", "--devices", "2", "--figure", str(tmp_path / "scaling.png")
    )
    assert first[2] == second[2] and (tmp_path / "scaling.png").is_file()
    assert [*first] == [2, 3] and text.count("weak, pcie4_peer") == 1
    for found in first.values():
        assert found["share"] == pytest.approx(0.1, rel=0.01)
        own = found["contestants"]
        assert found["share"] <= own[BOUND]["seconds"] <= own[OURS]["seconds"]
        assert all(0.5 < one["efficiency"]["median"] < 1 for one in own.values())
