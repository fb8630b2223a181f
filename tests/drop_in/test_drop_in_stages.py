"""What code written for `torch.nn.DataParallel` does with it: replaced stages, functions, norms."""

import copy
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import on_accelerators
from support.forward_twins import CPU, EXACT, inputs, perceptron, said
from support.oracle import assert_equal_trees, devices_of, gradients
from support.waiting import soon, tensors
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lightning_dp
from lightning_dp import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter

pytestmark = pytest.mark.usefixtures("on")

SHAPES = [(n, k) for n in (7, 2, 1) for k in (3, 1)]


@contextmanager
def wrapped(
    cls: Any, module: nn.Module, k: int = 3, **options: Any
) -> Iterator[DataParallel[nn.Module]]:
    wrapper = cls(module.to(devices_of(1)[0]), devices_of(k), **{"output_device": CPU, **options})
    try:
        yield wrapper
    finally:
        wrapper.close()


def pair(make: Callable[[], nn.Module] = perceptron) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make().double()
    torch.manual_seed(0)
    return one, make().double()  # which need not be one that can be copied


# Replaced stages


class Logged(DataParallel[nn.Module]):
    """Every stage is the wrapper's own, and written down."""

    def scatter(self, *args: Any) -> Any:
        self.__dict__.setdefault("seen", []).append("scatter")
        return super().scatter(*args)

    def replicate(self, *args: Any) -> Any:
        self.seen.append("replicate")
        return super().replicate(*args)

    def parallel_apply(self, *args: Any) -> Any:
        self.seen.append("parallel_apply")
        return super().parallel_apply(*args)

    def gather(self, *args: Any) -> Any:
        self.seen.append("gather")
        return super().gather(*args)


class OwnScatter(DataParallel[nn.Module]):
    """The first device gets one sample, the last all others."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        (x,) = inputs
        parts = [part for part in (x[:1], x[1:]) if len(part)][: len(device_ids)]
        if len(device_ids) == 1:
            parts = [x]
        args = tuple((p.to(d),) for p, d in zip(parts, self.devices, strict=False))
        return args, tuple({} for _ in args)


class OwnReplicate(DataParallel[nn.Module]):
    """Tells every replica its number."""

    def replicate(self, module: Any, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        for k, replica in enumerate(replicas):
            replica.number = k
        return replicas


class OwnReplicas(DataParallel[nn.Module]):
    """Makes the replicas itself."""

    def replicate(self, module: Any, device_ids: Any) -> Any:
        return replicate(module, self.devices[: len(device_ids)])


class OwnApply(DataParallel[nn.Module]):
    """Calls one replica after another."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        calls = zip(replicas, inputs, kwargs, strict=True)
        return [replica(*args, **named) for replica, args, named in calls]


class OwnGather(DataParallel[nn.Module]):
    """Joins by hand."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat([output.to(output_device) for output in outputs], self.dim)


class OwnForward(DataParallel[nn.Module]):
    """Calls the stages as nn.DataParallel's forward does."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, named = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.gather([self.module(*inputs[0], **named[0])], self.output_device)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, named)
        return self.gather(outputs, self.output_device)


SUBCLASSES = [Logged, OwnScatter, OwnReplicate, OwnReplicas, OwnApply, OwnGather, OwnForward]


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("cls", SUBCLASSES)
def test_wrappers_with_own_stages_train_as_the_module(cls: Any, executor: str) -> None:
    for n, k in SHAPES:
        one, net = pair()
        with wrapped(cls, net, k, executor=executor) as wrapper:
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (one, net)]
            for seed in range(3):
                for module, optimizer in zip((one, wrapper), optimizers, strict=True):
                    optimizer.zero_grad()
                    module(inputs(n, seed=seed)).exp().mean().log().backward()
                    optimizer.step()
            assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
            assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
            with torch.no_grad():
                assert_equal_trees(wrapper.eval()(inputs(n)), one(inputs(n)), "outputs", **EXACT)


def test_every_stage_is_called_once_and_in_order() -> None:
    with wrapped(Logged, pair()[1]) as wrapper:
        wrapper(inputs())
        wrapper(inputs())
        assert wrapper.seen == 2 * ["scatter", "replicate", "parallel_apply", "gather"]
        assert wrapper.last_sizes == (2, 2, 2)


def test_outputs_that_are_not_gathered() -> None:
    class Apart(DataParallel[nn.Module]):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return outputs

    one, net = pair()
    with wrapped(Apart, net) as wrapper:
        outputs = wrapper(inputs(7))
        assert [y.device for y in outputs] == devices_of(3)
        assert [len(y) for y in outputs] == [3, 2, 2]
        sum(y.square().sum().to(CPU) for y in outputs).backward()
    one(inputs(7)).square().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


