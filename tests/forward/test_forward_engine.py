"""Spread calls: autograd cannot tell them from calls of a module on one device."""

import copy
import gc
import threading
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from support.device_kinds import as_parameters, not_on_sim, on_separate
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
from support.oracle import assert_equal_trees, devices_of, gradients, names_of
from support.waiting import soon, tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.devices import allocated_memory

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


@pytest.mark.parametrize("sizes", [SIZES, (0, 4, 2), (1,) * 6, (1, 0, 0)])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_outputs_and_gradients_of_parameters_and_inputs(
    sizes: tuple[int, ...], executor: str
) -> None:
    def use(net: nn.Module) -> Any:
        x = inputs(sum(sizes)).requires_grad_()
        y = net(x)
        ((y @ y.T).exp().mean() + y.square().sum()).backward()  # every pair of samples counts
        return y.detach(), x.grad

    compare(perceptron, use, sizes, executor=executor)


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


@law(LAWS, perceptron)
def products_with_the_hessian(net: nn.Module) -> Any:
    parameters = list(net.parameters())
    loss = net(inputs()).exp().mean()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum().cpu() for g in first), parameters)


OWN_GRAPH = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


@law(LAWS, perceptron, marks=OWN_GRAPH)
def a_backward_with_its_own_graph_can_be_differentiated(net: nn.Module) -> Any:
    net(inputs()).exp().mean().backward(create_graph=True)
    kept = [p.grad for p in net.parameters()]
    net.zero_grad()  # sets to None: the graph and .grad refer to each other
    return torch.autograd.grad(sum(g.cpu().square().sum() for g in kept), net[0].weight)


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
def hooks_that_change_a_gradient_change_the_sum(net: nn.Module) -> None:
    net[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    net(inputs()).square().sum().backward()


@law(LAWS, perceptron)
def an_optimizer_in_the_backward_takes_one_step_per_backward(net: nn.Module) -> Any:
    for p in net.parameters():
        optimizer = torch.optim.Adam([p], lr=0.1)
        p.register_post_accumulate_grad_hook(
            lambda p, optimizer=optimizer: optimizer.step() or optimizer.zero_grad()
        )
    losses = []
    for _ in range(3):
        loss = net(inputs()).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


@law(LAWS, Branches)
def parameters_without_use_keep_none_and_adamw_leaves_them(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    for second in (False, False, True):
        optimizer.zero_grad()
        net(inputs(), second=second).square().mean().backward()
        optimizer.step()
    assert net.first.weight.grad is None and net.unused.weight.grad is None


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


@law(LAWS, perceptron)
def a_frozen_part_passes_gradients_to_its_inputs(net: nn.Module) -> Any:
    x = inputs().requires_grad_()
    net.requires_grad_(False)(x).square().sum().backward()
    return x.grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.kept = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) + x @ self.kept[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        outputs, state = self.rnn(x.view(len(x), 2, 2))
        return {"outputs": outputs, "state": state.transpose(0, 1)}


@pytest.mark.parametrize(
    "make",
    [
        Tied,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5).eval()),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    ],
    ids=["tied", "weight norm", "orthogonal", "spectral norm", "dropout in eval", "attention"],
)
@pytest.mark.usefixtures("weight_norms")
def test_modules_with_weights_of_a_special_kind(make: Any) -> None:
    def use(net: nn.Module) -> Any:
        outputs = []
        for _ in range(3):
            x = inputs()
            y = (
                net(x[:, None], x[:, None], x[:, None])[0]
                if hasattr(net, "in_proj_bias")
                else net(x)
            )
            y.exp().mean().backward()
            update(net)
            outputs.append(y.detach())
        return outputs

    compare(make, use)


@law(LAWS, Recurrent)
def recurrent_layers_and_their_states(net: nn.Module) -> Any:
    for _ in range(3):
        y = net(inputs())
        (y["outputs"].exp().mean() + y["state"].square().sum()).backward()
        update(net)
    return y["outputs"].detach(), y["state"].detach()


@not_on_sim  # which have no sparse tensors
def test_sparse_gradients() -> None:
    def use(net: nn.Module) -> Any:
        net(torch.tensor([1, 1, 2, 3, 9, 1])).square().sum().backward()
        gradient, net.weight.grad = net.weight.grad, None
        assert gradient.is_sparse
        return gradient.to_dense()

    compare(lambda: nn.Embedding(10, 3, sparse=True), use)


# Checkpoints


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


# Without reentrance, torch lets the backward threads of several devices repeat the call at once.
@pytest.mark.parametrize(
    ("on", "reentrant"),
    [pytest.param(*p.values, True, marks=p.marks) for p in as_parameters()] + [("cpu", False)],
    indirect=["on"],
)
def test_checkpoints_around_a_spread_call(reentrant: bool) -> None:
    """Equal shards: tensors saved in another order would fit, and be wrong."""

    def use(net: nn.Module) -> Any:
        gradients_of_inputs = []
        for _ in range(3):
            x = inputs().requires_grad_()
            checkpoint(net, x, use_reentrant=reentrant).exp().sum().backward()
            gradients_of_inputs.append(x.grad)
        return gradients_of_inputs

    compare(perceptron, use, (2, 2, 2))


