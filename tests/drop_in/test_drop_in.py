"""`DataParallel` for plain PyTorch: the wrapper computes what the wrapped module computes.

Behaviours that torch's own tests ask of `nn.DataParallel`, inputs that go wrong in it, and what
code written for it does with a module: each a row of `LAWS`.
"""

import copy
import io
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.device_kinds import accelerator_count, on_accelerators, on_separate
from support.forward_twins import (
    EXACT,
    inputs,
    law,
    perceptron,
    wrapping,
)
from support.oracle import are_separate, assert_equal_trees, devices_of, gradients
from support.waiting import soon, tensors
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_flatten

from lightning_dp import DataParallel

CPU = torch.device("cpu")


@pytest.fixture
def wrap(on: str) -> Iterator[Callable[..., DataParallel[Any]]]:
    """Wraps a module for K devices; outputs on the CPU, where the tests' own tensors are."""
    with wrapping() as make:
        yield lambda module, k=3, **options: make(module, k, **{"output_device": "cpu", **options})


def pair(make: Callable[[], nn.Module] = perceptron) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make().double()
    torch.manual_seed(0)
    return one, make().double()  # which need not be one that can be copied


def assert_same_module(wrapper: DataParallel[Any], one: nn.Module, close: Any = EXACT) -> None:
    state, expected = dict(wrapper.state_dict()), dict(one.state_dict())
    assert_equal_trees(state, expected, "state", **close)
    assert_equal_trees(gradients(wrapper.module), gradients(one), "gradients", **close)


# One device's numbers: a row per kind of module and use

LAWS: list[Any] = []


def train(net: nn.Module, optimizer: str, steps: int = 4) -> list[Tensor]:
    """A plain training loop; returns its losses."""
    updates = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
    losses = []
    for seed in range(steps):
        updates.zero_grad()
        loss = net(inputs(7, seed=seed)).exp().mean().log()
        loss.backward()
        updates.step()
        losses.append(loss.detach())
    return losses


for _options in (
    {},
    {"split": "chunk"},
    {"weights": [0, 1, 3]},
    {"executor": "threads"},
    {"k": 7},
    {"k": 1},
):
    _id = f"training {_options}"
    LAWS.append(pytest.param(perceptron, partial(train, optimizer="AdamW"), _options, id=_id))