def test_a_stage_that_is_put_on_the_wrapper_is_honoured() -> None:
    _, net = pair()
    with wrapped(DataParallel, net) as wrapper:
        wrapper.gather = lambda outputs, output_device: len(outputs)
        assert wrapper(inputs()) == 3


def test_arguments_that_only_the_own_scatter_can_cut() -> None:
    class Samples:
        def __init__(self, rows: list[Tensor]) -> None:
            self.rows = rows

    class Stacks(nn.Linear):
        def forward(self, samples: Samples, scale: float) -> Tensor:
            return super().forward(torch.stack(samples.rows)) * scale

    class Cuts(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            rows = inputs[0].rows
            shards = [rows[k :: len(device_ids)] for k in range(len(device_ids))]
            args = [
                (Samples([row.to(device) for row in shard]),)
                for shard, device in zip(shards, self.devices, strict=True)
                if shard
            ]
            return args, [kwargs] * len(args)

    one, net = pair(lambda: Stacks(4, 2))
    with wrapped(Cuts, net) as wrapper:
        for n in (6, 5, 2):
            y = wrapper(Samples(list(inputs(n))), scale=2.0)
            order = [i for k in range(3) for i in range(k, n, 3)]
            expected = one(Samples([inputs(n)[i] for i in order]), scale=2.0)
            assert_equal_trees(y, expected, "outputs", **EXACT)
            y.sum().backward(), expected.sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


def test_a_scatter_for_some_of_the_devices() -> None:
    """A first device that only gathers gets nothing."""

    class Others(DataParallel[nn.Module]):
        def forward(self, x: Tensor) -> Any:
            args, kwargs = self.scatter((x,), {}, self.device_ids[1:])
            assert [part[0].device for part in args] == self.devices[1:]
            replicas = self.replicate(self.module, self.device_ids)[1:]
            return self.gather(self.parallel_apply(replicas, args, kwargs), self.output_device)

    one, net = pair()
    with wrapped(Others, net) as wrapper:
        y, expected = wrapper(inputs(5)), one(inputs(5))
        assert_equal_trees(y, expected, "outputs", **EXACT)
        y.exp().sum().backward(), expected.exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


def test_idle_devices_are_none_for_stages() -> None:
    seen: list[Any] = []

    class Looks(OwnGather):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            seen.append([args is None for args in inputs])
            outputs = super().parallel_apply(replicas, inputs, kwargs)
            return [output for output in outputs if output is not None]

    one, net = pair()
    with wrapped(Looks, net, weights=[1, 0, 2]) as wrapper:
        assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)
    assert seen == [[False, True, False]]


def test_buffers_of_wrappers_with_own_stages_are_the_modules() -> None:
    for cls, options in ((Logged, {}), (OwnApply, {}), (OwnGather, {"buffers": "mean"})):
        _, net = pair(lambda: nn.BatchNorm1d(4))
        _, plain = pair(lambda: nn.BatchNorm1d(4))
        with wrapped(cls, net, **options) as own, wrapped(DataParallel, plain, **options) as usual:
            for seed in range(3):
                for wrapper in (own, usual):
                    wrapper(inputs(9, seed=seed)).sum().backward()
            with torch.no_grad():  # which settles what the latest backward left open
                assert_equal_trees(own(inputs()), usual(inputs()), "outputs", **EXACT)
        assert_equal_trees(dict(net.state_dict()), dict(plain.state_dict()), "state", **EXACT)
        assert net.num_batches_tracked == 4


@pytest.mark.parametrize("cls", [Logged, OwnReplicas, OwnApply])
def test_an_error_in_a_stage_comes_as_it_is_and_the_next_call_works(cls: Any) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 100:
                raise LookupError("too large")
            return super().forward(x)

    one, net = pair(lambda: Fails(4, 2))
    with wrapped(cls, net, executor="threads") as wrapper:
        x = inputs()
        x[-2:] = 1000
        with pytest.raises(LookupError, match="too large") as caught:
            wrapper(x)
        assert cls is OwnApply or "in replica 2 on" in said(caught.value)
        assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)


def test_wrappers_with_own_stages_are_copied_and_pickled() -> None:
    one, net = pair()
    with wrapped(OwnGather, net) as wrapper:
        wrapper(inputs()).sum().backward()
        for other in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
            assert_equal_trees(other(inputs()), one(inputs()), "outputs", **EXACT)
            other.close()


