"""What the processes of a world tell each other, and add up."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from several_processes import run_in_processes
from test_codec import TREES, same

from lightning_dp import sim
from lightning_dp.parallel.processes import World

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.uint16, torch.uint32, torch.uint64),
)


def world(backend: str = "gloo") -> World:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return World(dist.get_rank(), dist.get_world_size())


def own_values(rank: int, step: int) -> Any:
    """What a process tells in a step: something that the others can make, too."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(step % 4, 3, generator=generator)
    return {"rank": rank, "x": x, "loss": rank / (step + 1), "name": f"process {rank}"}


def told_and_added() -> str:
    """Everything that is checked within the processes, in one run of them."""
    own = world()
    ranks = range(own.size)
    for step in range(6):
        got = own.gather(own_values(own.rank, step))
        assert all(same(own_values(r, step), value) for r, value in zip(ranks, got, strict=True))
        src = step % own.size
        assert same(own_values(src, step), own.broadcast(own_values(own.rank, step), src))
    _any_tree(own)
    for value in (torch.ones(2), torch.ones(()), torch.zeros(100_000)):
        assert all(torch.equal(value, got) for got in own.gather(value, torch.device("cpu")))
    own.barrier()
    check_sums(_sums(own), own.size)
    return _refused(own)


def _any_tree(own: World) -> None:
    """Every process draws the same trees, and tells its own one of them."""
    drawn: list[Any] = []

    @seed(1)
    @settings(
        max_examples=30,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(TREES)
    def draw(tree: Any) -> None:
        drawn.append(tree)

    draw()
    for at in range(len(drawn) - own.size):
        values = drawn[at : at + own.size]
        assert same(values, own.gather(values[own.rank]))


def _sums(own: World) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for dtype in DTYPES:
        tensor = torch.tensor([0, 1, 100, own.rank]).to(dtype)
        own.sum_(tensor)
        sums[str(dtype)] = tensor
    strided = torch.arange(10.0)[::2]
    own.sum_(strided)
    sums["strided"] = strided
    # In memory they lie in different ways.
    images = torch.arange(16.0).view(1, 2, 2, 4)
    if own.rank == 0:
        images = images.to(memory_format=torch.channels_last)
    own.sum_(images)
    sums["images"] = images.contiguous()
    leaf = torch.ones(2, 2, requires_grad=True)
    own.sum_(leaf.t())
    sums["leaf"] = leaf.detach()
    conjugate = torch.tensor([1 + 2j]).conj()
    own.sum_(conjugate)
    sums["conjugate"] = conjugate.resolve_conj()
    empty = torch.zeros(0, 3)
    own.sum_(empty)
    sums["empty"] = empty
    return sums


def _refused(own: World) -> str:
    with pytest.raises(TypeError) as caught:
        own.sum_(torch.zeros(2).to(torch.float8_e4m3fn))
    return str(caught.value)


def check_sums(sums: dict[str, Any], size: int) -> None:
    for dtype in DTYPES:
        expected = torch.tensor([0, size, 100 * size, sum(range(size))]).to(dtype)
        assert sums[str(dtype)].dtype == dtype
        assert sums[str(dtype)].tolist() == expected.tolist(), dtype
    assert sums["strided"].tolist() == [0.0, 2.0 * size, 4.0 * size, 6.0 * size, 8.0 * size]
    assert torch.equal(sums["images"], size * torch.arange(16.0).view(1, 2, 2, 4))
    assert torch.equal(sums["leaf"], torch.full((2, 2), float(size)))
    assert sums["conjugate"].tolist() == [size * (1 - 2j)]
    assert sums["empty"].shape == (0, 3)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_tell_each_other_and_add_up(size: int) -> None:
    for refused in run_in_processes(told_and_added, size):
        assert refused.startswith("Expected a tensor of a dtype that processes can add up")
        assert "float8_e4m3fn" in refused


def on_simulated_devices() -> dict[str, Any]:
    sim.enable(device_count=2)
    own = world()
    device = torch.device("sim", 1)
    sums = {}
    for dtype in (torch.float32, torch.float16, torch.int16, torch.int64):
        tensor = torch.full((3,), own.rank + 1, device=device).to(dtype)
        own.sum_(tensor)
        assert tensor.device == device
        sums[str(dtype)] = tensor.cpu()
    strided = torch.arange(6.0, device=device).view(2, 3).t()
    own.sum_(strided)
    told = own.gather([torch.full((2,), float(own.rank), device=device)])
    arrived = own.gather(torch.ones(2, device=device), device)
    return {
        "sums": sums,
        "strided": strided.cpu(),
        "told": told,
        "arrived": [str(t.device) for t in arrived],
    }


def test_simulated_devices() -> None:
    for answer in run_in_processes(on_simulated_devices, 2):
        assert all(t.tolist() == [3, 3, 3] for t in answer["sums"].values())
        assert answer["strided"].tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
        assert [t.tolist() for [t] in answer["told"]] == [[0.0, 0.0], [1.0, 1.0]]
        assert all(t.device.type == "cpu" for [t] in answer["told"])
        assert answer["arrived"] == ["sim:1", "sim:1"]


def without_gloo_on_the_host() -> list[Any]:
    """As with NCCL alone: nothing of torch's group serves the CPU."""
    own = world("cuda:gloo")
    x = torch.ones(2)
    own.sum_(x)
    own.barrier()
    return [own.gather(own.rank), x.tolist(), own.broadcast("text", 1)]


def test_a_group_that_does_not_serve_the_host() -> None:
    for answer in run_in_processes(without_gloo_on_the_host, 2):
        assert answer == [[0, 1], [2.0, 2.0], "text"]


def gathers_timed() -> tuple[float, float]:
    """Seconds of a gather of five numbers: torch's of objects, and ours, in turns.

    Of the thread's own time: how long processes wait for each other is up to the machine.
    """
    own = world()
    value: Any = (1.0, 2, 0.5, True, 3.0)
    objects: list[Any] = [None] * own.size
    best = [float("inf")] * 2
    for _ in range(12):
        for way in range(2):
            own.barrier()
            start = time.thread_time()
            for _ in range(40):
                if way == 0:
                    dist.all_gather_object(objects, value)
                else:
                    own.gather(value)
            best[way] = min(best[way], time.thread_time() - start)
    return best[0] / 40, best[1] / 40


@pytest.mark.slow
def test_a_gather_of_five_numbers_takes_less_than_torchs() -> None:
    ratios = []
    for objects, ours in run_in_processes(gathers_timed, 2):
        print(f"objects {objects * 1e6:.0f} us, ours {ours * 1e6:.0f} us: {ours / objects:.2f}")
        ratios.append(ours / objects)
    assert max(ratios) < 0.8
