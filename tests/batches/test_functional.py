"""`replicate` and `parallel_apply`, with `scatter` and `gather`, in loops of one's own."""

import contextvars
import copy
import threading
from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import CPU, EXACT, inputs, perceptron, said, update
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

from lightning_dp import gather, parallel_apply, replicate, scatter

pytestmark = pytest.mark.usefixtures("on")


def pair(make: Any = perceptron) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make().double()
    return one, copy.deepcopy(one).to(devices_of(1)[0])


class Rnn(nn.Module):
    """Its output is a dict with batch first everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        states = self.rnn(x.view(len(x), 2, 2))[0]
        return {"states": states, "y": self.head(states[:, -1]) * scale}


@pytest.mark.parametrize("make", [perceptron, Rnn])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_four_together_are_the_module(make: Any, k: int) -> None:
    one, net = pair(make)
    devices = devices_of(k)
    for seed in range(3):
        x, expected_x = (inputs(7, seed=seed).requires_grad_() for _ in range(2))
        shards = scatter(x, devices)
        outputs = parallel_apply(replicate(net, devices), shards)
        y = gather(outputs, CPU, sizes=[len(shard) for shard in shards])
        expected = one(expected_x)
        for result in (y, expected):
            tensor = result["y"] if isinstance(result, dict) else result
            tensor.exp().mean().backward()
        assert_equal_trees(y, expected, "outputs", **EXACT)
        assert_equal_trees(x.grad, expected_x.grad, "gradient of the input", **EXACT)
        assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)
        update(net), update(one)


def test_gradients_of_each_replica_and_of_several_reach_the_module() -> None:
    one, net = pair()
    replicas = replicate(net, devices_of(3))
    parts = scatter(inputs(), devices_of(3))
    for replica, part, shard in zip(replicas, parts, inputs().split(2), strict=True):
        replica(part).square().sum().backward()
        one(shard).square().sum().backward()
        assert_equal_trees(gradients(net), gradients(one), "gradients", **EXACT)


def test_second_derivatives_go_through_replicas() -> None:
    one, net = pair()
    results = []
    for module, replica in ((one, one), (net, replicate(net, devices_of(2))[1])):
        device = next(replica.parameters()).device
        x = inputs().to(device).requires_grad_()
        (slope,) = torch.autograd.grad(replica(x).exp().sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append((x.grad, gradients(module)))
    assert_equal_trees(results[1], results[0], "gradients", **EXACT)


def test_replicas_have_the_values_of_their_time_and_leave_the_module_as_it_was() -> None:
    _, net = pair()
    before = {name: id(p) for name, p in net.named_parameters()}
    first = replicate(net, devices_of(2))[1]
    device = devices_of(2)[1]
    assert {t.device for t in first.state_dict().values()} == {device}
    update_of = replicate(net, devices_of(2))
    update_of[1](inputs().to(device)).sum().backward()
    update(net)
    assert {name: id(p) for name, p in net.named_parameters()} == before
    again = replicate(net, devices_of(2))[1]
    assert_equal_trees(dict(again.state_dict()), dict(net.state_dict()), "state", **EXACT)


def test_replicas_that_get_none_are_not_called() -> None:
    called: list[int] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            called.append(len(x))
            return super().forward(x)

    _, net = pair(lambda: Watching(4, 2))
    replicas = replicate(net, devices_of(3))
    x = inputs().to(devices_of(3)[1])
    outputs = parallel_apply(replicas, [None, x, None])
    assert called == [6] and outputs[0] is None and outputs[2] is None
    assert outputs[1].shape == (6, 2)
    assert parallel_apply(replicas, [None] * 3) == [None] * 3


def test_arguments_are_tuples_single_ones_and_keywords() -> None:
    class Echo(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    replicas: list[nn.Module] = [Echo()] * 3
    outputs = parallel_apply(replicas, [(1, 2), [1, 2], ()], [{"a": 1}, None, {"b": 2}])
    assert outputs == [((1, 2), {"a": 1}), (([1, 2],), {}), ((), {"b": 2})]
    for inputs_of, kwargs in (([1], None), ([1, 2, 3, 4], None), ([1, 2, 3], [{}])):
        with pytest.raises(ValueError, match="as many inputs and kwargs as replicas, got 3"):
            parallel_apply(replicas, inputs_of, kwargs)


def test_the_first_error_arrives_as_it_is_with_a_note_and_threads_end() -> None:
    class Failing(nn.Module):
        def forward(self, k: int) -> int:
            if k > 0:
                raise LookupError(f"failed in {k}")
            return k

    with pytest.raises(LookupError, match=r"^failed in 1") as caught:
        parallel_apply([Failing()] * 3, [0, 1, 2])
    assert said(caught.value) == "failed in 1\n[in replica 1 on cpu:1, forward]"
    assert not [t for t in threading.enumerate() if t.name.startswith("dp-")]


def test_threads_have_the_state_of_the_caller(on: str) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")

    class State(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            here = threading.current_thread() is threading.main_thread()
            return modes, super().forward(x).dtype, variable.get(), here

    replicas = replicate(State(4, 2).to(devices_of(1)[0]), devices_of(2))
    parts = scatter(inputs().float(), devices_of(2))
    for context, modes in (
        (torch.enable_grad(), (True, False)),
        (torch.no_grad(), (False, False)),
        (torch.inference_mode(), (False, True)),
    ):
        with context, torch.autocast(accelerator(), dtype=torch.bfloat16):
            outputs = parallel_apply(replicas, parts)
        assert outputs == [(modes, torch.bfloat16, "mine", False)] * 2


def test_modules_elsewhere_and_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices\[1\]: expected"):
        replicate(perceptron(), ["cpu", "cpu:3"])
    with pytest.raises(ValueError, match=r"Expected the module on cpu.*got '0.weight' on meta"):
        replicate(perceptron().to("meta"), ["cpu", "cpu"])


@on_separate
def test_devices_may_be_ids_names_or_repeat(on: str) -> None:
    other, one = devices_of(2)
    replicas = replicate(perceptron().to(one), [1, str(one), other])
    assert [next(r.parameters()).device for r in replicas] == [one, one, other]
    pointers = [next(r.parameters()).data_ptr() for r in replicas]
    assert pointers[0] == pointers[1]
