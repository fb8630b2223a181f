"""Private names of torch, Lightning and torchmetrics: they stand in two files, and are there.

What the package does with a name is tested where it does it; here a release that renames one is
told which.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.utilities import distributed
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from support.oracle import QUIET
from support.programs import ROOT
from torch import nn
from torchmetrics import MeanMetric

from lightning_dp import lightning_private
from lightning_dp.parallel import torch_private as private

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's imports

PACKAGE = ROOT / "lightning_dp"
FILES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}
ROOMS = ("lightning_private.py", "parallel/torch_private.py")
PUBLIC = {
    *("_fields", "_replace", "_make"),  # of named tuples
    *("_current_frames", "_is_gil_enabled", "_exit"),  # of sys and os: documented
    "_repr_png_",  # of IPython
    *("_target_", "_convert_", "_partial_"),  # of Hydra's configs
}
HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


def _trainer(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, "accelerator": "cpu", "devices": 1, **options})


NAMES: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    # Lightning and torchmetrics.
    (BoringModel, ("_device", "_current_fx_name")),
    (MeanMetric, ("_defaults", "_update_count", "_computed", "_forward_cache")),
    (
        _trainer,
        (
            *("_results", "_logger_connector.should_update_logs", "fit_loop._should_accumulate"),
            "fit_loop.epoch_loop._batches_that_stepped",
            "_accelerator_connector._devices_flag",
        ),
    ),
    (DDPStrategy, ("_layer_sync",)),
    (lambda: SingleDeviceStrategy("cpu"), ("_checkpoint_io",)),
    (lambda: distributed, ("_init_dist_connection", "_destroy_dist_connection")),
    (lambda: overrides, ("_IndexBatchSamplerWrapper",)),
    # torch.
    (
        lambda: nn.BatchNorm1d(1),
        ("_parameters", "_buffers", "_modules", "_compiled_call_impl", "_check_input_dim", *HOOKS),
    ),
    (lambda: nn.Linear(1, 1).state_dict(), ("_metadata",)),
    (
        lambda: nn.Parameter(torch.ones(1)),
        ("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
    ),
    (lambda: torch.ones(1).untyped_storage(), ("_cdata",)),
    (lambda: torch.distributions.Normal(0, 1), ("_batch_shape",)),
    (lambda: torch.compile(nn.Linear(1, 1), backend="eager"), ("_orig_mod",)),
    (
        lambda: torch.compile(lambda x: x, backend="eager"),
        # "_torchdynamo_wrapper_id" is newer than torch 2.8; set for an older one, nobody reads it.
        ("_torchdynamo_orig_callable", "_torchdynamo_inline"),
    ),
    (lambda: torch.compiler.disable(lambda x: x), ("_torchdynamo_disable",)),
    (
        lambda: torch,
        (
            *("_foreach_add_", "_foreach_copy_", "_C._storage_Use_Count"),
            *("_C._will_engine_execute_node", "_C._current_graph_task_id"),
            *("_C._len_torch_function_stack", "_C._len_torch_dispatch_stack"),
            *("_C._autograd._profiler_enabled", "_C._autograd._top_saved_tensors_default_hooks"),
            "_C._autograd._get_current_graph_task_keep_graph",
            "autograd._engine_run_backward",
            "autograd.Variable._execution_engine.queue_callback",
            "autograd.Variable._execution_engine.is_checkpoint_valid",
            *("overrides._get_current_function_mode_stack", "utils._device.DeviceContext"),
            "utils._python_dispatch.TorchDispatchMode",
            *("utils._pytree.SUPPORTED_NODES", "utils._pytree.tree_flatten"),
            "utils._pytree.tree_unflatten",
            "utils.checkpoint._checkpoint_without_reentrant_generator",
            "_dynamo.config.accumulated_recompile_limit",
            *("_dynamo.config.recompile_limit", "_dynamo.eval_frame._TorchDynamoContext"),
            "_dynamo.utils.counters",
        ),
    ),
]


@pytest.mark.parametrize(("owner", "names"), NAMES)
def test_private_names_are_there(owner: Callable[[], Any], names: tuple[str, ...]) -> None:
    for name in names:
        reduce(getattr, name.split("."), owner())  # its AttributeError says which is gone


def used(tree: ast.AST) -> Iterator[str]:
    """Private names in a file: attributes, imports, and those that `getattr` is given."""
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [name for alias in node.names for name in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        yield from (n for n in map(str, names) if re.fullmatch(r"_(?!_)\w+", n) and n not in PUBLIC)


def defined(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, arguments, variables and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_private_names_of_others_stand_in_two_files() -> None:
    ours = {name for file in FILES if file not in ROOMS for name in defined(FILES[file])}
    found = {file: {*used(tree)} - ours for file, tree in FILES.items() if file not in ROOMS}
    found = {file: names for file, names in found.items() if names}
    assert not found, f"give these a function in {' or '.join(ROOMS)}: {found}"


@pytest.mark.parametrize("room", ROOMS)
def test_each_private_name_of_others_is_tested(room: str) -> None:
    tested = {part for _, names in NAMES for name in names for part in name.split(".")}
    missing = {*used(FILES[room])} - {*defined(FILES[room])} - tested
    assert not missing, f"add these to NAMES: {missing}"


def test_private_names_are_looked_up_when_they_are_used() -> None:
    """At import, a name that a release of torch has renamed would break the whole package."""
    body = FILES["parallel/torch_private.py"].body
    at_import = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [n.attr for node in at_import for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]


# --- what is built of them ------------------------------------------------------------------------


def test_a_name_that_is_gone_is_an_error_with_the_release() -> None:
    release = f"lightning {lightning.__version__}"
    with pytest.raises(RuntimeError, match=f"Trainer to have _gone, got {release} without it"):
        lightning_private.found(_trainer(), "_gone")


def test_hook_tables_and_fixed_names_are_all_there() -> None:
    names = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert names == set(HOOKS) == set(private.HOOK_TABLES)
    net = nn.Linear(1, 1)
    before = {name: vars(net)[name] for name in private.FIXED_NAMES}
    for add in (net.register_forward_hook, net.register_forward_pre_hook):
        add(print, with_kwargs=True)
    net.register_full_backward_hook(print)
    net.load_state_dict(net.double().eval().state_dict())
    changed = {name for name, value in before.items() if vars(net)[name] is not value}
    assert changed <= {"_is_full_backward_hook"}  # None before the first hook


def test_a_view_is_not_alone_in_its_memory() -> None:
    tensor = torch.ones(4)
    view = tensor.view(2, 2)
    assert not private.is_alone_in_memory(tensor) and not private.is_alone_in_memory(view)
    del view
    assert private.is_alone_in_memory(tensor)