# Graphs that live on


@law(LAWS, perceptron)
def several_calls_before_one_backward(net: nn.Module) -> Any:
    a, b = net(inputs(seed=1)), net(inputs(n=4, seed=2))
    with torch.no_grad():
        c = net(inputs(seed=3))
    (a @ b.T @ b @ c.T).exp().mean().backward()
    return a.detach(), c


@law(LAWS, perceptron)
def a_graph_may_be_walked_twice_if_it_is_kept(net: nn.Module) -> None:
    loss = net(inputs()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@law(LAWS, perceptron)
def weights_written_before_the_backward_that_needs_them_are_noticed(net: nn.Module) -> None:
    loss = net(inputs()).square().mean()
    with torch.no_grad():
        net[2].weight.mul_(2)
    net(inputs())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    net.zero_grad()


@pytest.mark.parametrize("training", [True, False])
def test_trained_weights_written_without_a_trace_are_seen_by_the_next_call(training: bool) -> None:
    def use(net: nn.Module) -> Any:
        net.train(training)
        outputs = []
        for i in range(3):
            y = net(inputs())
            y.square().mean().backward()
            net[i % 2 * 2].weight.data.clamp_(-0.1 * (i + 1), 0.1)
            outputs.append(y.detach())
        net[0].weight.data = net[0].weight.data * 3
        return [*outputs, net(inputs()).detach()]

    compare(perceptron, use)


@law(LAWS, perceptron)
def frozen_weights_written_without_a_trace_are_seen_by_the_next_call(net: nn.Module) -> Any:
    """As teachers are averaged: `teacher.data.mul_(m).add_((1 - m) * student.data)`."""

    net[0].requires_grad_(False)
    net(inputs()).square().mean().backward()
    net[0].weight.data.mul_(0.9).add_(0.1)
    return net(inputs()).detach()


@law(LAWS, lambda: nn.Embedding(10, 3, max_norm=0.1))
def embeddings_of_limited_norm_shorten_the_rows_of_all_shards(net: nn.Module) -> Any:
    return net(torch.arange(6)).detach()


@on_separate
def test_memory_does_not_grow(on: str) -> None:
    """Every device counts its own; a step leaves nothing behind for the next."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    found: list[tuple[int, list[int]]] = []

    def alive() -> tuple[int, list[int]]:
        return tensors(), [allocated_memory(d) for d in devices_of(3)]

    def as_at_first() -> bool:
        objects, used = alive()
        return objects <= found[0][0] and used == found[0][1]

    with engine_of(net, (2, 2, 2)) as engine, engine.spreading():
        for step in range(60):
            y = net(inputs())
            (slope,) = torch.autograd.grad(y.square().sum(), net[0].weight, create_graph=True)
            (y.sum() + slope.cpu().square().sum()).backward()
            del y, slope
            update(net)
            if step == 19:
                engine.executor.rest()
                found.append(alive())
        assert soon(as_at_first), (found, alive())


@pytest.mark.parametrize("changes", [False, True])
def test_a_closed_engine_lets_go_of_its_replicas(changes: bool) -> None:
    """Their parameters hold a graph that leads back to them, which nobody collects."""
    seen: list[weakref.ref[nn.Module]] = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(self))
            return super().forward(x)

    net = Net(4, 2).double()
    with engine_of(net) as engine, engine.spreading():
        for _ in range(3):
            net(inputs()).sum().backward()
        if changes:
            net.weight = nn.Parameter(torch.zeros_like(net.weight))
    del engine
    # Threads of autograd let go of their work a moment after its end.
    assert soon(lambda: gc.collect() >= 0 and {ref() for ref in seen} <= {net, None})


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


@law(LAWS, perceptron)
def an_error_in_a_backward_arrives_and_training_goes_on(net: nn.Module) -> None:
    y = net(inputs())
    y.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    handle = net[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(inputs()).sum().backward()
    handle.remove()
    net.zero_grad()
    net(inputs()).exp().sum().backward()


# Copies of the module


def doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(layer, x)


def test_an_attribute_forward_of_the_users_own_is_spread_and_copied() -> None:
    def make() -> nn.Module:
        net = nn.Linear(4, 2)
        net.forward = MethodType(doubled, net)
        return net

    def use(net: nn.Module) -> Any:
        y = net(inputs())
        y.square().sum().backward()
        twin = copy.deepcopy(net)
        update(net)
        return y.detach(), twin(inputs().to(net.weight.device)).detach()

    compare(make, use)


# Checkpoints around spread calls, whose backward is in a thread of each device


@pytest.mark.parametrize("way", CHECKPOINTED)
def test_checkpoints_around_spread_calls_are_computed_again_once(way: str) -> None:
    """The threads of several devices ask for their tensors at the same time."""
    compare(layers, CHECKPOINTED[way], sizes=(2, 2, 1, 1))


@pytest.mark.parametrize(("make", "use", "options"), LAWS)
def test_the_numbers_are_those_of_one_device(make: Any, use: Any, options: Any) -> None:
    compare(make, use, **options)
