"""Spread calls: what modules get, do to themselves, and leave behind."""

import copy
from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import CPU, EXACT, compare, engine_of, inputs, law, perceptron, update
from support.oracle import assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.forward import ForwardParallel

pytestmark = pytest.mark.usefixtures("on")


LAWS: list[Any] = []


# Arguments


class Affine(nn.Module):
    """Takes its arguments in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: Tensor | None = None, *, scale: Any = 1.0, other: Tensor | None = None
    ) -> Any:
        y = self.layer(torch.ones(1, 4).to(self.layer.weight) if x is None else x) * scale
        return y if other is None else y + other


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (lambda: ((), {"x": inputs()}), (3, 2, 1)),
        (lambda: ((), {"x": inputs(), "other": inputs(seed=2), "scale": 3}), (3, 2, 1)),
        (lambda: ((inputs(),), {"scale": torch.tensor(2.0)}), (3, 2, 1)),
        (lambda: ((inputs(),), {"scale": inputs(1)}), (3, 2, 1)),
        (lambda: ((), {"scale": 2.0}), (1, 0, 0)),
        (lambda: ((inputs(1),), {}), (1, 0, 0)),
    ],
    ids=["keyword", "keywords", "0-dim", "one row", "number", "one sample"],
)
def test_arguments_of_every_kind(arguments: Any, sizes: tuple[int, ...]) -> None:
    def use(net: nn.Module) -> Any:
        args, kwargs = arguments()
        y = net(*args, **kwargs)
        y.square().sum().backward()
        return y.detach()

    assert compare(Affine, use).last_sizes == sizes


def test_scalars_of_the_replicas_come_stacked() -> None:
    """As in nn.DataParallel: one for each replica that had samples, and in the graph."""

    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    net = Loss(4, 1).double()
    one = copy.deepcopy(net)
    with engine_of(net, (4, 2, 0)) as engine, engine.spreading():
        losses = net(inputs())
        losses.sum().backward()
    expected = torch.stack([one(inputs()[:4]), one(inputs()[4:])])
    expected.sum().backward()
    assert_equal_trees(losses.detach(), expected.detach(), "losses", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


# Hooks


def test_hooks_of_the_module_see_whole_batches_and_those_inside_shards() -> None:
    net = perceptron().double()
    seen: dict[str, list[int]] = {"before": [], "after": [], "backward": [], "inside": []}
    net.register_forward_pre_hook(lambda m, args: seen["before"].append(len(args[0])))
    net.register_forward_hook(lambda m, args, y: seen["after"].append(len(y)))
    net.register_full_backward_hook(lambda m, gi, go: seen["backward"].append(len(go[0])))
    net[1].register_forward_hook(lambda m, args, y: seen["inside"].append(len(y)))
    with engine_of(net, executor="inorder") as engine, engine.spreading():
        net(inputs().requires_grad_()).sum().backward()
    assert seen == {"before": [6], "after": [6], "backward": [6], "inside": [3, 2, 1]}


@law(LAWS, perceptron)
def hooks_of_the_module_may_replace_arguments_and_outputs(net: nn.Module) -> Any:
    net.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    net.register_forward_hook(lambda m, args, y: y.cumsum(0))
    net[0].register_forward_hook(lambda m, args, y: y * 3)
    y = net(inputs())
    y.square().sum().backward()
    return y.detach()


# What a forward may do


@law(LAWS, perceptron)
def parameters_may_be_replaced_and_layers_added_between_calls(net: nn.Module) -> Any:
    found = []
    for i in range(3):
        y = net(inputs())
        y.square().sum().backward()
        update(net)
        device = net[0].weight.device
        if i == 0:
            net[0].weight = nn.Parameter(torch.ones_like(net[0].weight))
        if i == 1:
            net.append(nn.Linear(3, 2).to(device, torch.float64))
            with torch.no_grad():
                [p.fill_(0.5) for p in net[3].parameters()]
        found.append(y.detach())
    return found


@law(LAWS, perceptron)
def functional_calls_use_the_given_weights_and_give_them_gradients(net: nn.Module) -> Any:
    inner = {name: p - 0.1 for name, p in net.named_parameters()}
    y = torch.func.functional_call(net, inner, (inputs(),))
    y.square().sum().backward()
    net(inputs()).sum().backward()
    return y.detach()


# Buffers


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())


def shard_by_shard(one: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, list[Any]]:
    """What one device computes for the shards, each with the buffers as they were before."""
    before = copy.deepcopy(dict(one.named_buffers()))
    outputs, after = [], []
    for part in x.split([size for size in sizes if size]):
        for name, buffer in one.named_buffers():
            buffer.data.copy_(before[name])
        outputs.append(one(part))
        after.append(copy.deepcopy(dict(one.named_buffers())))
    return torch.cat(outputs), after


@pytest.mark.parametrize(
    ("buffers", "sizes", "backward"),
    [("first", (0, 6, 4), True), ("mean", (5, 3, 2), True), ("mean", (0, 6, 4), False)],
)
def test_running_statistics_are_those_of_the_first_or_the_mean(
    buffers: str, sizes: tuple[int, ...], backward: bool
) -> None:
    torch.manual_seed(0)
    net = norms().double()
    one = copy.deepcopy(net)
    active = [size for size in sizes if size]
    with engine_of(net, sizes, buffers=buffers) as engine, engine.spreading():
        for step in range(3):
            x = inputs(10, seed=step)
            expected, after = shard_by_shard(one, x, sizes)
            for name, buffer in one.named_buffers():
                mean = sum(b[name] * n for b, n in zip(after, active, strict=True)) / 10
                is_mean = buffers == "mean" and buffer.is_floating_point()
                buffer.data.copy_(mean if is_mean else after[0][name])
            with torch.set_grad_enabled(backward):
                y = net(x)
            if backward:
                y.square().sum().backward()
                expected.square().sum().backward()
            assert_equal_trees(y.detach(), expected.detach(), "outputs", **EXACT)
            assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
            assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
            update(net), update(one)


@law(LAWS, norms)
def evaluation_after_training_uses_the_statistics_of_training(net: nn.Module) -> Any:
    outputs = []
    for seed in range(3):
        with torch.no_grad():  # on all devices alike: in eval mode, then a change of it
            outputs.append(net.eval()(inputs(seed=seed)))
            net[1].running_mean += 1
            outputs.append(net(inputs(seed=seed)))
        net(inputs(seed=seed)).square().sum().backward()
        update(net)
        outputs.append(net(inputs(seed=seed)).detach())
    return outputs


# Submodules


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = perceptron(), nn.Linear(3, 2)
        self.same = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def test_named_submodules_are_spread_too_and_inside_of_a_spread_call_only_once() -> None:
    def use(net: nn.Module) -> Any:
        seen.clear()
        y = net.head(net.encoder(inputs()) * 2) + net(inputs())
        y.square().sum().backward()
        return y.detach()

    seen: list[int] = []

    def make() -> nn.Module:
        net = Pair()
        net.encoder[1].register_forward_hook(lambda m, args, y: seen.append(len(y)))
        return net

    compare(make, use, parallel_modules=["encoder", "head", "encoder"], executor="inorder")
    assert seen == [3, 2, 1, 3, 2, 1]


@law(LAWS, Pair, parallel_modules=["encoder"])
def a_submodule_copied_inside_of_a_step_is_not_spread(net: nn.Module) -> Any:
    """To average weights, say."""

    y = net.encoder(inputs())
    average = copy.deepcopy(net.encoder)
    y.square().sum().backward()
    update(net)
    return average(inputs().to(average[0].weight.device)).detach(), net.encoder(inputs()).detach()


def test_unknown_submodules_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"submodules of Pair, such as \['encoder'.*got 'encodr'"):
        ForwardParallel(
            Pair(),
            [CPU] * 2,
            output_device=CPU,
            split=lambda n: (n, 0),
            parallel_modules=["encodr"],
        )


# Devices


@on_separate
@pytest.mark.parametrize("place", ["cpu", "one", "other"])
def test_inputs_may_be_anywhere_and_get_their_gradients_there(place: str) -> None:
    net = perceptron().double()
    one = copy.deepcopy(net)
    _, one_of_them, _, output_device, other = devices_of(5)
    places = {"one": one_of_them, "other": other}
    with engine_of(net, output_device=output_device) as engine, engine.spreading():
        x = inputs().to(places.get(place, place)).requires_grad_()
        y = net(x)
        y.square().sum().backward()
    expected = inputs().requires_grad_()
    one(expected).square().sum().backward()
    assert y.device == output_device and x.grad.device == torch.device(places.get(place, place))
    assert_equal_trees(x.grad, expected.grad, "gradient", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert {p.grad.device for p in net.parameters()} == {devices_of(1)[0]}


@law(LAWS, lambda: nn.GRU(4, 3), dim=1)
def dim_1_is_cut_and_joined(net: nn.Module) -> Any:
    x = inputs(5, 6).unsqueeze(2).repeat(1, 1, 4).requires_grad_()  # (time, batch, features)
    y, state = net(x)
    (y.exp().mean() + state.square().sum()).backward()
    return y.detach(), state.detach(), x.grad


@pytest.mark.parametrize(("make", "use", "options"), LAWS)
def test_the_numbers_are_those_of_one_device(make: Any, use: Any, options: Any) -> None:
    compare(make, use, **options)
