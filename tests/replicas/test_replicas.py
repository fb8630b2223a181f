"""Replicas: one module on every device, following the root and never touching it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from oracle import devices_of
from torch import Tensor, nn

from lightning_dp.parallel.replicas.replicate import Replicas

pytestmark = pytest.mark.usefixtures("on")

# One replica per device; some on the root's device and some elsewhere; all on the root's device.
PLACES = [(0, 1, 2), (0, 1, 0), (0, 0, 0)]


def root_device() -> torch.device:
    return devices_of(1)[0]


def on_root(*shape: int) -> Tensor:
    return torch.randn(shape, device=root_device())


def replicas_of(module: nn.Module, places: Sequence[int] = (0, 1, 2)) -> Replicas:
    """Replicas on the devices of these numbers."""
    devices = devices_of(max(places) + 1)
    return Replicas(module.to(devices[0]), [devices[i] for i in places])


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def call(module: nn.Module, x: Tensor) -> Any:
    """What a replica makes of an input that has been moved to its device."""
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
@pytest.mark.parametrize("places", PLACES)
def test_changes_between_steps_reach_every_replica(change: Any, places: tuple[int, ...]) -> None:
    net = Net()
    replicas = replicas_of(net, places)
    with root_device():  # where the changes make new layers and tensors
        change(net)
    replicas.refresh()
    for other, place in zip(replicas.modules, places, strict=True):
        assert device_of(other) == other.scale.device == devices_of(3)[place]
        assert other.drop.p == net.drop.p
        assert other.training is net.training
        assert other.temperature == net.temperature
        x = on_root(4, 3)
        assert_equal(call(other.linear, x), net.linear(x))
        assert other.linear.weight.requires_grad == net.linear.weight.requires_grad
        assert hasattr(other, "extra") == hasattr(net, "extra")
        assert dict(other.named_buffers()).keys() == dict(net.named_buffers()).keys()
        assert_equal(other.scale, net.scale)


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
    output = call(other.linear, torch.ones(1, 2))
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
    for module, device in zip(replicas.modules[1:], devices_of(3)[1:], strict=True):
        module(torch.ones(3, 2, device=device))
        assert module.mean.tolist() == [1, 1]
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


def test_buffers_made_in_inference_mode_are_always_copied() -> None:
    norm = nn.BatchNorm1d(2).to(root_device())
    with torch.inference_mode():
        norm.running_mean = on_root(2)
    replicas = replicas_of(norm)
    with torch.inference_mode():
        norm.running_mean.fill_(3.0)
    replicas.refresh()
    assert all(m.running_mean.tolist() == [3.0, 3.0] for m in replicas.modules)


def test_weights_made_in_inference_mode_are_replicated() -> None:
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    replicas = replicas_of(net, places=(0, 0))
    replicas.refresh(parameters="trained")
    assert torch.equal(replicas.parameters[1][0].cpu(), net.weight.cpu())


def test_writing_through_data_is_seen_when_everything_is_asked_for() -> None:
    norm = nn.BatchNorm1d(2)
    replicas = replicas_of(norm)
    norm.running_mean.data.fill_(3.0)
    replicas.refresh(parameters="all")
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
    call(other, on_root(2, 5, 3))[0].sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in other.parameters())
    assert all(a is b for a, b in zip(other._flat_weights, other.parameters(), strict=True))


def test_replicas_built_in_inference_mode_can_be_trained() -> None:
    net = nn.BatchNorm1d(2).to(root_device())
    with torch.inference_mode():
        replicas = replicas_of(net, (0, 1, 0))
        replicas.refresh(parameters="all")
    for other in replicas.modules[1:]:
        call(other, on_root(4, 2)).sum().backward()
        assert other.weight.grad is not None


def test_own_attributes_of_parameters_are_kept() -> None:
    net = nn.Linear(2, 2)
    net.weight.no_decay = True
    assert replicas_of(net).modules[1].weight.no_decay


def test_modules_that_cannot_be_replicated_are_named() -> None:
    with pytest.raises(ValueError, match=r"LazyLinear.weight, whose shape is not known yet"):
        replicas_of(nn.Sequential(nn.LazyLinear(3)))


def test_forward_may_write_to_self_without_the_others_seeing_it() -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.cache = x
            return x

    net = Caching()
    replicas = replicas_of(net, (0, 1))
    other = replicas.modules[1]
    other(torch.ones(2, device=devices_of(2)[1]))
    assert not hasattr(net, "cache")
    net(torch.zeros(2, device=root_device()))
    replicas.refresh()
    assert other.cache.tolist() == [0, 0]


def test_attributes_in_slots_follow_the_root() -> None:
    class Slotted(nn.Module):
        __slots__ = ("layer", "scale")

        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.net = nn.Linear(2, 2)
            object.__setattr__(self, "layer", self.net)

    net = Slotted()
    replicas = replicas_of(net)
    net.scale = 3.0
    replicas.refresh()
    other = replicas.modules[1]
    assert other.scale == 3.0 and other.layer is other.net


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


def test_a_hook_in_the_place_of_another_reaches_every_replica() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def keep(self, name: str, *_: Any) -> None:
            self.kept = name

    net = Keeping()
    replicas = replicas_of(net)
    for name in ("first", "second"):
        handle = net.linear.register_forward_hook(partial(net.keep, name))
        replicas.refresh()
        call(replicas.modules[1].linear, torch.ones(1, 2))
        assert replicas.modules[1].kept == name
        handle.remove()


def test_references_that_are_made_later_point_into_the_replica() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    replicas = replicas_of(net)
    net.first, net.weights = [net[0].forward], {"a": net[0].weight}
    replicas.refresh()
    other = replicas.modules[1]
    assert other.first[0].__self__ is other[0] and other.weights["a"] is other[0].weight


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
    """A module and replicas that share its parameters, and which of them lie on its device."""
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


def test_hooks_see_one_sum_in_a_joint_backward_of_shared_parameters() -> None:
    net, replicas, _ = shared((0, 0, 0))
    seen: list[Tensor] = []
    net.first.bias.register_hook(seen.append)
    torch.autograd.backward([call(module, on_root(2, 5, 3)) for module in replicas.modules])
    assert len(seen) == 1 and torch.equal(seen[0], net.first.bias.grad)


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


@torch.no_grad()
def normalise(net: Sharing) -> None:
    net.first.weight.div_(net.first.weight.norm())


def bind(net: Sharing) -> None:
    net.first.weight.data = 2 * net.first.weight.data


def freeze_last(net: Sharing) -> None:
    net.last.requires_grad_(False)


@pytest.mark.parametrize("change", [normalise, bind, freeze_last])
def test_parameters_that_a_step_changes_are_not_shared(change: Any) -> None:
    net, replicas, _ = shared((0, 0, 0))
    before = [p.detach().clone() for p in net.parameters()]
    other = replicas.modules[1]
    replicas.check_shared()
    assert computes_with_the_roots(other, net) == {True}
    change(net)
    replicas.check_shared()
    assert computes_with_the_roots(other, net) == {False}
    for p, value, root in zip(other.parameters(), before, net.parameters(), strict=True):
        assert p.requires_grad
        assert_equal(p, root if change is normalise else value)
    replicas.refresh()
    replicas.share_parameters(True)
    assert computes_with_the_roots(other, net) == {False}, "nor later"


def test_what_is_shared_does_not_depend_on_what_an_earlier_refresh_has_seen() -> None:
    # The last one, after which nothing was shared, knows other versions and fewer parameters.
    net, replicas, _ = shared((0, 0))
    net.first.requires_grad_(False)
    replicas.refresh()
    replicas.share_parameters(False)
    net.first.requires_grad_(True)
    with torch.no_grad():
        net.last.weight.mul_(2)
    replicas.refresh([0])  # nobody else works
    replicas.share_parameters(True)
    assert computes_with_the_roots(replicas.modules[1], net) == {True}
    replicas.check_shared()
    assert computes_with_the_roots(replicas.modules[1], net) == {True}
    normalise(net)
    replicas.check_shared()
    assert computes_with_the_roots(replicas.modules[1], net) == {False}


def test_parameters_that_thaw_are_shared_from_then_on() -> None:
    net, replicas, _ = shared((0, 0))
    other = replicas.modules[1]
    for frozen in (True, False, True, False):
        net.first.requires_grad_(not frozen)
        replicas.refresh()
        replicas.share_parameters(True)
        assert (other.first.weight is net.first.weight) == (not frozen)
        assert other.last.weight is net.last.weight


def test_every_refresh_looks_at_attributes_whoever_works() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    replicas = replicas_of(net)
    replicas.refresh()
    seen = list(replicas.attributes.versions)
    net[1].scale = 2.0
    replicas.refresh([0])
    assert replicas.attributes.versions == [seen[0], seen[1], seen[2] + 1]
    del net[1].scale
    net[1].other = 2.0  # as many as before, with the same values
    replicas.refresh([0])
    assert replicas.attributes.versions == [seen[0], seen[1], seen[2] + 2]


def test_only_trained_parameters_are_shared() -> None:
    net, replicas, _ = shared((0, 0))
    net.first.requires_grad_(False)
    replicas.refresh()
    replicas.share_parameters(True)
    other = replicas.modules[1]
    assert other.first.weight is not net.first.weight and other.last.weight is net.last.weight
    assert other.norms[0] is other.first.weight