class Delegates(DataParallel[nn.Module]):
    """Whatever it does not have, the module has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def test_a_wrapper_that_hands_attributes_on_to_the_module() -> None:
    one, net = pair(lambda: nn.Linear(4, 2))
    with wrapped(Delegates, net) as wrapper:
        assert wrapper.in_features == 4 and wrapper.weight is net.weight
        assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)
        with pytest.raises(AttributeError, match="nonsense"):
            wrapper.nonsense  # noqa: B018  # reading it is what fails


# The functions and their names


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_data_parallel_the_function(k: int) -> None:
    class Net(nn.Linear):
        def forward(self, x: Any = None, scale: Any = 1.0) -> Tensor:
            return super().forward(self.weight.new_ones(5, 4) if x is None else x) * scale

    one, net = pair(lambda: Net(4, 2))
    net.to(devices_of(1)[0])
    calls: list[tuple[Any, Any]] = [
        (inputs(), None),
        ((inputs(),), {"scale": 3.0}),
        ((inputs(), 2.0), None),
        (None, None),
        (None, {"x": inputs(3)}),
    ]
    for args, kwargs in calls:
        y = data_parallel(net, args, devices_of(k), "cpu", module_kwargs=kwargs)
        expected = one(
            *(() if args is None else args if isinstance(args, tuple) else (args,)), **kwargs or {}
        )
        assert_equal_trees(y, expected, "outputs", **EXACT)
        y.exp().sum().backward(), expected.exp().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    rows = inputs(4, 4).T.contiguous()
    turned = data_parallel(Turned(), rows, devices_of(k), dim=1)
    assert_equal_trees(turned.cpu(), rows * 2, "outputs", **EXACT)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@on_accelerators
def test_data_parallel_takes_all_devices_of_the_machine(on: str) -> None:
    _, net = pair()
    y = data_parallel(net.to(devices_of(1)[0]), inputs())
    assert y.device == devices_of(1)[0]


def test_minus_one_is_the_cpu(on: str) -> None:
    _, net = pair()
    net.to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(2), output_device=-1)
    assert wrapper(inputs()).device == wrapper.output_device == CPU
    wrapper.close()
    assert data_parallel(net, inputs(), devices_of(2), -1).device == CPU
    shards = scatter(inputs(), devices_of(2))
    assert_equal_trees(gather(shards, -1), inputs(), "rows", **EXACT)
    assert_equal_trees(gather(shards, target_device=-1), inputs(), "rows", **EXACT)


def test_dim_is_the_third_argument_of_scatter_and_gather() -> None:
    x = inputs(4, 6)
    for dim in (0, 1):
        shards = scatter(x, devices_of(2), dim)
        assert [tuple(s.shape) for s in shards] == [(2, 6), (4, 3)][dim : dim + 1] * 2
        assert_equal_trees(gather(shards, CPU, dim), x, "rows", **EXACT)
    assert [len(s) for s in scatter(x, devices_of(2), [1, 3])] == [1, 3]
    with pytest.raises(TypeError, match=r"scatter: expected dim once, got 0 .* and dim=1"):
        scatter(x, devices_of(2), 0, dim=1)


def test_names_of_torch_nn_parallel() -> None:
    one, net = pair()
    net.to(devices_of(1)[0])
    shards = scatter(inputs=inputs(), target_gpus=devices_of(2), dim=0)
    replicas = replicate(network=net, devices=devices_of(2), detach=False)
    outputs = parallel_apply(
        modules=replicas, inputs=shards, kwargs_tup=({}, {}), devices=devices_of(2)
    )
    y = gather(outputs=outputs, target_device="cpu", dim=0)
    assert_equal_trees(y, one(inputs()), "outputs", **EXACT)
    with pytest.raises(TypeError, match="got both 'target_gpus' and 'devices'"):
        scatter(inputs(), devices=devices_of(2), target_gpus=devices_of(2))
    with pytest.raises(TypeError, match="got both 'target_gpus' and 'devices'"):
        scatter(inputs(), devices_of(2), target_gpus=devices_of(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        scatter(inputs(), devices_of(2), nonsense=1)


def test_src_device_obj_is_the_first_device() -> None:
    with wrapped(DataParallel, pair()[1]) as wrapper:
        assert wrapper.src_device_obj == devices_of(1)[0]
    assert set(lightning_dp.__all__) > {"DataParallel", "data_parallel"}


def test_detached_replicas_compute_the_same_and_lead_nowhere() -> None:
    one, net = pair(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    net.to(devices_of(1)[0])
    replicas = replicate(net, devices_of(3), detach=True)
    assert net not in replicas
    expected = one(inputs()).detach()
    for replica, device in zip(replicas, devices_of(3), strict=True):
        y = replica(inputs().to(device))
        assert not y.requires_grad and y.device == device
        assert_equal_trees(y.cpu(), expected, "outputs", **EXACT)
    # The first one's buffers are the module's, as batch norm needs it.
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    assert all(p.requires_grad for p in net.parameters())


def test_parallel_apply_is_told_the_devices() -> None:
    class Where(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.device, torch.zeros((), device=x.device.type).device

    xs = [inputs().to(device) for device in devices_of(2)]
    found = parallel_apply([Where(), Where()], xs, None, devices_of(2))
    assert found == [(device, device) for device in devices_of(2)]
    with pytest.raises(ValueError, match="Expected as many devices as replicas, got 1 and 2"):
        parallel_apply([Where(), Where()], xs, None, devices_of(1))


# Norms of weights


def old_weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in much code
        return nn.utils.weight_norm(module, name)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "spectral_norm, hook": nn.utils.spectral_norm,
    "weight_norm, hook": old_weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


def lstm(norm: Callable[..., nn.Module]) -> nn.Module:
    return norm(nn.LSTM(4, 3, batch_first=True), "weight_hh_l0")


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda norm: norm(nn.Linear(4, 3)),
    "inside": lambda norm: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 3))),
    "lstm": lstm,
}


def use(net: nn.Module, width: int = 4) -> list[Tensor]:
    """Real minus fake, as critics are trained, in training, evaluation and without gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    results = []
    for seed in range(3):
        real, fake = (_of(net, inputs(7, seed=seed + d)) for d in (0, 10))
        optimizer.zero_grad()
        (real - fake).exp().mean().backward()
        optimizer.step()
        with torch.no_grad():
            results += [real.detach(), _of(net.eval(), inputs())]
        if _is_recurrent(net) and devices_of(1)[0].type == "cuda":
            net.train()  # cuDNN has no other backward, on one device too
        _of(net, inputs(5)).square().sum().backward()
        net.train()
    return results


