"""What torch's own tests ask of `nn.DataParallel` and its functions, asked of ours.

The behaviours are those that torch's public test suite names; the code is ours. Everything runs on
the CPU and on simulated devices, where it says K on 2, 3 and 8 of them. Documented differences,
each with its test here:

- A module that lies elsewhere is moved to the first device, with a warning, not refused.
- An exception in a replica keeps its type and text; the replica is in a note.
- Dicts with other keys on some replicas are gathered with all keys, not refused.
- `gather` averages 0-dim tensors unless told `scalars="stack"`; the wrapper stacks them, as there.
- `zero_grad()` inside of `forward` clears the module's gradients, as without the wrapper; there it
  has no effect. Both warn: parameters of replicas are no leaves.
- `scatter` cuts evenly, 2 and 1 of 3 rows on 2 devices, and gives None to idle devices.
- The first of `replicate`'s modules is the module itself, unless they are detached.
- A parameter that a call did not use keeps the gradient None.
"""

import copy
import gc
import io
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import CPU, EXACT, inputs, said
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from lightning_dp import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.filterwarnings("ignore:Input #")]

on_k = pytest.mark.parametrize("k", [2, 3, pytest.param(8, marks=pytest.mark.slow)])


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal modules, on the CPU and on the first device."""
    torch.manual_seed(0)
    one = make()
    return one, copy.deepcopy(one).to(devices_of(1)[0])


def linear() -> nn.Module:
    return nn.Linear(10, 5).double()


class Calls(nn.Module):
    """A module without weights."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def root(tensor: Tensor) -> Tensor:
    """On the first device."""
    return tensor.to(devices_of(1)[0])


# The wrapper and the function


@on_k
def test_outputs_and_gradients_are_those_of_the_module(k: int) -> None:
    one, net = pair(linear)
    expected = one(inputs(20, 10))
    expected.sum().backward()
    for place in devices_of(k):
        for call in (partial(data_parallel, net, device_ids=tuple(devices_of(k))), None):
            net.zero_grad()
            wrapper = DataParallel(net, devices_of(k))
            y = (call or wrapper)(inputs(20, 10).to(place))
            y.sum().backward()
            wrapper.close()
            assert y.device == devices_of(1)[0]
            assert_equal_trees(y.cpu(), expected, "outputs", **EXACT)
            assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


@on_separate
def test_the_order_of_the_devices_decides_where_outputs_are() -> None:
    one, net = pair(linear)
    devices = devices_of(3)
    for ids in ((0, 1), (1, 0), (2,), range(3)):
        net.to(devices[ids[0]]).zero_grad()
        y = data_parallel(net, inputs(20, 10), ids)
        assert y.get_device() == ids[0]
        y.sum().backward()
        one.zero_grad()
        one(inputs(20, 10)).sum().backward()
        assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


@on_k
def test_several_inputs_numbers_and_names(k: int) -> None:
    def call(a: Tensor, b: Tensor, scale: float, c: Tensor | None = None) -> Tensor:
        return scale * (a * b) if c is None else scale * (a * b + c)

    c = inputs(5, 5, seed=3)
    for named in ({}, {"c": c}):
        a, b = (inputs(5, 5, seed=seed).requires_grad_() for seed in (1, 2))
        expected = call(a, b, 1.5, **named)
        slopes = torch.autograd.grad(expected.sum(), (a, b))
        for devices in (devices_of(k), devices_of(k)[::-1], devices_of(1)):
            wrapper = DataParallel(Calls(call), devices)
            for y in (
                wrapper(a, b, 1.5, **named),
                data_parallel(Calls(call), (a, b, 1.5), devices, module_kwargs=named),
            ):
                assert_equal_trees(y.cpu(), expected, "outputs", **EXACT)
                own = torch.autograd.grad(y.sum(), (a, b))
                assert_equal_trees(own, slopes, "gradients", **EXACT)
            wrapper.close()