class Calls(nn.Linear):
    """A layer that hands its arguments and what it computes to a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(4, 3)
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(super().forward, *args, **kwargs)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    scale: float


def _scaled(layer: Any, x: Tensor, scale: Any = 1.0, other: Any = 0.0, flag: str = "") -> Tensor:
    return layer(x) * scale + other


def _nested(layer: Any, x: Tensor) -> Any:
    return [x, (x.sin(), [x.add(1)]), OrderedDict(a=x, b=[layer(x)])]


SCALE = torch.tensor(2.0, dtype=torch.float64)
COLUMNS = [(inputs(n), inputs(n, seed=2)) for n in (1, 2, 3, 8)]
ARGUMENTS: dict[str, tuple[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "numbers, names, 0-dim tensors, few samples": (
        _scaled,
        [
            ((inputs(7), SCALE), {"other": inputs(7, 3, seed=2)}),
            ((inputs(2),), {"scale": 3.0, "flag": "a"}),
            ((), {"x": inputs(5), "other": 1}),
        ],
    ),
    "something empty beside": (
        lambda layer, batch: layer(batch["data"]),
        [(({"data": inputs(), "unused": unused},), {}) for unused in ([], {}, ())],
    ),
    "none": (lambda layer: layer(layer.__self__.weight.new_ones(5, 4)), [((), {})]),
    "lists and tuples are columns": (
        lambda layer, pair: layer(pair[0]) - layer(pair[1]),
        [((kind(pair),), {}) for pair in COLUMNS for kind in (list, tuple)],
    ),
    "outputs keep their types": (_nested, [((inputs(n),), {}) for n in (2, 5)]),
    "lists of str": (
        lambda layer, x, names: (layer(x), [name.upper() for name in names]),
        [((inputs(5), list("abcde")), {})],
    ),
    "outputs that are no tensors": (
        lambda layer, x, value: {"y": layer(x), "value": value},
        [((inputs(), value), {}) for value in (2.5, True, "text", None)],
    ),
    "dataclasses": (
        lambda layer, batch: Batch(layer(batch.x) * batch.scale, batch.scale),
        [((Batch(inputs(5), 2.0),), {})],
    ),
}


def called(net: nn.Module, calls: Any) -> Any:
    """What the calls return, and the types of it; each is trained a little."""
    found = []
    for args, kwargs in calls:
        output = net(*args, **kwargs)
        parts, structure = tree_flatten(vars(output) if isinstance(output, Batch) else output)
        sum(p.exp().sum() for p in parts if isinstance(p, Tensor)).backward()
        values = [p.detach() if isinstance(p, Tensor) else p for p in parts]
        found.append((str(structure), list(map(type, [output, *parts])), values))
    return found


for _id, (_call, _calls) in ARGUMENTS.items():
    _use = partial(called, calls=_calls)
    LAWS.append(pytest.param(partial(Calls, _call), _use, {}, id=f"arguments: {_id}"))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        self.rnn.flatten_parameters()
        return self.rnn(x[:, None])[0]


@law(LAWS, Recurrent)
def recurrent_layers_that_flatten_their_weights(net: nn.Module) -> Any:
    with torch.no_grad():
        net(inputs())
    return train(net, "SGD")


class Conditioned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.condition + self.leaf * self.trained


@law(LAWS, lambda: Conditioned(4, 3))
def tensors_with_a_graph_on_the_module(net: nn.Module) -> Any:
    """Leaves, buffers, and results of other modules, which the caller sets before a call."""
    layer = getattr(net, "module", net)
    leaf, other, trained = (torch.ones(3).to(layer.weight).requires_grad_() for _ in range(3))
    layer.leaf = leaf
    layer.register_buffer("trained", trained)
    for seed in range(3):
        layer.condition = other.exp() * (seed + 1)
        net(inputs(seed=seed)).exp().mean().backward()
        with torch.no_grad():
            leaf.add_(1.0)  # in place: replicas see it
    return leaf.grad, other.grad, trained.grad


def _weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in much code
        return nn.utils.weight_norm(module)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "spectral_norm, hook": nn.utils.spectral_norm,
    "weight_norm, hook": _weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


def critic(norm: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 3)))


def real_and_fake(net: nn.Module) -> list[Tensor]:
    """As critics are trained: two calls before a backward, evaluation in between."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    results = []
    for seed in range(3):
        optimizer.zero_grad()
        (net(inputs(7, seed=seed)) - net(inputs(7, seed=seed + 10))).exp().mean().backward()
        optimizer.step()
        with torch.no_grad():
            results.append(net.eval()(inputs()))
        net.train()
    return results


for _norm, _make in NORMS.items():
    LAWS.append(pytest.param(partial(critic, _make), real_and_fake, {}, id=_norm))


@pytest.mark.usefixtures("weight_norms")
@pytest.mark.parametrize(("make", "use", "options"), LAWS)
def test_a_wrapper_is_its_module(wrap: Any, make: Any, use: Any, options: dict[str, Any]) -> None:
    one, net = pair(make)
    wrapper = wrap(net, **options)
    one.to(CPU)  # as the other is moved: recurrent layers then compute their weights once more
    assert_equal_trees(use(wrapper), use(one), "results", **EXACT)
    assert_same_module(wrapper, one)
    assert "forward" not in vars(net), "a call of the module itself is not spread"


# More than one wrapper, and layouts and dtypes


