"""Spread calls: autograd cannot tell them from calls of a module on one device."""

import copy
import threading
from typing import Any

import pytest
import torch
from support.device_kinds import not_on_sim
from support.forward_twins import (
    CHECKPOINTED,
    EXACT,
    SIZES,
    compare,
    engine_of,
    inputs,
    law,
    layers,
    perceptron,
    said,
    update,
)
from support.oracle import assert_equal_trees, gradients, names_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("on")


LAWS: list[Any] = []


class Branches(nn.Module):
    """Uses one of two layers, as told, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        return torch.tanh(self.second(x) if second else self.first(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        hidden = checkpoint(lambda t: self.inner(t).tanh(), x, use_reentrant=self.reentrant)
        return self.outer(hidden)


def outputs_and_gradients(net: nn.Module) -> Any:
    """Of parameters and inputs, over which a loss takes every pair of samples."""
    x = inputs().requires_grad_()
    y = net(x)
    ((y @ y.T).exp().mean() + y.square().sum()).backward()
    return y.detach(), x.grad


for _sizes, _executor in [
    (SIZES, "threads"),
    ((0, 4, 2), "inorder"),
    ((1,) * 6, "threads"),
    ((6, 0, 0), "inorder"),
]:
    law(LAWS, perceptron, id=str(_sizes), sizes=_sizes, executor=_executor)(outputs_and_gradients)


@law(LAWS, perceptron)
def two_calls_before_a_backward_and_two_backwards_of_a_call(net: nn.Module) -> None:
    first, second = net(inputs(seed=1)), net(inputs(7, seed=2))
    first.square().sum().backward(retain_graph=True)
    (second.exp().sum() + first.square().sum()).backward()


@law(LAWS, Branches)
def gradients_of_chosen_parameters_and_inputs(net: nn.Module) -> Any:
    x = inputs().requires_grad_()
    loss = net(x).square().mean()
    wanted = [net.first.weight, x, net.unused.weight]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, wanted, retain_graph=True)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


@law(LAWS, perceptron)
def second_derivatives_with_respect_to_inputs_and_parameters(net: nn.Module) -> Any:
    x = inputs().requires_grad_()
    y = net(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    (y + penalty).backward()
    return slope.detach(), x.grad


@law(LAWS, Branches)
def hooks_of_parameters_run_once_with_the_sum_and_only_if_they_are_used(net: nn.Module) -> Any:
    seen: list[Any] = []
    for name, p in net.named_parameters():
        p.register_hook(lambda g, name=name: seen.append((name, "gradient", g.cpu())))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, "parameter", p.grad.cpu().clone()))
        )
    for second in (False, True):
        net(inputs(), second=second).square().sum().backward()
    return sorted(seen, key=lambda call: call[:2])


@law(LAWS, perceptron)
def freezing_and_unfreezing_between_calls(net: nn.Module) -> Any:
    found = []
    for frozen in (net[0], net[2], None, net):
        net.requires_grad_(True)
        if frozen is not None:
            frozen.requires_grad_(False)
        y = net(inputs())
        found.append(y.requires_grad)
        if y.requires_grad:
            y.square().mean().backward()
            found.append(gradients(net))
            update(net)
    return found


@not_on_sim  # which have no sparse tensors
def test_sparse_gradients() -> None:
    def use(net: nn.Module) -> Any:
        net(torch.tensor([1, 1, 2, 3, 9, 1])).square().sum().backward()
        gradient, net.weight.grad = net.weight.grad, None
        assert gradient.is_sparse
        return gradient.to_dense()

    compare(lambda: nn.Embedding(10, 3, sparse=True), use)


# Views of an input that are made without gradients do not require them.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("between", ["no_grad", "grad", "inference"])
def test_checkpoints_inside_of_forward(reentrant: bool, between: str) -> None:
    """A reentrant one runs its part again in the backward, after other calls perhaps."""

    def use(net: nn.Module) -> Any:
        x = inputs().requires_grad_()
        y = net(x)
        if between == "grad":
            net(2 * x)
        else:
            with torch.inference_mode() if between == "inference" else torch.no_grad():
                net(inputs().requires_grad_())
        y.square().sum().backward()
        return x.grad

    compare(lambda: Checkpointed(reentrant), use)


# Equal shards: tensors saved in another order would fit, and be wrong.
@law(LAWS, perceptron, sizes=(2, 2, 2))
def a_reentrant_checkpoint_around_a_spread_call(net: nn.Module) -> Any:
    gradients_of_inputs = []
    for _ in range(3):
        x = inputs().requires_grad_()
        checkpoint(net, x, use_reentrant=True).exp().sum().backward()
        gradients_of_inputs.append(x.grad)
    return gradients_of_inputs


# Graphs that live on


@law(LAWS, perceptron)
def weights_written_without_a_trace_are_seen_by_the_next_call(net: nn.Module) -> Any:
    """Trained ones (clamped), and frozen ones (averaged, as teachers are)."""
    outputs = []
    for frozen in (False, True):
        net[0].requires_grad_(not frozen)
        y = net(inputs())
        y.square().mean().backward()
        net[0].weight.data.clamp_(-0.1, 0.1)
        outputs += [y.detach(), net(inputs()).detach()]
        net[2].weight.data = net[2].weight.data * 3
    return outputs


# Failures


def test_an_error_in_a_replica_arrives_once_and_training_goes_on() -> None:
    class Failing(nn.Linear):
        armed = True

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and len(x) == 1:
                raise LookupError("no such word")
            return super().forward(x)

    def use(net: nn.Module) -> None:
        net(inputs()).square().mean().backward()

    net = Failing(4, 2).double()
    one = copy.deepcopy(net)
    with engine_of(net) as engine:
        with engine.spreading(), pytest.raises(LookupError, match=r"^no such word") as caught:
            net(inputs())
        note = f"in replica 2 on {names_of(3)[2]}, forward, samples 5 to 5 of 6"
        assert said(caught.value).count(note) == said(caught.value).count("in replica") == 1
        assert "forward" not in net.__dict__
        net.armed = one.armed = False
        with engine.spreading():
            use(net)
    use(one)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert not [t for t in threading.enumerate() if t.name.startswith("dp-")]


# Checkpoints around spread calls: the threads of several devices ask for their tensors at once.
for _way, _use in CHECKPOINTED.items():
    law(LAWS, layers, id=f"a checkpoint, {_way}", sizes=(2, 2, 1, 1))(_use)


# Arguments


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


@law(LAWS, lambda: Scaled(4, 4))
def one_row_beside_many_goes_to_all(net: nn.Module) -> Any:
    y = net(inputs(), scale=inputs(1))
    y.square().sum().backward()
    return y.detach()


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


class Moved(nn.Module):
    """A layer whose result is scaled by a buffer, which stays a leaf where the module is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float64))
        self.scale.requires_grad_()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        self.scale = self.scale.detach().requires_grad_()
        return moved

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale.exp()