@on_k
@pytest.mark.parametrize("unused", [[], {}, ()], ids=str)
def test_named_inputs_alone_with_something_empty_beside(k: int, unused: Any) -> None:
    class Net(nn.Linear):
        def forward(self, input: Any) -> Tensor:
            return super().forward(input["data"])

    one, net = pair(lambda: Net(10, 5).double())
    wrapper = DataParallel(net, devices_of(k))
    batch = {"data": inputs(20, 10), "unused": unused}
    assert_equal_trees(wrapper(input=batch).cpu(), one(input=batch), "outputs", **EXACT)
    wrapper.close()


@on_k
def test_no_inputs_at_all(k: int) -> None:
    wrapper = DataParallel(Calls(lambda: torch.ones(3)), devices_of(k))
    assert_equal_trees(wrapper().cpu(), torch.ones(3), "outputs", **EXACT)
    wrapper.close()


@on_k
def test_nested_inputs_and_outputs_keep_their_types(k: int) -> None:
    def nested(x: Tensor) -> Any:
        both = (x.sin(), x.cos(), [x.add(1)])
        return [x, both, x, OrderedDict(a=x, b=[x.sin()])]

    for n in (2, 5, 20):
        x = inputs(n, 3)
        y = data_parallel(Calls(nested), root(x), devices_of(k), "cpu")
        assert_equal_trees(y, nested(x), "outputs", **EXACT)
        types = [list, Tensor, tuple, list, OrderedDict, list]
        found = [y, y[0], y[1], y[1][2], y[3], y[3]["b"]]
        assert list(map(type, found)) == types and type(y[1][2][0]) is type(y[3]["b"][0]) is Tensor
        arguments = (x.cos(), (x.sin(), x), x.sin())
        z = data_parallel(Calls(lambda *args: args[1][0]), arguments, devices_of(k), "cpu")
        assert_equal_trees(z, x.sin(), "outputs", **EXACT)


@on_k
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16], ids=str)
def test_every_dtype(k: int, dtype: torch.dtype) -> None:
    one, net = pair(lambda: nn.Linear(10, 5).to(dtype))
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    x = inputs(20, 10).to(dtype)
    y, expected = wrapper(x), one(x)
    assert y.dtype == dtype
    close = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 1e-3}
    assert_equal_trees(y.detach(), expected.detach(), "outputs", **close)
    wrapper.close()


@on_k
def test_complex_parameters(k: int) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.cfloat) @ self.weight

    one, net = pair(Complex)
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for module in (one, wrapper):
        module(inputs(7)).abs().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", atol=1e-5, rtol=1e-5)
    wrapper.close()


