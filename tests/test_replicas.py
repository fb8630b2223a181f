"""Replicas: one module on every device, following the root and never touching it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.parallel.replicate import Replicas

CPU = torch.device("cpu")


def replicas_of(module: nn.Module, k: int = 3) -> Replicas:
    return Replicas(module, [CPU] * k)


def test_replica_0_is_the_module_and_the_others_compute_the_same() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    modules = replicas_of(net).modules
    assert modules[0] is net
    x = torch.randn(5, 3)
    for module in modules[1:]:
        assert module is not net and type(module) is type(net)
        assert torch.equal(module(x), net(x))


def test_replicas_on_the_roots_device_share_its_memory_but_not_its_gradients() -> None:
    net = nn.Linear(3, 2)
    _, other, _ = replicas_of(net).modules
    assert other.weight is not net.weight
    assert other.weight.data_ptr() == net.weight.data_ptr()
    other(torch.randn(4, 3)).sum().backward()
    assert other.weight.is_leaf and isinstance(other.weight, nn.Parameter)
    assert other.weight.grad is not None and net.weight.grad is None


def test_replicas_own_their_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    _, other, _ = replicas_of(norm).modules
    other(torch.randn(8, 3) + 5)
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_tied_parameters_stay_tied_and_count_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    replicas = replicas_of(net)
    assert [len(parameters) for parameters in replicas.parameters] == [1, 1, 1]
    assert replicas.modules[1][0].weight is replicas.modules[1][1].weight


def test_a_module_used_twice_is_one_module_in_the_replica_too() -> None:
    layer = nn.Linear(2, 2)
    other = replicas_of(nn.ModuleDict({"a": layer, "b": layer})).modules[1]
    assert other["a"] is other["b"] is not layer


def change_dropout(net: nn.Module) -> None:
    net.drop.p = 0.9


def change_mode(net: nn.Module) -> None:
    net.eval()


def add_hook(net: nn.Module) -> None:
    net.linear.register_forward_hook(lambda module, args, output: output * 0)


def freeze(net: nn.Module) -> None:
    net.linear.weight.requires_grad_(False)


def replace_layer(net: nn.Module) -> None:
    net.linear = nn.Linear(3, 7)


def add_layer(net: nn.Module) -> None:
    net.extra = nn.Linear(3, 7)


def replace_data(net: nn.Module) -> None:
    net.linear.weight.data = torch.full((2, 3), 4.0)


def write_in_place(net: nn.Module) -> None:
    with torch.no_grad():
        net.linear.weight.fill_(4.0)


def replace_buffer(net: nn.Module) -> None:
    net.scale = torch.full((5,), 2.0)


def add_buffer(net: nn.Module) -> None:
    net.register_buffer("shift", torch.ones(2))


def rebind_attribute(net: nn.Module) -> None:
    net.temperature = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.1)
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(2))


@pytest.mark.parametrize(
    "change",
    [
        change_dropout,
        change_mode,
        add_hook,
        freeze,
        replace_layer,
        add_layer,
        replace_data,
        write_in_place,
        replace_buffer,
        add_buffer,
        rebind_attribute,
    ],
)
def test_changes_between_steps_reach_every_replica(change: Any) -> None:
    net = Net()
    replicas = replicas_of(net)
    change(net)
    replicas.refresh()
    for other in replicas.modules[1:]:
        assert other.drop.p == net.drop.p
        assert other.training is net.training
        assert other.temperature == net.temperature
        x = torch.randn(4, 3)
        assert torch.equal(other.linear(x), net.linear(x))
        assert other.linear.weight.requires_grad == net.linear.weight.requires_grad
        assert hasattr(other, "extra") == hasattr(net, "extra")
        assert dict(other.named_buffers()).keys() == dict(net.named_buffers()).keys()
        assert torch.equal(other.scale, net.scale)


def test_hooks_that_are_methods_belong_to_the_replica() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.kept = output

    net = Keeping()
    replicas = replicas_of(net)
    net.linear.register_forward_hook(net.keep)
    replicas.refresh()
    other = replicas.modules[1]
    output = other.linear(torch.ones(1, 2))
    assert other.kept is output and not hasattr(net, "kept")


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
    for module in replicas.modules[1:]:
        module(torch.ones(3, 2))
    assert net.mean.tolist() == [0, 0] and net.late is None
    replicas.refresh(buffers="all")
    assert all(m.mean.tolist() == [0, 0] and m.late is None for m in replicas.modules)


def test_replicas_that_sat_out_a_step_catch_up() -> None:
    norm = nn.BatchNorm1d(2)
    replicas = replicas_of(norm)
    with torch.no_grad():
        norm.running_mean.fill_(1.0)
    replicas.refresh([0, 1])
    replicas.refresh()
    assert replicas.modules[2].running_mean.tolist() == [1.0, 1.0]


def test_writing_through_data_is_seen_when_everything_is_asked_for() -> None:
    norm = nn.BatchNorm1d(2)
    replicas = replicas_of(norm)
    norm.running_mean.data.fill_(3.0)
    replicas.refresh(everything=True)
    assert replicas.modules[1].running_mean.tolist() == [3.0, 3.0]


def test_references_to_layers_and_methods_point_into_the_replica() -> None:
    class Referring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.order = [self.b, self.a]
            self.by_name = {"weight": self.a.weight, "more": (self.b,)}
            self.apply_a = self.a.forward

    net = Referring()
    other = replicas_of(net).modules[1]
    assert other.order[0] is other.b and other.order[1] is other.a
    assert other.by_name["weight"] is other.a.weight and other.by_name["more"][0] is other.b
    assert other.apply_a.__self__ is other.a


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_replicas_use_their_own_weights(kind: type[nn.RNNBase]) -> None:
    net = kind(3, 4, batch_first=True)
    other = replicas_of(net).modules[1]
    other(torch.randn(2, 5, 3))[0].sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in other.parameters())
    assert all(a is b for a, b in zip(other._flat_weights, other.parameters(), strict=True))


def test_replicas_built_in_inference_mode_can_be_trained() -> None:
    net = nn.BatchNorm1d(2)
    with torch.inference_mode():
        replicas = replicas_of(net)
        replicas.refresh(everything=True)
    other = replicas.modules[1]
    other(torch.randn(4, 2)).sum().backward()
    assert other.weight.grad is not None


def test_own_attributes_of_parameters_are_kept() -> None:
    net = nn.Linear(2, 2)
    net.weight.no_decay = True  # type: ignore[attr-defined]
    assert replicas_of(net).modules[1].weight.no_decay


def test_modules_that_cannot_be_replicated_are_named() -> None:
    with pytest.raises(ValueError, match=r"LazyLinear.weight, whose shape is not known yet"):
        replicas_of(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_modules_are_refused(in_place: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    if in_place:
        net[0].compile()
    else:
        net[0] = torch.compile(net[0])
    with pytest.raises(ValueError, match=r"not compiled, got \w+ from torch.compile"):
        replicas_of(net)


def test_forward_may_write_to_self_without_the_others_seeing_it() -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.cache = x
            return x

    net = Caching()
    replicas = replicas_of(net, 2)
    other = replicas.modules[1]
    other(torch.ones(2))
    assert not hasattr(net, "cache")
    net(torch.zeros(2))
    replicas.refresh()
    assert other.cache.tolist() == [0, 0]
