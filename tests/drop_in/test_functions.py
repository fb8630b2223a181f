"""`scatter`, `replicate`, `parallel_apply` and `gather`, alone and in loops of one's own."""

import copy
from typing import Any

import pytest
import torch
from support.forward_twins import CPU, EXACT, inputs, perceptron, said, update
from support.oracle import assert_equal_trees, devices_of, gradients
from support.waiting import threads_left
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from lightning_dp import gather, parallel_apply, replicate, scatter

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.filterwarnings("ignore:Input #")]

on_k = pytest.mark.parametrize("k", [1, 3])


class Rnn(nn.Module):
    """Its output is a dict with batch first everywhere; a layer of it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.unused = nn.LSTM(2, 3, batch_first=True), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        states = self.rnn(x.view(len(x), 2, 2))[0]
        return {"states": states, "y": states[:, -1]}


def pair(make: Any = perceptron) -> tuple[nn.Module, nn.Module]:
    """Two equal modules, on the CPU and on the first device."""
    torch.manual_seed(0)
    one = make().double()
    return one, copy.deepcopy(one).to(devices_of(1)[0])


@pytest.mark.parametrize("make", [perceptron, Rnn])
@on_k
def test_the_four_together_are_the_module(make: Any, k: int) -> None:
    one, net = pair(make)
    before = {name: id(p) for name, p in net.named_parameters()}
    for seed in range(3):
        x, expected_x = (inputs(7, seed=seed).requires_grad_() for _ in range(2))
        shards = scatter(x, devices_of(k))
        outputs = parallel_apply(replicate(net, devices_of(k)), shards)
        y = gather(outputs, CPU, sizes=[len(shard) for shard in shards])
        expected = one(expected_x)
        for result in (y, expected):
            (result["y"] if isinstance(result, dict) else result).exp().mean().backward()
        assert_equal_trees(y, expected, "outputs", **EXACT)
        assert_equal_trees(x.grad, expected_x.grad, "gradient of the input", **EXACT)
        assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
        update(net), update(one)
    assert {name: id(p) for name, p in net.named_parameters()} == before


# scatter and gather


@on_k
@pytest.mark.parametrize("place", ["cpu", "root"])
def test_scatter_and_its_gradient(k: int, place: str) -> None:
    x = inputs(9).to(devices_of(1)[0] if place == "root" else CPU).requires_grad_()
    shards = scatter(x, tuple(devices_of(k)))
    assert [shard.device for shard in shards] == devices_of(k)
    assert_equal_trees(torch.cat([shard.cpu() for shard in shards]), x.cpu(), "rows", **EXACT)
    if x.device == CPU:
        assert gradcheck(lambda y: tuple(s.cpu() for s in scatter(y, devices_of(k))), (x,))


def test_scatter_gives_idle_devices_none_and_takes_dim_as_the_third_argument() -> None:
    assert [shard is None for shard in scatter(inputs(1), devices_of(3))] == [False, True, True]
    assert [len(s) for s in scatter(inputs(4), devices_of(2), [1, 3])] == [1, 3]
    for dim, shape in ((0, (2, 6)), (1, (4, 3))):
        shards = scatter(inputs(4, 6), devices_of(2), dim)
        assert [tuple(s.shape) for s in shards] == [shape] * 2
        assert_equal_trees(gather(shards, CPU, dim), inputs(4, 6), "rows", **EXACT)


@on_k
@pytest.mark.parametrize("output_device", [-1, "root", "last"])
def test_gather_and_its_gradient(k: int, output_device: Any) -> None:
    named = {"root": devices_of(1)[0], "last": devices_of(k)[-1]}
    output_device = named.get(output_device, output_device)
    for shape, scalars in (((2, 4), "merge"), ((), "stack")):
        leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(k)]

        def joined(*xs: Tensor, scalars: Any = scalars) -> Tensor:
            moved = [x.to(device) for x, device in zip(xs, devices_of(k), strict=True)]
            y = gather(moved, output_device, scalars=scalars)
            assert y.device == (CPU if output_device == -1 else output_device)
            return y.cpu()

        assert joined(*leaves).shape == ((2 * k, 4) if shape else (k,))
        assert gradcheck(joined, leaves) and (k > 1 or gradgradcheck(joined, leaves))


# replicate


@on_k
def test_replicate(k: int) -> None:
    one, net = pair(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    replicas = replicate(net, tuple(devices_of(k)))
    assert replicas[0] is net
    expected = one(inputs())
    for replica, device in zip(replicas, devices_of(k), strict=True):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert len(tensors) == 7 and {t.device for t in tensors} == {device}
        y = replica(inputs().to(device))
        assert_equal_trees(y.cpu(), expected, "outputs", **EXACT)
    # The first one's buffers are the module's, as batch norm needs it.
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    assert all(p.requires_grad for p in net.parameters())


def test_gradients_of_each_replica_and_second_derivatives_reach_the_module() -> None:
    one, net = pair()
    parts = scatter(inputs(), devices_of(3))
    for replica, part, rows in zip(
        replicate(net, devices_of(3)), parts, inputs().split(2), strict=True
    ):
        for module, x in ((replica, part), (one, rows)):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(module(x).exp().sum(), x, create_graph=True)
            slope.square().sum().backward()
        assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


def test_modules_elsewhere_and_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices\[1\]: expected"):
        replicate(perceptron(), ["cpu", "cpu:3"])
    with pytest.raises(ValueError, match=r"Expected the module on cpu.*got '0.weight' on meta"):
        replicate(perceptron().to("meta"), ["cpu", "cpu"])


# parallel_apply


def test_arguments_are_tuples_single_ones_keywords_or_none() -> None:
    class Echo(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs, args and isinstance(args[0], Tensor) and args[0].device

    replicas: list[nn.Module] = [Echo()] * 3
    named = [{"a": 1}, None, {"b": 2}]
    outputs = parallel_apply(replicas, [(1, 2), [1, 2], ()], named, devices_of(3))
    expected = [((1, 2), {"a": 1}), (([1, 2],), {}), ((), {"b": 2})]
    assert [(args, kwargs) for args, kwargs, _ in outputs] == expected
    assert parallel_apply(replicas, [None, 3, None]) == [None, ((3,), {}, False), None]
    for given, kwargs, devices in (([1], None, None), ([1] * 3, [{}], None), ([1] * 3, None, 2)):
        with pytest.raises(ValueError, match="input, kwargs and device per replica, got 3 repl"):
            parallel_apply(replicas, given, kwargs, devices and devices_of(devices))


def test_the_first_error_arrives_as_it_is_with_a_note_and_threads_end() -> None:
    class Failing(nn.Module):
        def forward(self, k: int) -> int:
            if k > 0:
                raise LookupError(f"failed in {k}")
            return k

    with pytest.raises(LookupError, match=r"^failed in 1") as caught:
        parallel_apply([Failing()] * 3, [0, 1, 2])
    assert said(caught.value).startswith("failed in 1\n[in replica 1 on cpu:1, forward, in a ")
    assert not threads_left()