def test_a_wrapper_inside_of_a_wrapped_module(wrap: Any) -> None:
    one, net = pair(lambda: nn.Sequential(perceptron(), nn.Linear(3, 2)))
    net[0] = wrap(net[0], k=2, output_device=devices_of(1)[0])
    outer = wrap(net)
    for module in (outer, one):
        for _ in range(2):
            module(inputs()).square().sum().backward()
    actual = [p.grad for p in outer.parameters()]
    assert_equal_trees(actual, [p.grad for p in one.parameters()], "gradients", **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_evaluation_keeps_the_mode_and_follows_training(wrap: Any, mode: Any) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().forward(x)

    one, net = pair(lambda: nn.Sequential(Watching(4, 3), nn.Dropout(0.5), nn.ReLU()))
    wrapper = wrap(net, executor="threads", check_first_call=False)
    for seed in range(3):
        for module in (wrapper.eval(), one.eval()):
            seen.clear()
            with mode():
                y = module(inputs(seed=seed))
            expected = (mode is nullcontext, mode is torch.inference_mode)
            assert set(seen) == {expected} and (y.requires_grad, y.is_inference()) == expected
            module(inputs(seed=seed)).exp().sum().backward()
            with torch.no_grad():
                [p.sub_(0.1 * p.grad) for p in module.parameters()]
    assert_equal_trees(wrapper(inputs()), one(inputs()), "outputs", **EXACT)
    assert_same_module(wrapper, one)


# Devices


def test_devices_may_be_written_in_many_ways(on: str) -> None:
    net = perceptron().to(devices_of(1)[0])
    names = [str(device) for device in devices_of(2)]
    written: list[Any] = [names, devices_of(2)] + ([[0, 1], ("0", "1")] if are_separate() else [])
    for devices in written:
        wrapper = DataParallel(net, devices)
        assert wrapper.devices == devices_of(2) and wrapper.src_device_obj == devices_of(1)[0]
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
@pytest.mark.parametrize("output_device", [-1, 1, "other", torch.device("cpu"), None])
@pytest.mark.parametrize("place", ["cpu", "root", "other"])
def test_inputs_and_outputs_may_be_anywhere(wrap: Any, output_device: Any, place: str) -> None:
    one, net = pair()
    root, second, _, other = map(str, devices_of(4))
    names = {"root": root, "other": other, None: root, 1: second, -1: "cpu"}
    output_device = other if output_device == "other" else output_device
    wrapper = wrap(net, output_device=output_device)
    x = inputs().to(names.get(place, place)).requires_grad_()
    y = wrapper(x)
    assert str(y.device) == names.get(output_device, str(output_device))
    y.square().sum().backward()
    assert x.grad.device == x.device
    one(inputs()).square().sum().backward()
    assert_same_module(wrapper, one)


@on_accelerators
def test_a_module_elsewhere_is_refused_and_moved_to_a_single_device(on: str) -> None:
    """As nn.DataParallel does."""
    one, net = pair()
    wrapper = DataParallel(net, devices_of(3), output_device="cpu")
    with pytest.raises(ValueError, match=r"Expected the module on \w+:0.*got '0.weight' on cpu"):
        wrapper(inputs())
    wrapper = DataParallel(net, devices_of(1), output_device="cpu")
    wrapper(inputs()).square().sum().backward()
    one(inputs()).square().sum().backward()
    assert_same_module(wrapper, one)


# State: whichever wrapper saved it


class Confusing(nn.Module):
    """A submodule that is really called `module`, beside a parameter with its names."""

    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.module = Confusing(False) if nested else nn.Linear(2, 2)


MODULES = [perceptron, lambda: nn.Sequential(nn.BatchNorm1d(3)), Confusing]


def ours(module: nn.Module) -> DataParallel[nn.Module]:
    return DataParallel(module, ["cpu"] * 2)


def theirs(module: nn.Module) -> nn.Module:
    return nn.DataParallel(copy.deepcopy(module))  # it moves it to a single GPU


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("saver", [lambda module: module, ours, theirs])
def test_states_of_modules_and_of_wrappers_are_loaded(make: Any, saver: Any) -> None:
    source = make()
    state = saver(source).state_dict()
    wrapper, before = ours(make()), list(state)
    result = wrapper.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys and list(state) == before
    assert list(wrapper.state_dict()) == list(source.state_dict())
    assert_equal_trees(dict(wrapper.state_dict()), dict(source.state_dict()), "state", **EXACT)
    # The wrapper is a part of a bigger module, which loads and saves.
    bigger = lambda inner: nn.ModuleDict({"head": nn.Linear(1, 1), "body": inner})
    plain, wrapped = bigger(source), bigger(ours(make()))
    state = plain.state_dict()
    saved = {f"body.{key}": value for key, value in saver(source).state_dict().items()}
    head = {key: value for key, value in state.items() if key.startswith("head")}
    result = wrapped.load_state_dict({**head, **saved})
    assert not result.missing_keys and not result.unexpected_keys
    assert list(wrapped.state_dict()) == list(state)
    assert_equal_trees(dict(wrapped.state_dict()), dict(state), "state", **EXACT)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**state, "body.nonsense": torch.ones(1)})


