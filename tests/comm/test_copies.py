"""Between separate devices only what changed is copied, in few copies; memory stays balanced."""

from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import on_accelerators, on_separate
from torch import Tensor, nn

from lightning_dp.parallel.comm import gradients_on
from lightning_dp.parallel.devices import allocated_memory, reset_peak_memory
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

LAYERS = 20
pytestmark = on_separate
counts_copies = pytest.mark.sim_only("It counts the copies between devices.")


@pytest.fixture(autouse=True)
def devices(on: str) -> list[torch.device]:
    return oracle.devices_of(3)


class Deep(nn.Module):
    """Many small layers; the first half is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
        self.register_buffer("scale", torch.ones(8))
        self.layers[: LAYERS // 2].requires_grad_(False)

    def training_step(self, x: Tensor) -> Tensor:
        return (self.layers(x) * self.scale).square().mean()


def copied(source: str, target: str) -> tuple[int, int]:
    stats = torch.sim.copy_stats().get((source, target))
    return (0, 0) if stats is None else (stats.count, stats.bytes)


@counts_copies
def test_a_refresh_copies_only_what_changed_and_in_few_copies(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    replicas = Replicas(net, devices)
    torch.sim.reset_copy_stats()

    replicas.refresh()
    assert copied("sim:0", "sim:1") == (0, 0)

    trained = [p for p in net.parameters() if p.requires_grad]
    with torch.no_grad():
        torch._foreach_add_(trained, 1.0)
    replicas.refresh()
    count, size = copied("sim:0", "sim:1")
    needed = sum(p.numel() * p.element_size() for p in trained)
    assert needed <= size < needed + 256 * len(trained), "and gaps for the sake of alignment"
    assert count == 1
    for other in replicas.modules[1:]:
        for own, root in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(own.cpu(), root.cpu()) and own.device != root.device


@counts_copies
def test_gradients_cross_in_few_copies(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    engine = StepParallel(
        net, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    loss = engine.train("training_step", engine.scatter(torch.randn(9, 8)))
    torch.sim.reset_copy_stats()
    loss.backward()
    engine.close()
    own = [p.numel() * 4 for p in net.parameters() if p.requires_grad]
    for way in (("sim:2", "sim:1"), ("sim:1", "sim:0")):
        count, size = copied(*way)
        assert sum(own) <= size <= sum(own) + 256 * len(own), "and gaps between them"
        assert count <= 3


@on_accelerators
def test_replicas_on_one_device_share_its_memory(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    before = allocated_memory(devices[0])
    replicas = Replicas(net, [devices[0]] * 4)
    added = allocated_memory(devices[0]) - before
    assert added < 4096, "buffers only"
    assert replicas.modules[3].layers[0].weight.data_ptr() == net.layers[0].weight.data_ptr()


def test_no_device_holds_another_replicas_activations(devices: list[torch.device]) -> None:
    """In step mode memory stays balanced: the root holds one shard's activations, as all do."""
    for device in devices:
        reset_peak_memory(device)
    net = Deep().to(devices[0])
    engine = StepParallel(
        net, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    engine.train("training_step", engine.scatter(torch.randn(3000, 8))).backward()
    engine.close()
    peaks = [usage.peak_bytes for usage in engine.meter.usage]
    assert min(peaks) > 0 and max(peaks) / min(peaks) < 1.15


def convnet(device: torch.device) -> nn.Module:
    """Weights that are channels_last, a weight of odd strides, and two dtypes."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(5, 7)).to(device)
    net = net.to(memory_format=torch.channels_last)
    net[2].weight.data = torch.randn(5, 7, device=device).t()
    net[2].bias.data = net[2].bias.data.double()
    return net


def strides(tensors: Any) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in tensors]


def test_weights_elsewhere_keep_their_strides(devices: list[torch.device]) -> None:
    net = convnet(devices[0])
    replicas = Replicas(net, devices)
    assert strides(replicas.parameters[2]) == strides(net.parameters())
    net[2].weight.data = torch.randn(7, 5, device=devices[0])
    net[0].weight.data = torch.randn(6, 3, 3, 3, device=devices[0])
    replicas.refresh()
    assert strides(replicas.parameters[2]) == strides(net.parameters())
    for own, root in zip(replicas.parameters[2], net.parameters(), strict=True):
        assert own.dtype == root.dtype and torch.equal(own.cpu(), root.cpu())
    moved = gradients_on(devices[1], [*replicas.parameters[2], None])
    assert strides(moved[:-1]) == strides(net.parameters()) and moved[-1] is None


def test_an_old_graph_sees_that_weights_have_changed(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    replicas = Replicas(net, devices)
    loss = replicas.modules[1].training_step(torch.randn(2, 8, device=devices[1]))
    with torch.no_grad():
        torch._foreach_add_([p for p in net.parameters() if p.requires_grad], 1.0)
    replicas.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
