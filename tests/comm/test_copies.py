"""Between separate devices only what changed is copied, in few copies; memory stays balanced."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from support import oracle
from support.device_kinds import on_accelerators, on_separate
from torch import Tensor, nn

from lightning_dp.parallel.devices import allocated_memory, reset_peak_memory
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

LAYERS = 20
pytestmark = on_separate
counts_copies = pytest.mark.on("sim")  # It counts the copies between devices.


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

    def trained(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]


@pytest.fixture
def engine(devices: list[torch.device]) -> Iterator[StepParallel]:
    split = split_policy("even", None, devices)
    net = Deep().to(devices[0])
    with closing(StepParallel(net, devices, output_device=devices[0], split=split)) as engine:
        yield engine


def assert_few_copies(source: int, target: int, tensors: list[Tensor], at_most: int = 1) -> None:
    """All of the tensors went, with gaps for the sake of alignment, and nothing else."""
    stats, size = torch.sim.copy_stats()[f"sim:{source}", f"sim:{target}"], sum_of_bytes(tensors)
    assert size <= stats.bytes <= size + 256 * len(tensors) and stats.copies <= at_most


def sum_of_bytes(tensors: list[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in tensors)


@counts_copies
def test_a_refresh_copies_only_what_changed_and_in_few_copies(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    replicas = Replicas(net, devices)
    torch.sim.reset_copy_stats()
    replicas.refresh()
    assert ("sim:0", "sim:1") not in torch.sim.copy_stats()
    with torch.no_grad():
        torch._foreach_add_(net.trained(), 1.0)
    replicas.refresh()
    assert_few_copies(0, 1, net.trained())
    for other in replicas.modules[1:]:
        for own, root in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(own.cpu(), root.cpu()) and own.device != root.device


@counts_copies
def test_gradients_cross_in_few_copies(engine: StepParallel) -> None:
    loss = engine.train("training_step", engine.scatter(torch.randn(9, 8)))
    torch.sim.reset_copy_stats()
    loss.backward()
    for source, target in ((2, 1), (1, 0)):
        assert_few_copies(source, target, engine.module.trained(), at_most=3)


@on_accelerators
def test_replicas_on_one_device_share_its_memory(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    before = allocated_memory(devices[0])
    replicas = Replicas(net, [devices[0]] * 4)
    assert allocated_memory(devices[0]) - before < 4096, "buffers only"
    assert replicas.modules[3].layers[0].weight.data_ptr() == net.layers[0].weight.data_ptr()


def test_no_device_holds_another_replicas_activations(
    engine: StepParallel, devices: list[torch.device]
) -> None:
    """In step mode memory stays balanced: the root holds one shard's activations, as all do."""
    for device in devices:
        reset_peak_memory(device)
    engine.train("training_step", engine.scatter(torch.randn(3000, 8))).backward()
    engine.close()
    peaks = [usage.peak_bytes for usage in engine.usage]
    assert min(peaks) > 0 and max(peaks) / min(peaks) < 1.15


def test_an_old_graph_sees_that_weights_have_changed(devices: list[torch.device]) -> None:
    net = Deep().to(devices[0])
    replicas = Replicas(net, devices)
    loss = replicas.modules[1].training_step(torch.randn(2, 8, device=devices[1]))
    with torch.no_grad():
        torch._foreach_add_(net.trained(), 1.0)
    replicas.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
