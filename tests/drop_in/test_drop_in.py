"""`DataParallel` for plain PyTorch: the wrapper computes what the wrapped module computes."""

import copy
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.device_kinds import accelerator_count, on_accelerators, on_separate
from support.forward_twins import CHECKPOINTED, EXACT, inputs, layers, perceptron, said, wrapping
from support.oracle import (
    accelerator,
    are_separate,
    assert_close,
    assert_equal_trees,
    devices_of,
    gradients,
)
from support.waiting import soon, tensors
from torch import Tensor, nn

from lightning_dp import DataParallel
from lightning_dp.parallel.split import chunk, even

pytestmark = pytest.mark.usefixtures("on")


@pytest.fixture
def wrap(on: str) -> Iterator[Callable[..., DataParallel[Any]]]:
    """Wraps a module for K devices; outputs on the CPU, where the tests' own tensors are."""
    with wrapping() as make:
        yield lambda module, k=3, **options: make(module, k, **{"output_device": "cpu", **options})


def pair(make: Callable[[], nn.Module] = perceptron) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make().double()
    return one, copy.deepcopy(one)


def assert_same_module(wrapper: DataParallel[Any], one: nn.Module, close: Any = EXACT) -> None:
    state, expected = dict(wrapper.state_dict()), dict(one.state_dict())
    assert_equal_trees(state, expected, "state", **close)
    assert_equal_trees(gradients(wrapper.module), gradients(one), "gradients", **close)


def train(net: nn.Module, optimizer: str, steps: int = 4, dim: int = 0) -> list[Tensor]:
    """A plain training loop; returns its losses."""
    updates = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
    losses = []
    for seed in range(steps):
        x = inputs(7, seed=seed)
        updates.zero_grad()
        loss = net(x.T.contiguous().T if dim else x).exp().mean().log()
        loss.backward()
        updates.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [{}, {"split": "chunk"}, {"weights": [0, 1, 3]}, {"executor": "threads"}, {"k": 7}, {"k": 1}],
    ids=str,
)
def test_a_training_loop_is_that_of_the_module(
    wrap: Any, optimizer: str, options: dict[str, Any]
) -> None:
    one, net = pair()
    wrapper = wrap(net, **options)
    losses = train(wrapper, optimizer)
    assert_equal_trees(losses, train(one, optimizer), "losses", **EXACT)
    assert_same_module(wrapper, one)


@pytest.mark.parametrize(("split", "sizes"), [("even", even), ("chunk", chunk)])
def test_splits(wrap: Any, split: str, sizes: Any) -> None:
    wrapper = wrap(perceptron().double(), k=4, split=split)
    assert wrapper.last_sizes == ()
    for n in (9, 4, 3, 1):
        assert len(wrapper(inputs(n))) == n
        assert wrapper.last_sizes == sizes(n, 4)


def test_dim_1(wrap: Any) -> None:
    one, net = pair(lambda: nn.GRU(3, 4))
    wrapper = wrap(net, dim=1)
    for module in (wrapper, one):
        y, state = module(inputs(5, 21).view(5, 7, 3))
        assert y.shape == (5, 7, 4) and state.shape == (1, 7, 4)
        (y.exp().mean() + state.square().sum()).backward()
    assert_same_module(wrapper, one)


def test_outputs_are_equal_bit_by_bit_for_equal_rows(wrap: Any) -> None:
    one, net = pair()
    wrapper = wrap(net, k=2)
    expected = torch.cat([one(inputs()[:3]), one(inputs()[3:])])
    assert_close(wrapper(inputs()), expected)


def test_old_style_updates_through_data_reach_the_replicas(wrap: Any) -> None:
    def use(net: nn.Module) -> list[Tensor]:
        outputs = []
        for seed in range(4):
            y = net(inputs(seed=seed))
            y.square().mean().backward()
            for p in net.parameters():
                p.data.add_(p.grad.data, alpha=-0.1)
                p.data.clamp_(-0.4, 0.4)
                p.grad.data.zero_()
            outputs.append(y.detach())
        return outputs

    one, net = pair()
    wrapper = wrap(net)
    assert_equal_trees(use(wrapper), use(one), "outputs", **EXACT)
    assert_same_module(wrapper, one)


def test_two_wrappers_around_modules_that_share_a_layer(wrap: Any) -> None:
    shared = nn.Linear(4, 4).double()
    both = nn.ModuleList([nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.ReLU())])
    one = copy.deepcopy(both)
    first, second = wrap(both[0]), wrap(both[1], k=2)
    for a, b in ((first, second), (one[0], one[1])):
        b(a(inputs()) * a(2 * inputs())).square().sum().backward()
    assert_same_module(first, one[0])
    assert_same_module(second, one[1])


