"""Inputs that go wrong in `torch.nn.DataParallel`, one by one, and what ours does with them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.device_kinds import on_separate
from support.forward_twins import EXACT, inputs, wrapping
from support.oracle import accelerator, assert_equal_trees, devices_of, gradients
from torch import Tensor, nn

import lightning_dp.parallel.devices
from lightning_dp import DataParallel

pytestmark = pytest.mark.usefixtures("on")


class Calls(nn.Linear):
    """A layer that hands its arguments and what it computes to a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(super().forward, *args, **kwargs)


@pytest.fixture
def wrap(on: str) -> Iterator[Callable[..., DataParallel[Any]]]:
    """Wraps a module, or a function that calls a layer."""
    with wrapping() as make:
        yield lambda call, k=2, **options: make(
            call if isinstance(call, nn.Module) else Calls(call), k, **options
        )


def test_8_and_3_rows_together_are_an_error_that_names_both(wrap: Any) -> None:
    """There: the shards of the shorter one run out, and the rest of the rows is dropped."""
    net = wrap(lambda layer, x, other=None: layer(x), k=4)
    with pytest.raises(ValueError, match=r"batch\[0\] has 8 and batch\[1\] has 3\."):
        net(inputs(8), inputs(3))
    with pytest.raises(ValueError, match=r"batch\[0\] has 8 and batch\['other'\] has 3\."):
        net(inputs(8), other=inputs(3))


@pytest.mark.usefixtures("unchecked")
def test_batch_2_on_4_devices_with_an_argument_that_is_no_tensor(wrap: Any) -> None:
    """There: keywords without tensors are replicated to more devices than have a shard."""
    seen: list[float] = []

    def call(layer: Any, x: Tensor, scale: float, flag: str) -> Tensor:
        seen.append(len(x))
        return layer(x) * scale

    net = wrap(call, k=4, output_device="cpu")
    expected = copy.deepcopy(net.module).cpu()(inputs(2), scale=3.0, flag="a")
    seen.clear()
    assert_equal_trees(net(inputs(2), scale=3.0, flag="a"), expected, "outputs", **EXACT)
    assert seen == [1, 1] and net.last_sizes == (1, 1, 0, 0)


def test_a_list_of_str_is_cut_with_the_samples(wrap: Any) -> None:
    """There: every device gets the whole list."""

    def call(layer: Any, x: Tensor, names: list[str]) -> Any:
        assert len(names) == len(x)
        return layer(x), [name.upper() for name in names]

    _, names = wrap(call)(inputs(5), list("abcde"))
    assert names == list("ABCDE")


@dataclass(frozen=True)
class Batch:
    x: Tensor
    scale: float


def test_a_dataclass_with_a_cpu_tensor_is_cut_and_moved(wrap: Any) -> None:
    """There: it is no container, so every device gets all of it, and on the CPU."""

    def call(layer: Any, batch: Batch) -> Batch:
        return Batch(layer(batch.x), batch.scale)

    net = wrap(call, output_device="cpu")
    output = net(Batch(inputs(5), 2.0))
    assert isinstance(output, Batch) and output.scale == 2.0
    expected = copy.deepcopy(net.module).cpu()(Batch(inputs(5), 2.0))
    assert_equal_trees(output.x, expected.x, "outputs", **EXACT)
    assert net.last_sizes == (3, 2)


def test_an_input_without_dimensions_goes_to_every_replica(wrap: Any) -> None:
    """There: a 0-dim tensor cannot be cut, and raises."""
    net = wrap(lambda layer, x, scale: layer(x) * scale, output_device="cpu")
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = net(inputs(), scale)
    y.sum().backward()
    one, own = copy.deepcopy(net.module).cpu(), scale.detach().clone().requires_grad_()
    expected = one(inputs(), own)
    expected.sum().backward()
    assert_equal_trees([y, scale.grad], [expected, own.grad], "outputs", **EXACT)