class Cached(Moved):
    """A call leaves what it computes, with its graph, and the next one reads the value."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.layer.weight.exp().mean(1) + 0.1 * self.scale.detach()
        return torch.tanh(self.layer(x)) * self.scale


@law(LAWS, Moved, sizes=(0, 4, 2), executor="inorder")
def a_buffer_that_is_trained_and_its_hooks_see_the_sum_once(net: Any) -> Any:
    seen: list[Any] = []
    net.scale.register_hook(lambda g: seen.append(g.cpu()) or 2 * g)
    net.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.cpu().clone()))
    for seed in range(3):
        (net(inputs(seed=seed)) - 1).square().mean().backward()
        with torch.no_grad():
            net.scale -= 0.1 * net.scale.grad
    return seen, net.scale.grad.cpu()


@law(LAWS, Moved)
def a_buffer_that_is_computed_of_a_parameter(net: Any) -> Any:
    for seed in range(3):
        net.scale = net.layer.weight.exp().mean(1)
        (net(inputs(seed=seed)) - 1).square().mean().backward()
        update(net)
    net.scale = net.scale.detach()


@law(LAWS, Cached)
def a_buffer_that_the_last_call_has_computed(net: Any) -> Any:
    for seed in range(3):
        (net(inputs(seed=seed)) - 1).square().mean().backward()
        update(net)
    net.scale = net.scale.detach()


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


@law(LAWS, lambda: nn.GRU(4, 3), dim=1)
def dim_1_is_cut_and_joined(net: nn.Module) -> Any:
    x = inputs(5, 6).unsqueeze(2).repeat(1, 1, 4).requires_grad_()  # (time, batch, features)
    y, state = net(x)
    (y.exp().mean() + state.square().sum()).backward()
    return y.detach(), state.detach(), x.grad


@pytest.mark.parametrize(("make", "use", "options"), LAWS)
def test_the_numbers_are_those_of_one_device(make: Any, use: Any, options: Any) -> None:
    compare(make, use, **options)