def test_a_wrapper_inside_of_a_wrapped_module_computes_the_same(wrap: Any) -> None:
    one, net = pair(lambda: nn.Sequential(perceptron(), nn.Linear(3, 2)))
    net[0] = wrap(net[0], k=2)
    net[0].output_device = devices_of(1)[0]
    net[0]._options["output_device"] = devices_of(1)[0]
    outer = wrap(net)
    for _ in range(2):
        assert_equal_trees(outer(inputs()), one(inputs()), "outputs", **EXACT)
        outer(inputs()).square().sum().backward()
        one(inputs()).square().sum().backward()
    actual = [p.grad for p in outer.parameters()]
    assert_equal_trees(actual, [p.grad for p in one.parameters()], "gradients", **EXACT)


# Devices


def test_devices_may_be_written_in_many_ways(on: str) -> None:
    net = perceptron().to(devices_of(1)[0])
    names = [str(device) for device in devices_of(2)]
    written: list[Any] = [names, devices_of(2)] + ([[0, 1], ["0", "1"]] if are_separate() else [])
    for devices in written:
        wrapper = DataParallel(net, devices)
        assert wrapper.devices == devices_of(2)
        assert wrapper.device_ids == [device.index for device in devices_of(2)]
        assert wrapper(inputs().float()).device == wrapper.output_device == devices_of(1)[0]
        wrapper.close()


@on_separate
def test_without_device_ids_all_devices_of_the_machine_work(on: str) -> None:
    count = accelerator_count()
    wrapper = DataParallel(perceptron().to(devices_of(1)[0]))
    assert wrapper.devices == devices_of(count)
    wrapper(inputs(count + 1).float())
    assert wrapper.last_sizes == (2, *[1] * (count - 1))
    wrapper.close()


@on_separate
@pytest.mark.parametrize("output_device", ["cpu", 1, "other", torch.device("cpu"), None])
@pytest.mark.parametrize("place", ["cpu", "root", "other"])
def test_inputs_and_outputs_may_be_anywhere(wrap: Any, output_device: Any, place: str) -> None:
    one, net = pair()
    root, second, _, other = map(str, devices_of(4))
    names = {"root": root, "other": other, None: root, 1: second}
    output_device = other if output_device == "other" else output_device
    place = names.get(place, place)
    wrapper = wrap(net, output_device=output_device)
    x = inputs().to(place).requires_grad_()
    y = wrapper(x)
    expected = names.get(output_device, str(output_device))
    assert str(y.device) == expected and str(x.grad) == "None"
    y.square().sum().backward()
    assert str(x.grad.device) == place
    one(inputs()).square().sum().backward()
    assert_same_module(wrapper, one)


