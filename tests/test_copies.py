"""Between separate devices only what changed is copied, in few copies; memory stays balanced."""

from collections.abc import Iterator

import oracle
import pytest
import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicas.replicate import Replicas
from lightning_dp.parallel.split.policies import split_policy
from lightning_dp.parallel.step import StepParallel

LAYERS = 20


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    from lightning_dp import sim

    sim.enable(8)
    monkeypatch.setattr(oracle, "ON", "sim")
    yield oracle.devices_of(3)
    torch.sim.reset_copy_stats()


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
    assert size == sum(p.numel() * p.element_size() for p in trained)
    assert count == 1
    for other in replicas.modules[1:]:
        for own, root in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(own.cpu(), root.cpu()) and own.device != root.device


def test_gradients_cross_in_few_copies(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    engine = StepParallel(
        net, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    loss = engine.train("training_step", engine.scatter(torch.randn(9, 8)))
    torch.sim.reset_copy_stats()
    loss.backward()
    engine.close()
    count, size = copied("sim:2", "sim:0")
    gradients = sum(p.numel() * 4 for p in net.parameters() if p.requires_grad)
    assert gradients <= size <= gradients + 64, "and the gradient of a loss"
    assert count <= 3


def test_replicas_on_one_device_share_its_memory(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    before = torch.sim.memory_allocated(0)
    replicas = Replicas(net, [devices[0]] * 4)
    added = torch.sim.memory_allocated(0) - before
    assert added < 4096, "buffers only"
    assert replicas.modules[3].layers[0].weight.data_ptr() == net.layers[0].weight.data_ptr()


def test_no_device_holds_another_replicas_activations(devices: list[torch.device]) -> None:
    """In step mode memory stays balanced: the root holds one shard's activations, as all do."""
    net = Deep().to(devices[0])
    engine = StepParallel(
        net, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    engine.train("training_step", engine.scatter(torch.randn(3000, 8))).backward()
    engine.close()
    peaks = [usage.peak_bytes for usage in engine.meter.usage]
    assert min(peaks) > 0 and max(peaks) / min(peaks) < 1.15
