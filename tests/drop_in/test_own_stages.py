"""Wrappers that replace stages of `DataParallel`, as code written for `nn.DataParallel` does."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.forward_twins import CPU, EXACT, inputs, perceptron, said
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from support.traces import thread_state, threads_left
from torch import Tensor, nn

from lightning_dp import DataParallel, gather, parallel_apply, replicate, scatter

pytestmark = pytest.mark.usefixtures("on")


@contextmanager
def wrapped(cls: Any, module: nn.Module, k: int = 3, **options: Any) -> Iterator[Any]:
    wrapper = cls(module.to(devices_of(1)[0]), devices_of(k), **{"output_device": CPU, **options})
    try:
        yield wrapper
    finally:
        wrapper.close()


def pair(make: Callable[[], nn.Module] = perceptron) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make().double()
    return one, copy.deepcopy(one)


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


SUBCLASSES = [Logged, OwnScatter, OwnReplicate, OwnApply, OwnGather, OwnForward]
NETS = {
    "perceptron": perceptron,
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "spectral_norm, hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("cls", SUBCLASSES)
def test_wrappers_with_own_stages_train_as_the_module(cls: Any, net: str) -> None:
    for n, k in [(n, k) for n in (7, 2, 1) for k in (3, 1)]:
        one, several = pair(NETS[net])
        with wrapped(cls, several, k) as wrapper:
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (one, several)]
            for seed in range(2):
                for module, optimizer in zip((one, wrapper), optimizers, strict=True):
                    optimizer.zero_grad()
                    module(inputs(n, seed=seed)).exp().mean().log().backward()
                    optimizer.step()
            assert_equal_trees(gradients(several), gradients(one), "gradients", **EXACT)
            state, expected = dict(several.state_dict()), dict(one.state_dict())
            assert_equal_trees(state, expected, "state", **EXACT)
            with torch.no_grad():
                y = wrapper.eval()(inputs(n))
                assert_equal_trees(y, one.eval()(inputs(n)), "outputs", **EXACT)


def test_every_stage_is_called_once_and_in_order() -> None:
    with wrapped(Logged, pair()[1]) as wrapper:
        wrapper(inputs())
        wrapper(inputs())
        assert wrapper.seen == 2 * ["scatter", "replicate", "parallel_apply", "gather"]
        assert wrapper.last_sizes == (2, 2, 2)


def test_outputs_that_a_stage_put_on_the_wrapper_does_not_gather() -> None:
    one, net = pair()
    with wrapped(DataParallel, net) as wrapper:
        wrapper.gather = lambda outputs, output_device: outputs
        outputs = wrapper(inputs(7))
        assert [y.device for y in outputs] == devices_of(3)
        assert [len(y) for y in outputs] == [3, 2, 2]
        sum(y.square().sum().to(CPU) for y in outputs).backward()
    one(inputs(7)).square().sum().backward()
    assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


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


def test_buffers_are_those_of_the_first_replica_and_other_options_are_refused() -> None:
    for cls in (Logged, OwnApply):
        one, net = pair(lambda: nn.BatchNorm1d(4))
        with wrapped(cls, net) as own:
            for seed in range(3):
                own(inputs(7, seed=seed)).sum().backward()
                one(inputs(7, seed=seed)[:3])
        assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    for options in ({"buffers": "mean"}, {"split": "cost"}, {"split": "adaptive"}):
        with (
            wrapped(Logged, pair()[1], **options) as own,
            pytest.raises(ValueError, match=r"Logged: expected a split by numbers and buffers"),
        ):
            own(inputs())


def test_wrappers_with_own_stages_are_copied_and_pickled() -> None:
    one, net = pair()
    with wrapped(OwnGather, net) as wrapper:
        wrapper(inputs()).sum().backward()
        for other in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
            assert_equal_trees(other(inputs()), one(inputs()), "outputs", **EXACT)


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


# Errors


class Failing(nn.Module):
    """Its second replica fails."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron().double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise ValueError("the user's own")
        return self.net(x)


def functions(net: nn.Module, x: Tensor) -> None:
    devices = devices_of(2)
    outputs = parallel_apply(replicate(net, devices), scatter(x, devices))
    gather(outputs, devices[0])


def own_stages(net: nn.Module, x: Tensor) -> None:
    with wrapped(Logged, net, 2) as wrapper:
        wrapper(x)


@pytest.mark.parametrize("use", [functions, own_stages])
@pytest.mark.usefixtures("on_side_streams", "one_thread")
def test_an_error_of_a_replica_leaves_the_thread_its_state(use: Any, on: str) -> None:
    net, x = Failing().to(devices_of(1)[0]), inputs(5)
    with torch.autocast(accelerator(), torch.bfloat16), torch.device(devices_of(2)[-1]):
        before = thread_state(on)
        for _ in range(2):
            with pytest.raises(ValueError, match="the user's own") as caught:
                use(net, x)
            assert "in replica 1 on" in said(caught.value) and thread_state(on) == before
    gc.collect()
    assert not threads_left()
