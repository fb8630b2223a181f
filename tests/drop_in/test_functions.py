"""The functions beside `DataParallel`, with what torch's own tests ask of theirs."""

import copy
import io
from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import CPU, EXACT, inputs, said
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from lightning_dp import data_parallel, gather, parallel_apply, replicate, scatter

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.filterwarnings("ignore:Input #")]

on_k = pytest.mark.parametrize("k", [1, 2, 3])


class Net(nn.Linear):
    def forward(self, x: Any = None, scale: Any = 1.0) -> Tensor:
        return super().forward(self.weight.new_ones(5, 4) if x is None else x) * scale


def pair() -> tuple[nn.Module, nn.Module]:
    """Two equal modules, on the CPU and on the first device."""
    torch.manual_seed(0)
    one = Net(4, 3).double()
    return one, copy.deepcopy(one).to(devices_of(1)[0])


@on_k
def test_data_parallel(k: int) -> None:
    one, net = pair()
    calls: list[tuple[Any, Any]] = [
        (inputs(), None),
        ((inputs(),), {"scale": 3.0}),
        ((inputs(), 2.0), None),
        (None, None),
        (None, {"x": inputs(3)}),
    ]
    for args, kwargs in calls:
        y = data_parallel(net, args, devices_of(k), "cpu", module_kwargs=kwargs)
        positional = () if args is None else args if isinstance(args, tuple) else (args,)
        expected = one(*positional, **kwargs or {})
        assert_equal_trees(y, expected, "outputs", **EXACT)
        y.exp().sum().backward(), expected.exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    turned = data_parallel(nn.Identity(), inputs(4, 4).T.contiguous(), devices_of(k), -1, dim=1)
    assert_equal_trees(turned, inputs(4, 4).T, "outputs", **EXACT)


@on_separate
def test_the_order_of_the_devices_decides_where_outputs_are() -> None:
    one, net = pair()
    for ids in ((0, 1), (1, 0), (2,), range(3)):
        net.to(devices_of(3)[ids[0]])
        y = data_parallel(net, inputs(), ids)
        assert y.get_device() == ids[0]
        assert_equal_trees(y.cpu(), one(inputs()), "outputs", **EXACT)


@on_k
@pytest.mark.parametrize("place", ["cpu", "root"])
def test_scatter_and_its_gradient(k: int, place: str) -> None:
    x = inputs(9).to(devices_of(1)[0] if place == "root" else CPU).requires_grad_()
    shards = scatter(x, tuple(devices_of(k)))
    assert [shard.device for shard in shards] == devices_of(k)
    assert_equal_trees(torch.cat([shard.cpu() for shard in shards]), x.cpu(), "rows", **EXACT)
    if x.device == CPU:
        together = lambda y: tuple(s.cpu() for s in scatter(y, devices_of(k)))
        assert gradcheck(together, (x,)) and (k > 2 or gradgradcheck(together, (x,)))


def test_scatter_gives_idle_devices_none_and_takes_dim_as_the_third_argument() -> None:
    assert [shard is None for shard in scatter(inputs(1), devices_of(3))] == [False, True, True]
    assert list(map(len, scatter(inputs(3), devices_of(2)))) == [2, 1]
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
        assert gradcheck(joined, leaves) and (k != 2 or gradgradcheck(joined, leaves))
    loss = gather([leaf.detach()[()] for leaf in (torch.ones(()), torch.zeros(()))], "cpu")
    assert loss.shape == () and loss == 0.5


@on_k
@pytest.mark.parametrize("detach", [False, True])
def test_replicate(k: int, detach: bool) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    net = copy.deepcopy(one).to(devices_of(1)[0])
    replicas = replicate(net, tuple(devices_of(k)), detach=detach)
    assert (replicas[0] is net) is not detach
    expected = one(inputs())
    for replica, device in zip(replicas, devices_of(k), strict=True):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert len(tensors) == 7 and {t.device for t in tensors} == {device}
        y = replica(inputs().to(device))
        assert y.requires_grad is not detach
        assert_equal_trees(y.cpu(), expected, "outputs", **EXACT)
    # The first one's buffers are the module's, as batch norm needs it.
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    assert all(p.requires_grad for p in net.parameters())
    data = io.BytesIO()
    torch.save(replicas, data)
    data.seek(0)
    loaded = torch.load(data, weights_only=False)[-1].state_dict()
    assert loaded.keys() == net.state_dict().keys()


def test_parallel_apply_takes_tuples_and_single_arguments(on: str) -> None:
    modules = [nn.Linear(4, 5).to(device) for device in devices_of(2)]
    xs = [inputs(2, seed=k).float().to(device) for k, device in enumerate(devices_of(2))]
    with torch.autocast(accelerator(), torch.bfloat16):
        expected = [module(x) for module, x in zip(modules, xs, strict=True)]
        for arguments in ([(x,) for x in xs], xs):
            outputs = parallel_apply(modules, arguments, None)
            assert_equal_trees(outputs, expected, "outputs", atol=0.0, rtol=0.0)


class Where(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.device, torch.zeros((), device=x.device.type).device


def test_parallel_apply_is_told_the_devices() -> None:
    xs = [inputs().to(device) for device in devices_of(2)]
    found = parallel_apply([Where(), Where()], xs, None, devices_of(2))
    assert found == [(device, device) for device in devices_of(2)]
    with pytest.raises(ValueError, match="Expected as many devices as replicas, got 1 and 2"):
        parallel_apply([Where(), Where()], xs, None, devices_of(1))
    with pytest.raises(AttributeError, match="no attribute 'device'") as caught:
        parallel_apply([Where()] * 2, [(None,), (None,)], devices=devices_of(2))
    assert "in replica 0 on" in said(caught.value)