@pytest.mark.parametrize("value", [2.5, True, "text", None])
def test_outputs_that_are_no_tensors_come_as_they_are(wrap: Any, value: Any) -> None:
    """There: 'float' object is not iterable, and strings are zipped letter by letter."""
    net = wrap(lambda layer, x: value)
    assert net(inputs()) == value and type(net(inputs())) is type(value)
    net = wrap(lambda layer, x: {"y": layer(x), "value": value})
    output = net(inputs())
    assert output["value"] == value and output["y"].shape == (6, 3)


@pytest.mark.usefixtures("unchecked")
def test_dicts_with_other_keys_on_some_replicas_keep_all_keys(wrap: Any) -> None:
    """There: an error, or the keys of the first replica."""

    def call(layer: Any, x: Tensor) -> dict[str, Tensor]:
        extra = {"few": layer(x)} if len(x) == 2 else {"many": layer(x)}
        return {"y": layer(x), **extra}

    net = wrap(call, output_device="cpu")
    output = net(inputs(5))
    y = copy.deepcopy(net.module).cpu()(inputs(5))["y"]
    assert set(output) == {"y", "many", "few"}
    assert_equal_trees(output, {"y": y, "many": y[:3], "few": y[3:]}, "outputs", **EXACT)


def test_outputs_may_be_gathered_on_the_cpu(wrap: Any) -> None:
    """There: an error in the backward, or none at all."""
    net = wrap(lambda layer, x: layer(x), output_device="cpu")
    one = copy.deepcopy(net.module).cpu()
    for module in (net, one):
        y = module(inputs())
        assert y.device.type == "cpu"
        y.square().sum().backward()
    assert_equal_trees(gradients(net.module), gradients(one), "gradients", **EXACT)


@on_separate
def test_a_module_on_another_device_is_moved_with_a_warning(on: str) -> None:
    """There: module must have its parameters and buffers on device cuda:0."""
    root, _, other = devices_of(3)
    net = DataParallel(nn.Linear(4, 3).to(other), devices_of(2))
    with pytest.warns(UserWarning, match=f"got a part of it on {other}: moved to {root}"):
        assert net(inputs().float()).device == root
    net.close()


def test_ids_on_a_machine_without_accelerators_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There: the module is used as it is, on one device, without a word."""
    monkeypatch.setattr(lightning_dp.parallel.devices, "accelerator_type", lambda: None)
    with pytest.raises(ValueError, match=r"device_ids\[0\]: expected 'cpu', since this machine"):
        DataParallel(nn.Linear(1, 1), device_ids=[0, 1])
    assert DataParallel(nn.Linear(1, 1)).devices == [torch.device("cpu")]


@pytest.mark.usefixtures("unchecked")
def test_bf16_autocast_is_bf16_in_every_replica(wrap: Any, on: str) -> None:
    """There: replicas compute in the default dtype of autocast, float16."""
    seen: list[torch.dtype] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    net = wrap(Watching(4, 3), executor="threads")
    with torch.autocast(accelerator(), dtype=torch.bfloat16):
        assert net(inputs().float()).dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 2


@pytest.mark.usefixtures("unchecked")
def test_inference_mode_is_on_in_every_replica(wrap: Any) -> None:
    """There: threads know no_grad but not inference mode."""
    seen: list[bool] = []

    def call(layer: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return layer(x)

    net = wrap(call, executor="threads")
    with torch.inference_mode():
        assert net(inputs()).is_inference()
    assert seen == [True, True]
    net(inputs()).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_an_unused_parameter_keeps_none_and_adamw_leaves_it(wrap: Any) -> None:
    """There: its gradient is zero, so that weight decay and momentum move it."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = wrap(Partly(), k=3)
    before = copy.deepcopy(net.module)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    net(inputs()).square().sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in net.module.unused.parameters())
    assert torch.equal(net.module.unused.weight, before.unused.weight)
    assert not torch.equal(net.module.used.weight, before.used.weight)