@on_accelerators
@pytest.mark.parametrize("k", [1, 3])
def test_a_module_elsewhere_is_moved_with_a_warning_and_keeps_its_parameters(k: int) -> None:
    one, net = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapper = DataParallel(net, devices_of(k), output_device="cpu")
    with pytest.warns(UserWarning, match=r"expected the module on (\w+:0).*on cpu: moved to \1"):
        wrapper(inputs()).square().sum().backward()
    one(inputs()).square().sum().backward()
    assert_same_module(wrapper, one)
    optimizer.step()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_same_module(wrapper, one)
    wrapper(inputs())  # warns no more
    wrapper.close()


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_evaluation_keeps_the_mode_and_follows_training(wrap: Any, mode: Any) -> None:
    one, net = pair(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.ReLU()))
    wrapper = wrap(net, executor="threads")
    for seed in range(3):
        for module in (wrapper.eval(), one.eval()):
            with mode():
                y = module(inputs(seed=seed))
            assert y.requires_grad is (mode is nullcontext)
            assert y.is_inference() is (mode is torch.inference_mode)
            module(inputs(seed=seed)).exp().sum().backward()
            with torch.no_grad():
                [p.sub_(0.1 * p.grad) for p in module.parameters()]
    assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)
    assert_same_module(wrapper, one)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_autocast_keeps_its_dtype(wrap: Any, on: str, executor: str) -> None:
    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            assert y.dtype == torch.bfloat16
            return y

    net = Watching(4, 3)
    one = copy.deepcopy(net)
    wrapper = wrap(net, executor=executor)
    with torch.autocast(accelerator(), dtype=torch.bfloat16):
        y = wrapper(inputs().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = one(inputs().float())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    expected.float().sum().backward()
    assert_equal_trees(y.detach(), expected.detach(), "outputs", atol=1e-2, rtol=1e-2)
    assert_same_module(wrapper, one, {"atol": 2e-2, "rtol": 2e-2})


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_running_statistics_are_seen_by_evaluation_and_in_state_dicts(
    wrap: Any, buffers: str
) -> None:
    one, net = pair(lambda: nn.BatchNorm1d(4))
    wrapper = wrap(net, k=2, buffers=buffers)
    with torch.no_grad():  # as torch.optim.swa_utils.update_bn does
        for seed in range(3):
            x = inputs(8, seed=seed)
            wrapper(x)
            first, second = copy.deepcopy(one), copy.deepcopy(one)
            first(x[:4]), second(x[4:])
            one.load_state_dict(first.state_dict())
            if buffers == "mean":
                one.running_mean.lerp_(second.running_mean, 0.5)
                one.running_var.lerp_(second.running_var, 0.5)
            assert_same_module(wrapper, one)
        assert_equal_trees(wrapper.eval()(x), one.eval()(x), "outputs", **EXACT)


# State


class Versioned(nn.Module):
    """State of a format with a number, and state that is no tensor."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra: Any = None
        self.loaded_version: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        self.loaded_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Confusing(nn.Module):
    """A submodule that is really called `module`, beside a parameter with its names."""

    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.module = Confusing(False) if nested else nn.Linear(2, 2)


class OnlyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def old_state(module: nn.Module) -> Any:
    """What nn.DataParallel saves."""
    return nn.DataParallel(copy.deepcopy(module)).state_dict()  # it moves it to a single GPU


MODULES = [perceptron, lambda: nn.Sequential(nn.BatchNorm1d(3)), Versioned, Confusing, OnlyModule]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("saved_by", ["module", "wrapper", "nn.DataParallel"])
def test_states_of_modules_and_of_wrappers_are_loaded(wrap: Any, make: Any, saved_by: str) -> None:
    source = make()
    states = {
        "module": source.state_dict,
        "wrapper": wrap(copy.deepcopy(source)).state_dict,
        "nn.DataParallel": lambda: old_state(source),
    }
    state = states[saved_by]()
    before = list(state)
    wrapper = wrap(make())
    result = wrapper.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert list(state) == before
    assert list(wrapper.state_dict()) == list(source.state_dict())
    assert_equal_trees(dict(wrapper.state_dict()), dict(source.state_dict()), "state", **EXACT)
    if make is Versioned:
        assert wrapper.module.loaded_version == 3


@pytest.mark.parametrize("prefix", ["", "module."])
def test_wrong_states_are_refused_as_by_the_module(wrap: Any, prefix: str) -> None:
    wrapper = wrap(perceptron())
    state = {prefix + key: value for key, value in perceptron().state_dict().items()}
    state[prefix + "9.weight"] = state.pop(prefix + "0.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.weight"[\s\S]*Unexpected.*9.weight"'):
        wrapper.load_state_dict(state)
    result = wrapper.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.weight"]
    assert [key.removeprefix("module.") for key in result.unexpected_keys] == ["9.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        wrapper.load_state_dict({f"{prefix}{key}": torch.ones(1) for key in wrapper.state_dict()})


def test_a_parameter_given_twice_is_refused(wrap: Any) -> None:
    state = OrderedDict({**perceptron().state_dict(), "module.0.bias": torch.ones(5)})
    with pytest.raises(ValueError, match=r"got both '0\.bias' and 'module\.0\.bias'"):
        wrap(perceptron()).load_state_dict(state)


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("prefix", [True, False])
def test_a_wrapper_inside_of_a_bigger_module_loads_and_saves(
    wrap: Any, make: Any, prefix: bool
) -> None:
    def bigger(inner: nn.Module) -> nn.Module:
        return nn.ModuleDict({"head": nn.Linear(1, 1), "body": inner})

    plain = bigger(make())
    wrapped = bigger(wrap(make()))
    state = bigger(nn.DataParallel(plain["body"])).state_dict() if prefix else plain.state_dict()
    state.update({key: v for key, v in plain.state_dict().items() if key.startswith("head")})
    result = wrapped.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert_equal_trees(dict(wrapped.state_dict()), dict(plain.state_dict()), "state", **EXACT)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**state, "body.nonsense": torch.ones(1)})


@pytest.mark.xfail(reason="torch looks for versions under the name `body.module`")
def test_versions_of_formats_reach_the_modules_in_a_nested_wrapper(wrap: Any) -> None:
    wrapped = nn.ModuleDict({"body": wrap(nn.Sequential(Versioned()))})
    wrapped.load_state_dict(nn.ModuleDict({"body": nn.Sequential(Versioned())}).state_dict())
    assert wrapped["body"].module[0].loaded_version == 3


def test_loaded_weights_are_used_by_every_replica(wrap: Any) -> None:
    _, net = pair()
    torch.manual_seed(7)
    other = perceptron().double()
    wrapper = wrap(net).eval()
    with torch.no_grad():
        wrapper(inputs())
        wrapper.load_state_dict(old_state(other))
        assert_equal_trees(wrapper(inputs()), other(inputs()), "outputs", **EXACT)


# Copies and ends


def test_copies_compute_on_their_own(wrap: Any) -> None:
    one, net = pair()
    wrapper = wrap(net)
    wrapper(inputs()).sum().backward()
    buffer = io.BytesIO()
    torch.save(wrapper, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(wrapper),
        pickle.loads(pickle.dumps(wrapper)),
        torch.load(buffer, weights_only=False),
    ]
    train(wrapper, "SGD")
    for other in copies:
        assert_equal_trees(other(inputs()), one(inputs()), "outputs", **EXACT)
        other.load_state_dict(old_state(one))
        bigger = nn.Sequential(other)
        bigger.load_state_dict(nn.Sequential(one).state_dict())
        other.close()


def test_averaged_copies(wrap: Any) -> None:
    def use(net: nn.Module) -> Any:
        average = torch.optim.swa_utils.AveragedModel(net)
        for _ in range(2):
            train(net, "SGD", 2)
            average.update_parameters(net)
            outputs = average(inputs()).detach()
        return outputs

    one, net = pair()
    assert_equal_trees(use(wrap(net)), use(one), "outputs", **EXACT)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dp-")]


@pytest.mark.parametrize("end", ["closed", "collected"])
def test_threads_end_with_the_wrapper(end: str) -> None:
    wrapper = DataParallel(perceptron().to(devices_of(1)[0]), devices_of(3), executor="threads")
    wrapper(inputs().float())
    assert len(threads()) == 3
    if end == "closed":
        wrapper.close()
        assert not threads()
        wrapper(inputs().float())
        assert len(threads()) == 3
    gone = weakref.ref(wrapper)
    del wrapper
    assert soon(lambda: gone() is None and not threads())


def test_memory_does_not_grow(wrap: Any) -> None:
    wrapper = wrap(perceptron().double(), executor="threads")
    train(wrapper, "SGD", 20)
    before = tensors()
    train(wrapper, "SGD", 40)
    assert soon(lambda: tensors() <= before), (before, tensors())


def test_an_error_names_the_replica_and_training_goes_on(wrap: Any) -> None:
    one, net = pair()
    wrapper = wrap(net, executor="threads")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        wrapper(inputs(6, 5))
    assert "in replica 0 on" in said(caught.value)
    assert "forward" not in net.__dict__
    assert_equal_trees(train(wrapper, "SGD"), train(one, "SGD"), "losses", **EXACT)


# Refusals


def test_optimizers_and_other_things_are_refused_with_an_explanation() -> None:
    net = perceptron()
    with pytest.raises(TypeError, match=r"got an optimizer\. Optimizers need no wrapping"):
        DataParallel(torch.optim.SGD(net.parameters(), lr=0.1), devices_of(2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        DataParallel(lambda x: x, devices_of(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": []}, "device_ids: expected at least one"),
        ({"device_ids": "cpu"}, "device_ids: expected a list"),
        ({"device_ids": ["cpu"], "output_device": 3}, "output_device: expected an index"),
        ({"device_ids": ["cpu"] * 2, "weights": [1]}, "weights: expected 2 numbers"),
        ({"device_ids": ["cpu"], "split": "odd"}, "split: expected one of"),
        ({"device_ids": ["cpu"], "buffers": "last"}, "buffers: expected one of"),
        ({"device_ids": ["cpu"], "executor": "gpu"}, "executor: expected one of"),
    ],
    ids=str,
)
def test_unusable_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallel(perceptron(), **options)


class Summing(nn.Module):
    """Sums what two columns in a container are mapped to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, pair: Any) -> Tensor:
        first, second = pair
        result: Tensor = self.net(first) - self.net(second)
        return result


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_lists_and_tuples_are_columns(container: Any, n: int) -> None:
    net = Summing()
    pair = container([torch.randn(n, 3), torch.randn(n, 3)])
    wrapper = DataParallel(net, device_ids=["cpu"] * 3)
    torch.testing.assert_close(wrapper(pair), net(pair))
    assert sum(wrapper.last_sizes) == n
    wrapper.close()


def test_a_list_of_unequal_tensors_is_no_list_of_samples() -> None:
    wrapper = DataParallel(Summing(), device_ids=["cpu"] * 2)
    with pytest.raises(ValueError, match=r"batch\[0\]\[0\] has 5 and batch\[0\]\[1\] has 4"):
        wrapper([torch.zeros(5, 3), torch.zeros(4, 3)])
    wrapper.close()


@pytest.mark.parametrize("way", CHECKPOINTED)
def test_checkpoints_around_the_wrapper(wrap: Any, way: str) -> None:
    for _ in range(3):
        one, net = pair(layers)
        wrapper = wrap(net, k=4)
        expected = CHECKPOINTED[way](one)
        assert_equal_trees(CHECKPOINTED[way](wrapper), expected, "gradients", **EXACT)
        assert_same_module(wrapper, one)
