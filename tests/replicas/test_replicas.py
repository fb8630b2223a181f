"""Replicas: one module on every device, following the root and never touching it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.replicate import Replicas

pytestmark = pytest.mark.usefixtures("on")

# One replica per device; some on the root's device and some elsewhere; all on the root's device.
PLACES = [(0, 1, 2), (0, 1, 0), (0, 0, 0)]


def root_device() -> torch.device:
    return devices_of(1)[0]


def on_root(*shape: int) -> Tensor:
    return torch.randn(shape, device=root_device())


def replicas_of(module: nn.Module, places: Sequence[int] = (0, 1, 2)) -> Replicas:
    devices = devices_of(max(places) + 1)
    return Replicas(module.to(devices[0]), [devices[i] for i in places])


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x.to(device_of(module)))


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, wherever they are."""
    assert torch.equal(actual.cpu(), expected.cpu())


def test_replica_0_is_the_module_and_the_others_compute_the_same() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    modules = replicas_of(net).modules
    assert modules[0] is net
    x = on_root(5, 3)
    for module, device in zip(modules[1:], devices_of(3)[1:], strict=True):
        assert module is not net and type(module) is type(net)
        assert all(p.device == device for p in module.parameters())
        assert_equal(call(module, x), net(x))


@pytest.mark.parametrize("places", PLACES)
def test_replicas_own_gradients_but_memory_only_elsewhere(places: tuple[int, ...]) -> None:
    net = nn.Linear(3, 2)
    for other in replicas_of(net, places).modules[1:]:
        assert other.weight is not net.weight
        on_the_roots = other.weight.device == net.weight.device
        assert (other.weight.data_ptr() == net.weight.data_ptr()) is on_the_roots
        call(other, on_root(4, 3)).sum().backward()
        assert other.weight.is_leaf and isinstance(other.weight, nn.Parameter)
        assert other.weight.grad is not None and net.weight.grad is None


def test_replicas_own_their_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    for other in replicas_of(norm, (0, 1, 0)).modules[1:]:
        call(other, on_root(8, 3) + 5)
        assert norm.running_mean.tolist() == [0, 0, 0] and norm.num_batches_tracked == 0
        assert other.running_mean.device == other.weight.device and other.running_mean.min() > 0


def test_a_buffer_that_is_assigned_to_stays_the_replicas_own() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("late", None)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + x.mean(0)
            self.late = x[0]
            return x

    net = Averaging()
    replicas = replicas_of(net)
    for module, device in zip(replicas.modules[1:], devices_of(3)[1:], strict=True):
        module(torch.ones(3, 2, device=device))
        assert module.mean.tolist() == [1, 1]
    assert net.mean.tolist() == [0, 0] and net.late is None
    replicas.refresh(buffers="all")
    assert all(m.mean.tolist() == [0, 0] and m.late is None for m in replicas.modules)


def test_modules_and_replicas_made_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        net = nn.BatchNorm1d(2).to(root_device())
        replicas = replicas_of(net, (0, 1, 0))
        replicas.refresh(parameters="all")
    for other in replicas.modules[1:]:
        call(other, on_root(4, 2)).sum().backward()
        assert other.weight.grad is not None


def test_modules_that_cannot_be_replicated_are_named() -> None:
    with pytest.raises(ValueError, match=r"LazyLinear.weight, whose shape is not known yet"):
        replicas_of(nn.Sequential(nn.LazyLinear(3)))


def test_a_hook_that_a_step_registers_is_for_its_own_calls() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    replicas = replicas_of(net)
    seen: list[int] = []
    handles = [
        module[0].register_forward_hook(lambda *_, k=k: seen.append(k))
        for k, module in enumerate(replicas.modules)
    ]
    for module in replicas.modules:
        call(module, torch.ones(1, 2))
    assert seen == [0, 1, 2]
    for handle in handles:
        handle.remove()
    assert not any(module[0]._forward_hooks for module in replicas.modules)


class Sharing(nn.Module):
    """Two layers, of which one is known by a list, and recurrent weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.norms = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.first(x))
        return self.last(hidden).square().sum() + self.norms[0].square().sum()


def shared(places: Sequence[int]) -> tuple[Sharing, Replicas, list[bool]]:
    net = Sharing()
    replicas = replicas_of(net, places)
    replicas.refresh()
    replicas.share_parameters(True)
    return net, replicas, [device_of(module) == device_of(net) for module in replicas.modules]


def computes_with_the_roots(replica: nn.Module, net: Sharing) -> set[bool]:
    own = [*replica.parameters(), *replica.rnn._flat_weights, replica.norms[0]]
    roots = [*net.parameters(), *net.rnn._flat_weights, net.norms[0]]
    return {a is b for a, b in zip(own, roots, strict=True)}


@pytest.mark.parametrize("places", PLACES)
def test_shared_parameters_leave_nothing_to_sum(places: tuple[int, ...]) -> None:
    net, replicas, on_root_device = shared(places)
    assert len(replicas.parameters) == 1 + on_root_device.count(False)
    xs = [on_root(2, 5, 3) for _ in places]
    for replica, x, is_there in zip(replicas.modules, xs, on_root_device, strict=True):
        assert computes_with_the_roots(replica, net) == {is_there}
        call(replica, x).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for x, is_there in zip(xs, on_root_device, strict=True):
        if is_there:
            net(x).backward()
    for gradient, p in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(gradient.cpu(), p.grad.cpu())


def test_replicas_that_no_longer_share_have_parameters_of_their_own() -> None:
    net, replicas, _ = shared((0, 0))
    net.norms, net.scale = [net.last.weight, net.first.weight], 2.0
    replicas.refresh()
    replicas.share_parameters(True)
    assert replicas.modules[1].norms[0] is net.last.weight and replicas.modules[1].scale == 2.0
    replicas.share_parameters(False)
    assert computes_with_the_roots(replicas.modules[1], net) == {False}
    assert replicas.modules[1].norms[0] is replicas.modules[1].last.weight
    call(replicas.modules[1], on_root(2, 5, 3)).backward()
    assert all(p.grad is None for p in net.parameters())
    replicas.share_parameters(True)
    assert len(replicas.parameters) == 2, "there are gradients on it"
