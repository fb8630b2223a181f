"""Each private name of torch in `torch_private.modules` does what is said of it there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import found
from lightning_dp.parallel.torch_private import modules as private


def test_a_name_that_is_gone_is_told_with_the_release() -> None:
    with pytest.raises(ImportError, match=r"torch to have Tensor\._gone, got torch [\d.]+"):
        found(Tensor, "_gone")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3, bias=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", None)
        self.child = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight + self.mean


def test_parameters() -> None:
    net = Net()
    table = private.parameter_table(net)
    assert list(table) == ["weight", "bias"] and table["bias"] is None
    assert table["weight"] is net.weight
    table["weight"] = nn.Parameter(torch.zeros(3))
    assert net.weight is table["weight"], "it is the module's own table"


def test_buffers() -> None:
    net = Net()
    table = private.buffer_table(net)
    assert list(table) == ["mean", "var"] and table["var"] is None
    net.mean = torch.ones(3)
    assert table["mean"] is net.mean, "it is the module's own table"


def test_modules() -> None:
    net = Net()
    table = private.child_table(net)
    assert list(table) == ["layer"] and table["layer"] is net.layer
    net.layer = nn.Linear(2, 3)
    assert table["layer"] is net.layer, "it is the module's own table"


def test_parameters_buffers_and_modules_make_a_module_without_init() -> None:
    net, twin = Net(), object.__new__(Net)
    tables = [private.parameter_table(net), private.buffer_table(net), private.child_table(net)]
    vars(twin).update(vars(net), **private.tables_as_attributes(*map(dict, tables)))
    twin.weight = nn.Parameter(torch.full((3,), 2.0))
    x = torch.ones(1, 2)
    assert torch.equal(twin(x), net(x) * 2)
    assert list(twin.state_dict()) == list(net.state_dict()) == ["weight", "mean", "layer.weight"]


ADD_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "_forward_hooks": lambda module: module.register_forward_hook(print),
    "_forward_hooks_with_kwargs": lambda m: m.register_forward_hook(print, with_kwargs=True),
    "_forward_hooks_always_called": lambda m: m.register_forward_hook(print, always_call=True),
    "_forward_pre_hooks": lambda module: module.register_forward_pre_hook(print),
    "_forward_pre_hooks_with_kwargs": lambda m: m.register_forward_pre_hook(
        print, with_kwargs=True
    ),
    "_backward_hooks": lambda module: module.register_full_backward_hook(print),
    "_backward_pre_hooks": lambda module: module.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("name", ADD_HOOKS)
def test_tables_of(name: str) -> None:
    """Of `_forward_hooks` and so on."""
    module = nn.Linear(1, 1)
    handle = ADD_HOOKS[name](module)
    assert vars(module)[name] in private.hook_tables(module)
    assert handle.id in vars(module)[name]
    tables = [table for table in private.hook_tables(module) if table]
    assert all(list(table) == [handle.id] for table in tables)


def test_no_table_of_forward_hooks_or_backward_hooks_is_new() -> None:
    names = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert names == set(ADD_HOOKS), "hook_tables has to know them all"


def test_forward_hooks_and_others_are_copied_and_run() -> None:
    net, twin = nn.Linear(1, 1), object.__new__(nn.Linear)
    seen: list[nn.Module] = []
    net.register_forward_hook(lambda module, *_: seen.append(module))
    vars(twin).update(vars(net))
    private.copy_hook_tables(vars(twin))
    twin.register_forward_pre_hook(lambda module, *_: seen.append(module))
    net(torch.ones(1))
    assert seen == [net], "the twin's own hook is not the module's"
    twin(torch.ones(1))
    assert seen == [net, twin, twin]


def test_fixed_names_of_modules_stay_the_same_objects() -> None:
    net = Net()
    before = {name: vars(net)[name] for name in private.FIXED_NAMES}
    for add in ADD_HOOKS.values():
        add(net)
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    net.load_state_dict(net.state_dict())
    net.double().eval()
    changed = {name for name, value in before.items() if vars(net)[name] is not value}
    # The kind of backward hooks, which is None before the first of them.
    assert changed <= {"_is_full_backward_hook"}


def test_BatchNorm_is_the_class_of_all_layers() -> None:
    layers = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d]
    assert all(issubclass(layer, private.BatchNorm) for layer in layers)
    assert not issubclass(nn.InstanceNorm1d, private.BatchNorm)
    assert not issubclass(nn.GroupNorm, private.BatchNorm)


def test_check_input_dim() -> None:
    private.check_batch_norm_input(nn.BatchNorm1d(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected 4D input"):
        private.check_batch_norm_input(nn.BatchNorm2d(2), torch.ones(1, 2))


def test_metadata_of_a_state_dict() -> None:
    layer = nn.BatchNorm1d(1)
    versions = private.format_versions(layer.state_dict())
    assert versions is not None and versions[""]["version"] == layer._version
    assert private.format_versions({"weight": torch.ones(1)}) is None


def test_metadata_says_how_load_state_dict_reads() -> None:
    """Before version 2 batch norm did not save how many batches it had seen."""
    state = nn.BatchNorm1d(1).state_dict()
    del state["num_batches_tracked"]
    bare = OrderedDict(state)
    private.set_format_versions(bare, {"": {"version": 2}})
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(1).load_state_dict(bare)
    private.set_format_versions(bare, {"": {"version": 1}})
    nn.BatchNorm1d(1).load_state_dict(bare)


def test_extra_state_is_a_key_of_state_dicts() -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

    keys = nn.Sequential(Stateful(1, 1)).state_dict()
    assert [key for key in keys if private.is_extra_state(key)] == ["0._extra_state"]
