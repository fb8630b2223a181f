"""A device that has no memory left for packing copies sends and gets them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, devices_of, run
from torch import Tensor, nn

from lightning_dp.parallel.comm import Packing, to_device_coalesced
from lightning_dp.parallel.reduce import reduce_gradients

pytestmark = pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte.")

SHAPES = [(64, 32), (32,), (8, 3, 4, 4), (16, 16), ()]
LARGEST = 8 * 64 * 32

Room = Callable[..., None]


def tensors_on(device: torch.device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made[2] = made[2].to(memory_format=torch.channels_last)
    return [tensor.to(device) for tensor in made]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=1e-12, rtol=0.0)


def test_copies_to_replicas(room: Room) -> None:
    root, *others = devices_of(3)
    sources = tensors_on(root)
    packing = Packing(sources)
    memory = [packing.memory(sources, device) for device in others]
    room(0, 16)
    for _ in range(2):  # it is not tried again and again
        sources[0].mul_(2)
        packing.send(sources, list(zip(*(packed for packed, _ in memory), strict=True)))
        for _, tensors in memory:
            assert_equal(tensors, sources)


@pytest.mark.parametrize(("tight", "is_prepared"), [(0, True), (1, True), (1, False)])
def test_sums_of_gradients(room: Room, tight: int, is_prepared: bool) -> None:
    """The devices need no room beside their buffers."""
    devices = devices_of(3)
    rows = [[nn.Parameter(t) for t in tensors_on(device, k)] for k, device in enumerate(devices)]
    for parameter in [p for row in rows for p in row]:
        parameter.grad = parameter.detach() * 2
    columns = zip(*rows, strict=True)
    expected = [2 * torch.stack([p.detach().cpu() for p in own]).sum(0) for own in columns]
    packing = Packing(rows[0])
    if is_prepared:
        assert packing.sums.prepare(devices)
    room(tight, LARGEST + 512 if tight == 0 else 16)
    reduce_gradients(rows, packing)
    assert_equal([p.grad.contiguous() for p in rows[0]], [t.contiguous() for t in expected])


@pytest.mark.parametrize("has_graph", [True, False])
def test_tensors_that_move(room: Room, has_graph: bool) -> None:
    root, other = devices_of(2)
    tensors = [tensor.requires_grad_(has_graph) for tensor in tensors_on(root)]
    room(0, 16)
    moved = to_device_coalesced(tensors, other)
    assert {tensor.device for tensor in moved} == {other}
    assert_equal([t.detach() for t in moved], [t.detach() for t in tensors])
    if has_graph:
        room(0, 2**20)
        sum(t.square().sum() for t in moved).backward()
        assert all(t.grad is not None and torch.equal(t.grad, 2 * t) for t in tensors)


WIDTH = 256


class Wide(Classifier):
    """Its weights are most of what it takes; without gradients these take no more."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        wide = nn.Linear(WIDTH, WIDTH).requires_grad_(not is_frozen)
        self.net = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), wide, nn.Linear(WIDTH, 3))


@pytest.mark.parametrize(
    ("is_frozen", "mode", "device", "extra"),
    [(True, "step", 0, 1.6), (True, "step", 1, 1.6), (False, "forward", 1, 3.5)],
)
def test_a_fit_without_room_for_packing(
    is_frozen: bool, mode: str, device: int, extra: float, room: Room, caplog: Any
) -> None:
    """There is room for what a replica has and a little more, not for a copy of its weights."""
    make, options = lambda: Wide(is_frozen).double(), {"precision": "64-true", "max_epochs": 1}
    room(device, int(extra * 8 * WIDTH**2))
    result = run(make, 3, strategy={"mode": mode, "executor": "threads"}, **options)
    room(device, 2**30)
    assert_same(result, run(make, 1, **options))
    assert not [r for r in caplog.records if r.name == "lightning_dp"]
    samples = [usage.samples for usage in result.trainer.strategy.usage]
    assert max(samples) - min(samples) <= 6