@on_k
def test_no_grad_holds_in_replicas(k: int) -> None:
    seen: list[bool] = []

    def call(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    with torch.no_grad():
        data_parallel(Calls(call), inputs(20), devices_of(k))
    assert seen == [False] * k
    data_parallel(Calls(call), inputs(20), devices_of(k))
    assert seen[k:] == [True] * k


@on_k
def test_recurrent_layers_that_flatten_their_weights(k: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 8, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Any:
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    one, net = pair(lambda: Net().double())
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    with torch.no_grad():
        wrapper(inputs(2, 24).view(2, 4, 6))
    for module in (one, wrapper):
        optimizer = torch.optim.SGD(module.parameters(), lr=10)
        module(torch.ones(4, 4, 6).double()).square().mean().backward()
        optimizer.step()
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    wrapper.close()


@on_k
def test_a_gradient_penalty(k: int) -> None:
    one, net = pair(lambda: nn.Linear(4, 1).double())
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for module in (one, wrapper):
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        y = module(x)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        slope.mean().backward()
    assert_equal_trees(net.weight.grad.cpu(), torch.full((1, 4), 0.25).double(), "slope", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    wrapper.close()


@pytest.mark.parametrize(
    "on", ["cpu"], indirect=True
)  # the simulated devices have no sparse layout
@on_k
def test_sparse_gradients(k: int) -> None:
    one, net = pair(lambda: nn.Embedding(10, 5, sparse=True).double())
    rows = torch.randint(10, (20, 5), generator=torch.Generator().manual_seed(0))
    wrapper = DataParallel(net, devices_of(k))
    for module in (one, wrapper):
        module(rows).sum().backward()
    assert net.weight.grad.is_sparse
    assert_equal_trees(net.weight.grad.to_dense(), one.weight.grad.to_dense(), "grad", **EXACT)
    wrapper.close()


@on_separate
@pytest.mark.parametrize("places", [("cpu", "cpu"), ("root", "other"), ("other", "other")], ids=str)
def test_a_module_elsewhere_is_moved(places: tuple[str, str]) -> None:
    first, second = linear(), nn.Linear(5, 2).double()
    root, other = devices_of(2)
    named = {"cpu": "cpu", "root": root, "other": other}
    net = nn.Sequential(first.to(named[places[0]]), second.to(named[places[1]]))
    with pytest.warns(UserWarning, match=f"moved to {root}"):
        assert data_parallel(net, inputs(6, 10), [0, 1]).device == root
    assert {p.device for p in net.parameters()} == {root}
    data_parallel(net, inputs(6, 10), [0, 1])  # without a warning


@on_separate
def test_the_wrapper_moves_its_module() -> None:
    wrapper = DataParallel(linear(), [1, 0])
    assert wrapper.to(devices_of(2)[1])(inputs(6, 10)).get_device() == 1
    wrapper.close()


def test_device_arguments_are_devices_or_ids(on: str) -> None:
    one, net = pair(linear)
    x = inputs(20, 10).requires_grad_()
    for ids, place in ((devices_of(2), devices_of(1)[0]), (tuple(map(str, devices_of(2))), "cpu")):
        y = data_parallel(net, x, device_ids=ids, output_device=place)
        assert_equal_trees(y.cpu(), one(x), "outputs", **EXACT)


def test_a_call_leaves_no_garbage_in_circles() -> None:
    net = linear().to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(2), executor="inorder")
    for _ in range(3):  # which build what is kept, and learn which dimension counts samples
        wrapper(inputs(4, 10)).sum().backward()
    gc.collect()
    gc.collect()  # what finalizers leave of earlier tests: torch.cuda.memory_stats makes circles
    wrapper(inputs(4, 10))
    assert gc.collect() == 0
    wrapper.close()


@on_k
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_zero_grad_in_a_forward_clears_what_there_was(k: int) -> None:
    class Clears(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return super().forward(x)

    one, net = pair(lambda: Clears(4, 2).double())
    wrapper = DataParallel(net, devices_of(k), output_device="cpu", executor="inorder")
    for seed in range(3):
        for module in (one, wrapper):
            module(inputs(8, seed=seed)).exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    wrapper.close()


@on_k
def test_a_forward_under_autocast_of_its_own(on: str, k: int) -> None:
    class Half(nn.Linear):
        @torch.autocast(accelerator(), dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    wrapper = DataParallel(Half(8, 8).to(devices_of(1)[0]), devices_of(k))
    assert wrapper(inputs(8, 8).float()).dtype == torch.bfloat16
    wrapper.close()


FORMATS = [
    [torch.contiguous_format] * 4,
    [torch.channels_last] * 2 + [torch.contiguous_format] * 2,
    [torch.channels_last] * 4,
]


@pytest.mark.usefixtures("one_thread")
@on_k
@pytest.mark.parametrize("formats", FORMATS, ids=["contiguous", "mixed", "channels_last"])
@pytest.mark.parametrize("dtypes", [[torch.float] * 4, [torch.float] * 2 + [torch.bfloat16] * 2])
def test_gradients_have_the_layout_of_their_parameters(k: int, formats: Any, dtypes: Any) -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x.to(layer.weight.dtype))
            return x.float()

    sizes = [(4, 6), (6, 5), (5, 6), (6, 4)]
    layers = zip(sizes, formats, dtypes, strict=True)
    one, net = pair(
        lambda: Net(*(nn.Conv2d(*s, 2).to(memory_format=f, dtype=d) for s, f, d in layers))
    )
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    x = inputs(8, 4 * 8 * 8).float().view(8, 4, 8, 8)
    close = 1e-5 if dtypes[-1] == torch.float else 3e-2
    for _ in range(2):
        for module in (one, wrapper):
            module.zero_grad(set_to_none=False)
            F.mse_loss(module(x), torch.zeros(8, 4, 4, 4)).backward()
        for layer, format in zip(net, formats, strict=True):
            assert layer.weight.grad.is_contiguous(memory_format=format)
        assert_equal_trees(gradients(net), gradients(one), "gradients", atol=close, rtol=close)
        with torch.no_grad():
            for p in [*one.parameters(), *net.parameters()]:
                p.sub_(p.grad, alpha=0.1)
    wrapper.close()


def test_parameters_without_a_shape_are_refused() -> None:
    wrapper = DataParallel(nn.LazyLinear(4, device=devices_of(1)[0]), devices_of(2))
    with pytest.raises(ValueError, match="Expected initialised parameters, got LazyLinear"):
        wrapper(inputs())
    wrapper.close()


@on_k
def test_lists_and_dicts_of_parameters(k: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList([torch.randn(4) for _ in range(3)])
            self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})

        def forward(self, x: Tensor) -> Tensor:
            assert len(list(self.parameters())) == 5
            return sum(x * row for row in self.rows) + self.named["a"] * self.named["b"] * x

    one, net = pair(lambda: Net().double())
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    for module in (one, wrapper):
        module(inputs(9)).exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    wrapper.close()


# The functions


@on_k
@pytest.mark.parametrize("place", ["cpu", "root"])
def test_scatter(k: int, place: str) -> None:
    x = inputs(9).to(devices_of(1)[0] if place == "root" else CPU).requires_grad_()
    shards = scatter(x, tuple(devices_of(k)))
    assert [shard.device for shard in shards] == devices_of(k)
    assert_equal_trees(torch.cat([shard.cpu() for shard in shards]), x.cpu(), "rows", **EXACT)
    shards[0].backward(torch.full_like(shards[0], 2))
    expected = torch.zeros(9, 4).double()
    expected[: len(shards[0])] = 2
    assert_equal_trees(x.grad.cpu(), expected, "gradient", **EXACT)
    if x.device == CPU:
        together = lambda y: tuple(s.cpu() for s in scatter(y, devices_of(k)))
        assert k > 2 or (gradcheck(together, (x,)) and gradgradcheck(together, (x,)))


def test_scatter_gives_idle_devices_none() -> None:
    shards = scatter(inputs(1), devices_of(3))
    assert [shard is None for shard in shards] == [False, True, True]
    assert list(map(len, scatter(inputs(3), devices_of(2)))) == [2, 1]


@on_k
@pytest.mark.parametrize("output_device", [-1, "cpu", "root", "last"])
def test_gather(k: int, output_device: Any) -> None:
    named = {"root": devices_of(1)[0], "last": devices_of(k)[-1]}
    output_device = named.get(output_device, output_device)
    expected_place = CPU if output_device == -1 else torch.device(output_device)
    for shape, scalars in (((2, 4), "merge"), ((), "stack")):
        parts = [
            torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()
            for device in devices_of(k)
        ]
        y = gather(tuple(parts), output_device, scalars=scalars)
        assert y.device == expected_place and y.shape == ((2 * k, 4) if shape else (k,))
        slope = torch.randn(y.shape, dtype=torch.float64)
        y.backward(slope.to(y.device))
        shares = slope.split(2) if shape else slope
        for part, share in zip(parts, shares, strict=True):
            assert part.grad.device == part.device
            assert_equal_trees(part.grad.cpu(), share, "gradient", **EXACT)
        on_cpu = [part.detach().cpu().requires_grad_() for part in parts]

        def back(*xs: Tensor, scalars: Any = scalars) -> Tensor:
            moved = [x.to(d) for x, d in zip(xs, devices_of(k), strict=True)]
            return gather(moved, output_device, scalars=scalars).cpu()

        if k == 2:
            assert gradcheck(back, on_cpu) and gradgradcheck(back, on_cpu)
    loss = gather([root(torch.ones(())), root(torch.zeros(()))], output_device)
    assert loss.shape == () and loss == 0.5


def test_gather_of_dicts_with_other_keys_keeps_all() -> None:
    first, second = devices_of(2)
    a, b, c = (torch.randn(1, 2, requires_grad=True) for _ in range(3))
    y = gather([{"a": a.to(first)}, {"b": b.to(second), "a": c.to(second)}], target_device="cpu")
    assert_equal_trees(y, {"a": torch.cat([a, c]), "b": b}, "outputs", **EXACT)


@on_k
@pytest.mark.parametrize("sequence", [tuple, list])
def test_replicate(k: int, sequence: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.fc = nn.BatchNorm1d(10), nn.Linear(10, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.bn(x))

    one, net = pair(lambda: Net().double().eval())
    for detach in (False, True):
        replicas = replicate(net, sequence(devices_of(k)), detach=detach)
        for replica, device in zip(replicas, devices_of(k), strict=True):
            tensors = [*replica.parameters(), *replica.buffers()]
            assert len(tensors) == 7 and {t.device for t in tensors} == {device}
            y = replica(inputs(2, 10).to(device))
            assert_equal_trees(y.cpu(), one(inputs(2, 10)), "outputs", **EXACT)
        assert (replicas[0] is net) is not detach


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(detach: bool) -> None:
    _, net = pair(linear)
    data = io.BytesIO()
    torch.save(replicate(net, devices_of(2), detach), data)
    data.seek(0)
    loaded = torch.load(data, weights_only=False)
    assert_equal_trees(dict(loaded[1].state_dict()), dict(net.state_dict()), "state", **EXACT)


def test_parallel_apply_takes_tuples_and_single_arguments(on: str) -> None:
    modules = [nn.Linear(10, 5).to(device) for device in devices_of(2)]
    xs = [inputs(2, 10, seed=k).float().to(device) for k, device in enumerate(devices_of(2))]
    calls = list(zip(modules, xs, strict=True))
    for context in (
        lambda: torch.autocast(accelerator(), enabled=False),
        lambda: torch.autocast(accelerator()),
    ):
        with context():
            expected = [module(x) for module, x in calls]
            for arguments in ([(x,) for x in xs], xs):
                outputs = parallel_apply(modules, arguments, None)
                assert [y.dtype for y in outputs] == [y.dtype for y in expected]
                for y, other in zip(outputs, expected, strict=True):
                    assert_equal_trees(y.cpu(), other.cpu(), "outputs", atol=0.0, rtol=0.0)


def test_parallel_apply_passes_exceptions_on_as_they_are() -> None:
    def fail(*args: Any) -> Any:
        return {}["wonderful"]

    with pytest.raises(KeyError, match="wonderful") as caught:
        parallel_apply([Calls(fail)] * 2, [(None,), (None,)], devices=devices_of(2))
    assert "in replica 0 on" in said(caught.value)


# Buffers that gradients go through


@on_k
def test_gradients_through_buffers(k: int) -> None:
    class Net(nn.Module):
        def __init__(self, t: Tensor) -> None:
            super().__init__()
            self.register_buffer("trained", t)
            self.register_buffer("fixed", t.clone().detach())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.trained + self.fixed

    t = root(torch.randn(6, dtype=torch.float64)).requires_grad_()
    wrapper = DataParallel(Net(t), devices_of(k), output_device="cpu")
    x = inputs(9, 6)
    wrapper(x).exp().sum().backward()
    wrapper.close()
    other = t.detach().cpu().requires_grad_()
    (x * other + t.detach().cpu()).exp().sum().backward()
    assert_equal_trees(t.grad.cpu(), other.grad, "gradient", **EXACT)