def _is_recurrent(net: nn.Module) -> bool:
    return isinstance(getattr(net, "module", net), nn.LSTM)


def _of(net: nn.Module, x: Tensor) -> Tensor:
    if _is_recurrent(net):
        y: Tensor = net(x[:, None])[0]
        return y
    return net(x)


@pytest.mark.parametrize(
    ("cls", "layer"),
    [(DataParallel, layer) for layer in LAYERS] + [(OwnGather, "linear"), (OwnGather, "inside")],
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.usefixtures("weight_norms")
def test_norms_of_weights(cls: Any, norm: str, layer: str) -> None:
    one, net = pair(partial(LAYERS[layer], NORMS[norm]))
    one.to(CPU)  # as the other is moved: recurrent layers then compute their weights once more
    with wrapped(cls, net) as wrapper:
        actual, expected = use(wrapper), use(one)
    assert_equal_trees(actual, expected, "outputs", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)


def test_tensors_with_a_graph_on_the_module() -> None:
    """Leaves and results of other modules, which the caller sets before a call."""

    class Conditioned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.condition + self.leaf

    one, net = pair(lambda: Conditioned(4, 3))
    leaves = []
    with wrapped(DataParallel, net) as wrapper:
        for module, layer, place in ((one, one, CPU), (wrapper, net, devices_of(1)[0])):
            leaf = torch.ones(3, dtype=torch.float64, device=place, requires_grad=True)
            layer.leaf, other = leaf, leaf.detach().clone().requires_grad_()
            for seed in range(3):
                layer.condition = other.exp() * (seed + 1)
                module(inputs(seed=seed)).exp().mean().backward()
                with torch.no_grad():
                    leaf.add_(1.0)  # in place: replicas see it
            leaves.append([leaf.grad.cpu(), other.grad.cpu()])
    assert_equal_trees(leaves[1], leaves[0], "gradients of the leaves", **EXACT)
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


@pytest.mark.parametrize("norm", ["spectral_norm, hook", "weight_norm, hook"])
def test_a_normed_wrapper_is_let_go_of(norm: str) -> None:
    net = NORMS[norm](nn.Linear(4, 3)).to(devices_of(1)[0])
    wrapper = DataParallel(net, devices_of(3), executor="threads")
    for seed in range(10):
        wrapper(inputs(seed=seed).float()).sum().backward()
    before = tensors()
    for seed in range(10):
        wrapper(inputs(seed=seed).float()).sum().backward()
    assert soon(lambda: tensors() <= before), (before, tensors())
    gone = weakref.ref(wrapper)
    del wrapper
    assert soon(lambda: gone() is None and not dp_threads())


def dp_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dp-")]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.usefixtures("weight_norms")
def test_normed_critics_in_the_strategy(norm: str, mode: str) -> None:
    class Critic(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = NORMS[norm](nn.Linear(10, 3))

    torch.set_default_dtype(torch.float64)
    options = {"mode": mode, "parallel_modules": ["net"]} if mode == "forward" else {}
    several = oracle.run(Critic, 3, strategy=options, max_epochs=1)
    oracle.assert_same(several, oracle.run(Critic, 1, max_epochs=1))
