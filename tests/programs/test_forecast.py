"""The forecast's formulas: bounds that they keep, and the schedules that they stand for."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp.forecast import (
    Cluster,
    Job,
    Link,
    Measured,
    Memory,
    Row,
    Setting,
    advice,
    all_reduce,
    count,
    draw,
    forecast,
    gather,
    job_of,
    ours,
    rate,
    read,
    seconds,
    shown_bytes,
    size,
)
from lightning_dp.forecast.costs import (  # formulas that nobody else asks for
    ring_all_reduce,
    ring_link,
    ring_pass,
    rounds_of_tree,
    tree_all_reduce,
)
from lightning_dp.forecast.overlap import exposed, exposed_ahead
from lightning_dp.forecast.step import APART, BUCKET, ddp, fsdp
from lightning_dp.forecast.waiting import expected_maximum

MS = 1e-3
FEW = st.integers(1, 40)
SIZES = st.floats(0, 1e10)
LINKS = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-3))
CLUSTERS = st.builds(
    Cluster,
    machines=st.just(1),
    devices=st.integers(1, 9),
    local=LINKS,
    network=LINKS,
    bucket=st.sampled_from([2**16, 2**22, 2**30]),
    overlaps=st.booleans(),
    refreshes=st.booleans(),
    reduces=st.sampled_from(["best", "ring", "tree"]),
    gathers=st.sampled_from(["ring", "tree"]),
    exchanges=st.integers(0, 3),
)
JOBS = st.builds(
    Job,
    compute=st.floats(1e-3, 10),
    size=SIZES,
    backward_share=st.floats(0, 0.99),
    python=st.floats(0, 1),
    samples=st.none() | st.integers(1, 5000),
    fixed=st.floats(0, 1e-3),
    strong=st.booleans(),
    noise=st.floats(0, 0.1),
)


def at_least(value: float) -> Any:
    """But for rounding."""
    return value * (1 - 1e-9) - 1e-12


# --- messages -------------------------------------------------------------------------------------


@given(SIZES, st.integers(2, 40), LINKS)
def test_no_sum_is_faster_than_its_bytes_and_its_rounds(n: float, p: int, link: Link) -> None:
    bytes_bound = 2 * (p - 1) / p * n / link.bytes_per_second
    assert ring_all_reduce(n, p, link) >= at_least(bytes_bound)
    rounds = 2 * rounds_of_tree(p) * link.seconds
    for way in (ring_all_reduce, tree_all_reduce):
        assert way(n, p, link) >= at_least(rounds)
        assert way(n, p, link) >= at_least(2 * (p - 1) / p * n / link.bytes_per_second)
    assert all_reduce(n, p, link) == min(ring_all_reduce(n, p, link), tree_all_reduce(n, p, link))


@given(st.integers(2, 12), st.integers(1, 12), LINKS)
def test_a_ring_takes_what_its_exchanges_take_one_after_another(
    p: int, parts: int, link: Link
) -> None:
    """Played: everybody passes on a part of its numbers in each round, until all have all sums."""
    rows = [[float(i * p + j) for j in range(p)] for i in range(p)]
    expected, clock, part = [sum(column) for column in zip(*rows, strict=True)], 0.0, 8.0 * parts
    for phase, turn in itertools.product((0, 1), range(p - 1)):
        sent = [(i, (i - turn + phase) % p, rows[i][(i - turn + phase) % p]) for i in range(p)]
        for i, j, value in sent:
            rows[(i + 1) % p][j] = value + (rows[(i + 1) % p][j] if phase == 0 else 0.0)
        clock += link.crossing(part)
    assert all(row == expected for row in rows)
    assert clock == pytest.approx(ring_all_reduce(part * p, p, link))


@given(SIZES, LINKS, st.floats(1, 100), FEW)
def test_a_tree_is_never_slower_than_with_any_other_number_of_blocks(
    n: float, link: Link, k: float, p: int
) -> None:
    height, blocks = rounds_of_tree(p), math.ceil(k)
    other = 2 * 2 * (height + blocks) * link.crossing(n / (2 * blocks))
    assert tree_all_reduce(n, p, link) <= other * (1 + 1e-9)


def test_trees_are_for_many_machines_and_small_messages_rings_for_few_and_large_ones() -> None:
    link = Link(1e9, 20e-6)
    assert tree_all_reduce(1e3, 1024, link) < ring_all_reduce(1e3, 1024, link) / 50
    assert ring_all_reduce(1e9, 8, link) < tree_all_reduce(1e9, 8, link)
    assert tree_all_reduce(1e3, 1024, link) == pytest.approx(20 * link.crossing(1e3))
    # With large messages two trees come close to twice the bytes, whatever the number of machines.
    assert tree_all_reduce(1e10, 1024, link) == pytest.approx(20, rel=0.05)


@given(SIZES, LINKS)
def test_a_machine_alone_tells_nobody_anything(n: float, link: Link) -> None:
    ways = (all_reduce, ring_all_reduce, tree_all_reduce, ring_pass, gather)
    assert [way(n, 1, link) for way in ways] == [0.0] * len(ways)


@given(SIZES, FEW, LINKS, st.sampled_from(["best", "ring", "tree"]))
def test_more_machines_and_slower_links_take_longer(n: float, p: int, link: Link, way: Any) -> None:
    slower, later = Link(link.bytes_per_second / 2, link.seconds), Link(1e9, 1e-3)
    assert all_reduce(n, 2 * p, link, way) >= at_least(all_reduce(n, p, link, way))
    assert all_reduce(n, p, slower, way) >= at_least(all_reduce(n, p, link, way))
    assert ring_pass(n, 2 * p, link) >= at_least(ring_pass(n, p, link))
    assert gather(n, p, later) >= gather(n, p, replace(later, seconds=0.0))
    assert gather(n, p, link, "tree") <= gather(n, p, link, "ring") * (1 + 1e-9)


@given(FEW, st.integers(1, 9), LINKS, LINKS)
def test_a_ring_of_all_devices_is_as_slow_as_its_slowest_link(
    p: int, k: int, local: Link, network: Link
) -> None:
    link = ring_link(p, k, local, network)
    used = ([local] if k > 1 or p == 1 else []) + ([network] if p > 1 else [])
    assert link.bytes_per_second == min(one.bytes_per_second for one in used)
    low, high = min(one.seconds for one in used), max(one.seconds for one in used)
    assert at_least(low) <= link.seconds <= high * (1 + 1e-9)


@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 0.0), (1.0, -1.0), (1.0, math.inf)])
def test_what_is_no_link_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="Expected a link with bytes_per_second of more than 0"):
        Link(*values)


# --- overlap and waiting --------------------------------------------------------------------------


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5), st.integers(1, 30), st.floats(0, 100))
def test_what_a_backward_does_not_hide_is_what_a_played_schedule_leaves(
    stages: list[float], buckets: int, backward: float
) -> None:
    ready = [backward * (i + 1) / buckets for i in range(buckets)]
    for stage in stages:
        free = 0.0
        for i, there in enumerate(ready):
            free = ready[i] = max(there, free) + stage
    expected = ready[-1] - backward
    assert exposed(stages, buckets, backward) == pytest.approx(expected, abs=1e-9)
    assert expected >= at_least(sum(stages))  # the last bucket has nothing to hide behind


@given(st.floats(0, 10), st.integers(1, 30), st.floats(0, 100))
def test_layers_that_arrive_one_after_another_delay_a_forward(
    stage: float, layers: int, forward: float
) -> None:
    end = 0.0
    for i in range(layers):
        end = max(end, stage * (i + 1)) + forward / layers
    assert exposed_ahead(stage, layers, forward) == pytest.approx(end - forward, abs=1e-9)


@given(st.integers(2, 9), st.integers(1, 40), LINKS, st.floats(1e-3, 10))
def test_a_forward_waits_for_weights_that_come_bucket_by_bucket(
    k: int, buckets: int, link: Link, forward: float
) -> None:
    """The root waits for those that leave from where they are, beyond what is packed apart."""
    size = float(buckets * BUCKET)
    ends = [0.0] * buckets
    for _ in range(k - 1):
        free = 0.0
        for i, there in enumerate(ends):
            free = ends[i] = max(there, free) + link.crossing(BUCKET)
    last = 0.0
    for there in ends:
        last = max(last, there) + forward / buckets
    root = link.crossing(size - APART) if size > APART else 0.0
    cluster = Cluster(1, k, link, link)
    step = ours(Job(forward, size, backward_share=0.0), cluster, cluster)
    sums = exposed([link.crossing(BUCKET)] * (k - 1), buckets, 0.0)
    assert step.local - sums == pytest.approx(max(root, last - forward), rel=1e-6, abs=1e-6 * sums)


def test_all_wait_for_the_slowest_as_long_as_a_draw_says() -> None:
    draws = random.Random(0)
    for n in (2, 7, 64):
        largest = [max(draws.gauss(0, 1) for _ in range(n)) for _ in range(4000)]
        assert expected_maximum(n) == pytest.approx(statistics.mean(largest), abs=0.05)
    assert expected_maximum(1) == pytest.approx(0, abs=1e-12)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    values = [expected_maximum(2**n) for n in range(11)]
    assert values == sorted(values)


# --- steps ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(JOBS, CLUSTERS)
def test_efficiency_is_from_0_to_1_and_more_machines_never_take_a_weak_step_less(
    job: Job, machine: Cluster
) -> None:
    rows = forecast(Setting(job, machine))
    assert [row.machines for row in rows] == [2**n for n in range(11)]
    assert rows[0].efficiency == 1.0
    for row in rows:
        unclamped = rows[0].step.seconds / row.step.seconds
        unclamped /= row.machines if job.strong else 1
        assert 0 < unclamped <= 1 + 1e-9
        assert row.efficiency == min(1.0, unclamped)
        assert row.devices == row.machines * machine.devices
        assert all(value >= at_least(0) for step in steps_of(row) for value in vars(step).values())
    if not job.strong:
        for ways in zip(*map(steps_of, rows), strict=False):
            times = [way.seconds for way in ways]
            assert all(b >= at_least(a) for a, b in itertools.pairwise(times))
    assert all(advice(Setting(job, machine), rows))


def steps_of(row: Row) -> list[Any]:
    return [row.step, row.ddp, *([row.wider] if row.wider else [])]


@given(st.floats(1e-3, 10), JOBS, CLUSTERS, st.none() | st.floats(1e-4, 10))
def test_one_machine_takes_what_was_measured(
    step: float, job: Job, machine: Cluster, share: float | None
) -> None:
    try:
        found = job_of(step, job, machine, share)
    except ValueError as error:
        assert "step: expected more than" in str(error) and machine.devices > 1
        return
    assert ours(found, machine, machine).seconds == pytest.approx(step)
    assert found.compute > 0
    if share is None or machine.devices == 1:
        assert found.python == pytest.approx(0, abs=1e-9 * step)
    else:
        assert found.compute <= share


@settings(max_examples=30)
@given(JOBS, CLUSTERS, st.integers(1, 9))
def test_the_parts_of_a_step_have_the_bounds_of_the_literature(
    job: Job, machine: Cluster, power: int
) -> None:
    cluster = replace(machine, machines=2**power)
    step = ours(job, cluster, machine)
    bytes_bound = 2 * (1 - 1 / cluster.machines) * job.size / cluster.network.bytes_per_second
    backward = job.backward_share * step.compute if cluster.overlaps else 0.0
    sums = step.local + step.network
    assert sums >= at_least(bytes_bound - backward)
    gathered = fsdp(job, cluster, machine)
    assert gathered.seconds >= step.compute and ddp(job, cluster, machine).seconds >= step.compute


def test_sums_hide_behind_a_long_backward_but_for_the_last_bucket() -> None:
    machine = Cluster(1, 1, Link(1e12, 0.0), Link(1e9, 0.0))
    job = Job(compute=1.0, size=2.0**26)  # 16 buckets
    two = replace(machine, machines=2, exchanges=0)
    bucket = 2.0**22 / 1e9
    assert ours(job, two, machine).network == pytest.approx(bucket)
    late = replace(two, overlaps=False)
    assert ours(job, late, machine).network == pytest.approx(16 * bucket)


def test_strong_scaling_shares_samples_as_the_split_does() -> None:
    machine = Cluster(1, 2, Link(1e15, 0.0), Link(1e15, 0.0), exchanges=0)
    job = Job(compute=1.1, size=0.0, samples=20, fixed=0.1, strong=True)
    compute = [ours(job, replace(machine, machines=p), machine).compute for p in (1, 2, 3, 64)]
    assert compute == pytest.approx([1.1, 0.1 + 5 / 10, 0.1 + 4 / 10, 0.1 + 1 / 10])


def test_the_same_devices_in_fewer_machines_tell_less_across_the_network() -> None:
    slow = Cluster(1, 4, Link(1e11, 1e-6), Link(1e9, 50e-6))
    rows = forecast(Setting(Job(compute=0.05, size=1e8), slow))
    assert rows[1].wider is not None and rows[1].wider.network == 0.0
    assert all(row.wider.seconds < row.step.seconds for row in rows[1:] if row.wider)


@given(st.floats(1, 1e12), st.floats(0, 1e12), st.floats(0, 1e10), st.integers(1, 4096))
def test_memory_is_that_of_zero(weights: float, state: float, rest: float, devices: int) -> None:
    memory = Memory(weights, state, rest, layers=10)
    assert memory.replica <= memory.ours == memory.ddp
    assert memory.fsdp(devices) >= rest
    assert memory.fsdp(2 * devices) <= memory.fsdp(devices)
    whole = memory.fsdp(1) - 2 * weights / 10
    assert whole == pytest.approx(memory.ddp)


def test_adam_takes_16_bytes_for_each_parameter_in_single_precision() -> None:
    memory = Memory(weights=4e9, state=8e9, capacity=10e9, layers=40)
    assert memory.ddp == 16e9 and memory.fsdp(64) == 16e9 / 64 + 2 * 4e9 / 40
    assert not memory.fits(memory.ddp) and memory.fits(memory.fsdp(4))


# --- what binds -----------------------------------------------------------------------------------


def told(job: Job, memory: Memory | None = None, **machine: Any) -> str:
    usual = {"devices": 4, "local": Link(1e12, 0.0), "network": Link(1e12, 0.0), "exchanges": 0}
    setting = Setting(job, Cluster(**{"machines": 1, **usual, **machine}), memory)
    return "\n".join(advice(setting, forecast(setting)))


def test_what_binds_is_named_with_its_time() -> None:
    small = Job(compute=0.1, size=4e6)
    assert "1 to 1,024 machines: computing binds" in told(small)
    text = told(replace(small, size=1e9), network=Link(1e9, 20e-6))
    assert "2 to 1,024 machines: sums between machines bind" in text
    assert "twice the bandwidth" in text and "buckets of 256.0 MiB" in text
    text = told(small, exchanges=1, network=Link(1e12, 1e-3))
    assert "messages after the forward bind" in text and "gathering by a tree" in text
    assert "binds, 50.0 ms of a step (33%)" in told(replace(small, python=0.05))
    assert "the slowest machine binds" in told(replace(small, noise=0.02))
    assert "links between a machine's devices bind" in told(small, local=Link(1e8, 0.0))
    strong = Job(compute=0.1, size=4e6, samples=64, strong=True)
    text = told(strong)
    assert "computing that does not shrink with the share of the batch binds" in text
    assert "Efficiency: at least 90% up to 16 machines, at least 50% up to 16 machines." in text


def test_what_would_do_better_is_named_with_its_time() -> None:
    turns = told(Job(compute=0.1, size=4e6, python=0.1))
    assert "DDP, a process per device, would be faster on 1 to 1,024 machines: 0.50" in turns
    assert "Two processes on a machine" in turns and "on one machine 150 ms, not 200 ms" in turns
    plain = told(Job(compute=0.1, size=4e6))
    assert "DDP, a process per device, would not be faster by 5% anywhere." in plain
    far = told(Job(compute=0.1, size=4e8), network=Link(1e9, 0.0))
    assert "Half as many machines with twice the devices each would be faster in place of 2" in far
    large = Memory(weights=40e9, state=80e9, layers=80, capacity=24 * 2**30)
    text = told(Job(compute=0.1, size=40e9, layers=80), large)
    assert "Neither this nor DDP fits. FSDP does from 2 machines on, which have 8 devices" in text
    none = told(Job(compute=0.1, size=40e9), replace(large, activations=30e9))
    assert "nor does FSDP" in none
    fits = told(Job(compute=0.1, size=4e6), Memory(4e6, 8e6, capacity=2**30))
    assert "All of it fits" in fits and "the root 15.3 MiB" in fits


@settings(max_examples=30)
@given(JOBS, CLUSTERS)
def test_advice_says_what_each_row_says(job: Job, machine: Cluster) -> None:
    rows = forecast(Setting(job, machine))
    for row in rows:
        assert sum(row.losses.values()) <= row.step.seconds * (1 + 1e-9)
        assert (row.limit == "") == (sum(row.losses.values()) < 0.1 * row.step.seconds)


# --- units and files ------------------------------------------------------------------------------


def test_units_are_those_that_people_write() -> None:
    assert [seconds(t) for t in ("1", "2s", "3ms", "4us", "4µs", "5ns")] == pytest.approx(
        [1, 2, 3e-3, 4e-6, 4e-6, 5e-9]
    )
    assert [rate(t) for t in ("8Gb", "8Gbit/s", "1GB/s", "1e9")] == pytest.approx([1e9] * 4)
    assert [size(t) for t in ("1KiB", "1kB", "2MiB", "7")] == [1024, 1000, 2**21, 7]
    assert [count(t) for t in ("3k", "1.5M", "7B", "12")] == [3000, 1.5e6, 7e9, 12]
    assert shown_bytes(1024) == "1.0 KiB"


@pytest.mark.parametrize("function", [seconds, rate, size, count])
@pytest.mark.parametrize("text", ["", "x", "-1", "1 furlong", "1..2", "nan", "1e999", "1ms2"])
def test_what_is_no_number_says_what_was_expected(function: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"expected .* got "):
        function(text)


def benchmark(*results: dict[str, Any]) -> dict[str, Any]:
    return {"results": list(results)}


RESULT = {
    "model": "mlp",
    "devices": 4,
    "device": "cpu",
    "samples": 32,
    "contestants": {
        "dp_custom": {"seconds": [3.0, 1.0, 2.0], "parameter_bytes": 400, "failure": ""},
        "one share": {"seconds": [0.5], "failure": ""},
    },
}


def test_files_of_the_benchmark_of_scaling_and_of_the_doctor_are_read() -> None:
    assert read(benchmark(RESULT)) == Measured("mlp", 2.0, 4, "cpu", 0.5, 400, 32)
    scaled = {
        "model": "weak, nvlink4",
        "devices": 8,
        "device": "sim",
        "share": 0.1,
        "contestants": {"dp_custom": {"seconds": 0.11}},
    }
    assert read(benchmark(RESULT, scaled), devices=8) == Measured(
        "weak, nvlink4", 0.11, 8, "sim", 0.1
    )
    timing = {"workload": "convnet", "samples": 32, "seconds": {"threads": 0.2, "inorder": 0.1}}
    doctor = {"timings": [timing, {**timing, "seconds": {}}], "devices": ["cuda:0", "cuda:1"]}
    assert read(doctor) == Measured("convnet", 0.1, 2, "cuda", samples=32)


def test_a_step_that_is_not_in_a_file_or_twice_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"0 are of gan on any number of devices\. There are: 'mlp'"
    ):
        read(benchmark(RESULT), "gan")
    with pytest.raises(ValueError, match=r"2 are of any model"):
        read(benchmark(RESULT, {**RESULT, "devices": 2}))
    own = RESULT["contestants"]["dp_custom"] | {"failure": "it ended", "seconds": []}  # type: ignore[index]  # plain values
    with pytest.raises(ValueError, match="There are: none"):
        read(benchmark({**RESULT, "contestants": {"dp_custom": own}}))
    with pytest.raises(ValueError, match=r"expected what tests/benchmarks/run\.py"):
        read({"a": 1})


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_picture_is_drawn(name: str, tmp_path: Path) -> None:
    machine = Cluster(1, 4, Link(1e10, 1e-6), Link(1e9, 1e-5))
    rows = forecast(Setting(Job(0.1, 1e8, python=0.01, noise=0.001), machine))
    draw(tmp_path / "new" / name, rows, "a step")
    assert (tmp_path / "new" / name).stat().st_size > 5_000
    with pytest.raises(ValueError, match=r"expected a file named \.png or \.svg"):
        draw(tmp_path / "a.txt", rows, "a step")


def test_the_forecast_needs_no_torch() -> None:
    """Its modules import nothing but each other: they are read without the package around them."""
    folder = Path(__file__).resolve().parents[2] / "lightning_dp" / "forecast"
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('lightning_dp'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['lightning_dp'] = package\n"
        "importlib.import_module('lightning_dp.forecast')\n"
        "assert not {'torch', 'lightning', 'matplotlib'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder.parent)], check=True, timeout=60)
