"""Wrappers that replace stages of `DataParallel`, as code written for `nn.DataParallel` does."""

import copy
import pickle
from typing import Any

import pytest
import torch
from support.forward_twins import EXACT, inputs, perceptron, said, wrapping
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from support.traces import thread_state, threads_left
from torch import Tensor, nn

from lightning_dp import DataParallel

pytestmark = pytest.mark.usefixtures("on")


@pytest.fixture
def wrap(on: str) -> Any:
    """Wraps an equal module by a class, as `one, wrapper = wrap(cls, make, k)`."""
    with wrapping() as make_wrapper:

        def wrapped(cls: Any, make: Any = perceptron, k: int = 3, **options: Any) -> Any:
            torch.manual_seed(0)
            one = make().double()
            options = {"output_device": "cpu", **options}
            return one, make_wrapper(copy.deepcopy(one), k, cls=cls, **options)

        yield wrapped


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
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, named)
        return self.gather(outputs, self.output_device)


SUBCLASSES = [Logged, OwnScatter, OwnReplicate, OwnApply, OwnGather, OwnForward]
NETS = [perceptron, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))]


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("cls", SUBCLASSES)
def test_wrappers_with_own_stages_train_as_the_module(cls: Any, make: Any, wrap: Any) -> None:
    for n, k in ((7, 3), (2, 3), (1, 3), (2, 1)):
        one, wrapper = wrap(cls, make, k)
        for module in (one, wrapper):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
            for seed in range(2):
                optimizer.zero_grad()
                module(inputs(n, seed=seed)).exp().mean().log().backward()
                optimizer.step()
        assert_equal_trees(gradients(wrapper.module), gradients(one), "gradients", **EXACT)
        state = dict(wrapper.state_dict())
        assert_equal_trees(state, dict(one.state_dict()), "state", **EXACT)
        with torch.no_grad():
            y = wrapper.eval()(inputs(n))
            assert_equal_trees(y, one.eval()(inputs(n)), "outputs", **EXACT)
        is_pickled = make is perceptron  # torch refuses to pickle parametrizations
        other = pickle.loads(pickle.dumps(wrapper)) if is_pickled else copy.deepcopy(wrapper)
        assert_equal_trees(other(inputs(n)), y, "outputs of a copy", **EXACT)


def test_every_stage_is_called_once_and_in_order(wrap: Any) -> None:
    _, wrapper = wrap(Logged)
    wrapper(inputs())
    wrapper(inputs())
    assert wrapper.seen == 2 * ["scatter", "replicate", "parallel_apply", "gather"]
    assert wrapper.last_sizes == (2, 2, 2)


def test_outputs_that_a_stage_put_on_the_wrapper_does_not_gather(wrap: Any) -> None:
    one, wrapper = wrap(DataParallel)
    wrapper.gather = lambda outputs, output_device: outputs
    outputs = wrapper(inputs(7))
    assert [y.device for y in outputs] == devices_of(3)
    assert [len(y) for y in outputs] == [3, 2, 2]
    sum(y.square().sum().cpu() for y in outputs).backward()
    one(inputs(7)).square().sum().backward()
    assert_equal_trees(gradients(wrapper.module), gradients(one), "gradients", **EXACT)


def test_arguments_that_only_the_own_scatter_can_cut(wrap: Any) -> None:
    class Samples:
        def __init__(self, rows: list[Tensor]) -> None:
            self.rows = rows

    class Stacks(nn.Linear):
        def forward(self, samples: Samples, scale: float) -> Tensor:
            return super().forward(torch.stack(samples.rows)) * scale

    class Cuts(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            rows = inputs[0].rows
            shards = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
            pairs = zip(shards, self.devices, strict=False)
            return [(Samples([r.to(d) for r in shard]),) for shard, d in pairs], [kwargs] * 2

    one, wrapper = wrap(Cuts, lambda: Stacks(4, 2))
    for n in (5, 2):
        y, expected = (m(Samples(list(inputs(n))), scale=2.0) for m in (wrapper, one))
        assert_equal_trees(y, expected, "outputs", **EXACT)
        y.sum().backward(), expected.sum().backward()
    assert_equal_trees(gradients(wrapper.module), gradients(one), "gradients", **EXACT)


def test_buffers_are_those_of_the_first_replica_and_other_options_are_refused(wrap: Any) -> None:
    one, wrapper = wrap(OwnApply, lambda: nn.BatchNorm1d(4))
    for seed in range(3):
        wrapper(inputs(7, seed=seed)).sum().backward()
        one(inputs(7, seed=seed)[:3])
    assert_equal_trees(dict(wrapper.state_dict()), dict(one.state_dict()), "state", **EXACT)
    for options in ({"buffers": "mean"}, {"split": "cost"}, {"weights": [1, 0, 2]}):
        with pytest.raises(ValueError, match=r"Logged: expected no option but device_ids"):
            wrap(Logged, **options)[1](inputs())


class Delegates(DataParallel[nn.Module]):
    """Whatever it does not have, the module has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def test_a_wrapper_that_hands_attributes_on_to_the_module(wrap: Any) -> None:
    one, wrapper = wrap(Delegates, lambda: nn.Linear(4, 2))
    assert wrapper.in_features == 4 and wrapper.weight is wrapper.module.weight
    assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)
    with pytest.raises(AttributeError, match="nonsense"):
        wrapper.nonsense  # noqa: B018  # reading it is what fails


class Failing(nn.Linear):
    """Its second replica fails."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise ValueError("the user's own")
        return super().forward(x)


@pytest.mark.usefixtures("on_side_streams", "one_thread")
def test_an_error_of_a_replica_leaves_the_thread_its_state(wrap: Any, on: str) -> None:
    _, wrapper = wrap(Logged, lambda: Failing(4, 2), 2)
    with torch.autocast(accelerator(), torch.bfloat16), torch.device(devices_of(2)[-1]):
        before = thread_state(on)
        for _ in range(2):
            with pytest.raises(ValueError, match="the user's own") as caught:
                wrapper(inputs(5))
            assert "in replica 1 on" in said(caught.value) and thread_state(on) == before
    assert not threads_left()