@pytest.mark.parametrize("prefix", ["", "module."])
def test_wrong_states_are_refused_as_by_the_module(prefix: str) -> None:
    wrapper = ours(perceptron())
    state = {prefix + key: value for key, value in perceptron().state_dict().items()}
    state[prefix + "9.weight"] = state.pop(prefix + "0.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.weight"[\s\S]*Unexpected.*9.weight"'):
        wrapper.load_state_dict(state)
    result = wrapper.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        wrapper.load_state_dict({f"{prefix}{key}": torch.ones(1) for key in wrapper.state_dict()})
    twice = {**perceptron().state_dict(), "module.0.bias": torch.ones(5)}
    with pytest.raises(ValueError, match=r"for both '0\.bias' and 'module\.0\.bias'"):
        wrapper.load_state_dict(twice)


def test_loaded_weights_are_used_by_every_replica(wrap: Any) -> None:
    torch.manual_seed(7)
    other = perceptron().double()
    wrapper = wrap(pair()[1]).eval()
    with torch.no_grad():
        wrapper(inputs())
        wrapper.load_state_dict(other.state_dict())
        assert_equal_trees(wrapper(inputs()), other(inputs()), "outputs", **EXACT)


# Copies, ends and errors


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
        nn.Sequential(other).load_state_dict(nn.Sequential(one).state_dict())
        other.close()


def dp_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dp-")]


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("end", ["closed", "collected"])
def test_threads_and_memory_end_with_the_wrapper(end: str) -> None:
    net = NORMS["spectral_norm, hook"](nn.Linear(4, 3))
    wrapper = DataParallel(net.to(devices_of(1)[0]), devices_of(3), executor="threads")
    for _ in range(10):
        wrapper(inputs().float()).sum().backward()
    assert len(dp_threads()) == 3
    before = tensors()
    for _ in range(10):
        wrapper(inputs().float()).sum().backward()
    assert soon(lambda: tensors() <= before), (before, tensors())
    if end == "closed":
        wrapper.close()
        assert not dp_threads()
        wrapper(inputs().float())
        assert len(dp_threads()) == 3
    gone = weakref.ref(wrapper)
    del wrapper
    assert soon(lambda: gone() is None and not dp_threads())


# Refusals


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (perceptron, (inputs(8), inputs(3)), r"batch\[0\] has 8 and batch\[1\] has 3\."),
        (
            perceptron,
            ([inputs(5), inputs(4)],),
            r"batch\[0\]\[0\] has 5 and batch\[0\]\[1\] has 4",
        ),
        (lambda: nn.LazyLinear(4), (inputs(),), "Expected initialised parameters, got LazyLinear"),
    ],
)
def test_calls_that_are_refused(make: Any, args: Any, message: str) -> None:
    """In nn.DataParallel the shards of the shorter argument run out, and rows are dropped."""
    wrapper = ours(make())
    with pytest.raises(ValueError, match=message):
        wrapper(*args)
    wrapper.close()


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got builtin"):
        DataParallel(len)  # type: ignore[type-var]  # which is refused


class OwnGather(DataParallel[nn.Module]):
    def gather(self, outputs: Any, output_device: Any) -> Any:
        return outputs


def test_stages_of_a_subclass_or_of_a_wrapper_are_refused() -> None:
    with_own = ours(perceptron())
    with_own.scatter = lambda *args: args
    for wrapper, name in ((OwnGather(perceptron(), ["cpu"] * 2), "gather"), (with_own, "scatter")):
        with pytest.raises(TypeError, match=rf"expected no stages of its own, got \['{name}'\]"):
            wrapper(inputs())
