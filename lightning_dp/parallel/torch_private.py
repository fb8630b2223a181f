"""Every private name of torch that the package uses stands in this file, and in no other.

A private name is looked up when the feature that needs it runs, never at import: a name that a
release of torch renames breaks that feature, with torch's AttributeError, and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])
Functions: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
"""The two functions of `saved_tensors_hooks`: pack and unpack."""
Table: TypeAlias = dict[str, Any]
Tensors: TypeAlias = Sequence[Tensor]

_torch: Any = torch  # without types, which private names lack


def _found(path: str) -> Any:
    """A function of torch; where a release lacks it, one that raises AttributeError if called."""
    find = attrgetter(path)
    try:
        return find(torch)
    except AttributeError:
        return lambda *args, **options: find(torch)(*args, **options)


# --- Modules and state dicts

parameter_table: Callable[[nn.Module], Table] = attrgetter("_parameters")
"""The module's parameters by name, None included; submodules have their own."""
buffer_table: Callable[[nn.Module], Table] = attrgetter("_buffers")
child_table: Callable[[nn.Module], Table] = attrgetter("_modules")

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
hook_tables: Callable[[nn.Module], Sequence[dict[int, Any]]] = attrgetter(*HOOK_TABLES)
"""The module's tables of forward and backward hooks."""

FIXED_NAMES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
"""Attributes of every module that stay the same object for the module's whole life."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def tables_as_attributes(parameters: Table, buffers: Table, children: Table) -> dict[str, Table]:
    """The entries of a module's `__dict__` that give it these tables."""
    return {"_parameters": parameters, "_buffers": buffers, "_modules": children}


def check_batch_norm_input(layer: nn.Module, x: Tensor) -> None:
    """Raises the layer's error if `x` does not have the number of dimensions that it takes."""
    cast(Any, layer)._check_input_dim(x)


def copy_format_versions(
    source: Mapping[str, Any], target: OrderedDict[str, Any], paths: Mapping[str, str]
) -> None:
    """Copies the format versions of modules to another state dict, where they have new paths."""
    versions = getattr(source, "_metadata", None)
    if versions is not None:
        kept = OrderedDict((new, versions[old]) for old, new in paths.items() if old in versions)
        cast(Any, target)._metadata = kept


def flatten_node(node: Any) -> list[Any] | None:
    """The children of an object whose class is a registered pytree node; None for others."""
    if type(node) not in _torch.utils._pytree.SUPPORTED_NODES:
        return None
    values, _ = _torch.utils._pytree.tree_flatten(node, is_leaf=lambda child: child is not node)
    return list(values)


def unflatten_node(node: Any, values: list[Any]) -> Any:
    """An object like a registered `node`, with other children."""
    _, spec = _torch.utils._pytree.tree_flatten(node, is_leaf=lambda child: child is not node)
    return _torch.utils._pytree.tree_unflatten(values, spec)


# --- Tensors and their memory

version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to, but through `.data`. Inference tensors raise an error."""


add_to_each: Callable[[Tensors, Tensors], None] = _found("_foreach_add_")
"""Adds terms[i] to sums[i] in place, in few kernels."""
copy_to_each: Callable[[Tensors, Tensors], None] = _found("_foreach_copy_")
"""Copies sources[i] into targets[i], in few kernels."""


def set_batch_shape(distribution: Any, shape: torch.Size) -> None:
    """Sets the shape that a distribution's `batch_shape` gives; it follows from no parameter."""
    distribution._batch_shape = shape


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether no other tensor, such as a view, shares the tensor's memory."""
    memory = cast(Any, tensor.untyped_storage())
    return bool(_torch._C._storage_Use_Count(memory._cdata) == 2)  # the tensor's and `memory`


# --- Hooks of parameters


class ParameterHooks(NamedTuple):
    """Tables of `register_hook` and `register_post_accumulate_grad_hook`; None before the first."""

    on_gradient: Mapping[int, Callable[[Tensor], Tensor | None]] | None
    on_parameter: Mapping[int, Callable[[Tensor], Any]] | None


gradient_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""Hooks that autograd calls with the gradient, or with None where there is none."""
accumulation_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
hooks_of: Callable[[Tensor], Any] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def hooked(parameters: Tensors) -> list[int]:
    """Positions of the parameters that have hooks of either kind."""
    if not any(map(gradient_hooks, parameters)) and not any(map(accumulation_hooks, parameters)):
        return []
    return [i for i, parameter in enumerate(parameters) if any(hooks_of(parameter))]


def take_hooks_off(parameter: Tensor) -> ParameterHooks:
    """Suspends a parameter's hooks until `put_hooks_back`."""
    hooks = ParameterHooks(*hooks_of(parameter))
    # An empty table, since after None autograd would keep to the table that it was given before.
    put_hooks_back(parameter, ParameterHooks(OrderedDict(), OrderedDict()))
    return hooks


def put_hooks_back(parameter: Any, hooks: ParameterHooks) -> None:
    """Sets a parameter's hooks."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


# --- Autograd


is_profiling: Callable[[], bool] = _found("_C._autograd._profiler_enabled")
"""Whether a torch profiler records ranges."""
keeps_graph: Callable[[], bool] = _found("_C._autograd._get_current_graph_task_keep_graph")
"""In a node: whether this backward was called with `retain_graph=True`."""
will_run: Callable[[Any], bool] = _found("_C._will_engine_execute_node")
"""In a node: whether this backward, which may have `inputs=`, also runs a node."""


backward_id: Callable[[], int] = _found("_C._current_graph_task_id")
"""The number of the backward whose node the calling thread runs; -1 outside of backwards."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """In a node: calls `callback` once this backward has run all its nodes."""
    _torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_tensors_functions() -> Functions | None:
    """The functions of the calling thread's innermost `saved_tensors_hooks`."""
    hooks: Functions | None = _torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


# --- Modes: the default device, torch function modes, dispatch modes


MODE_COUNTS: tuple[Callable[[], object], ...] = (
    _found("_C._len_torch_function_stack"),
    _found("_C._len_torch_dispatch_stack"),
    partial(_found("_C._autograd._top_saved_tensors_default_hooks"), False),
)
"""What the calling thread has of modes (a default device is one) and saved tensor hooks."""


def default_device() -> torch.device | None:
    """The calling thread's default device, if it has set one."""
    return next((mode.device for mode in reversed(_function_modes()) if _is_device(mode)), None)


def has_own_modes() -> bool:
    """Whether there are modes or hooks that other threads cannot enter too: all but a device."""
    _, dispatch, saving = [count() for count in MODE_COUNTS]
    return bool(dispatch or saving or not all(map(_is_device, _function_modes())))


def _function_modes() -> list[Any]:
    return list(_torch.overrides._get_current_function_mode_stack())


def _is_device(mode: Any) -> bool:
    return isinstance(mode, _torch.utils._device.DeviceContext)


# --- The compiler

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that a module's calls go to after `module.compile()`; None before."""


def compiled_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward; after `module.compile()`, compiled with the options given there."""
    compiled = getattr(module, COMPILED_CALL)
    if compiled_function(compiled) is None:
        return module.forward
    contexts = importlib.import_module("torch._dynamo.eval_frame")._TorchDynamoContext
    contents = [cell.cell_contents for cell in compiled.__closure__]
    options = next(content for content in contents if isinstance(content, contexts))
    return cast(Callable[..., Any], options(module.forward))


def compiled_inner(module: nn.Module) -> nn.Module | None:
    """The module that `torch.compile(module)` wrapped; None for a module that is no wrapper."""
    return child_table(module).get("_orig_mod")


def compiled_function(value: Any) -> Callable[..., Any] | None:
    """The function that `torch.compile(function)` wrapped; None for any other value."""
    if type(value) is not FunctionType or "_torchdynamo_disable" in value.__dict__:
        return None
    return value.__dict__.get("_torchdynamo_orig_callable")


def with_cells(
    function: FunctionType, cells: Iterable[CellType], original: Any = None
) -> FunctionType:
    """A copy of a function with other closure cells; `original` is what a compiled one wraps."""
    code, names, defaults = function.__code__, function.__globals__, function.__defaults__
    other = FunctionType(code, names, function.__name__, defaults, tuple(cells))
    other.__kwdefaults__ = function.__kwdefaults__
    other.__dict__.update(function.__dict__)
    if original is not None:  # dynamo inlines these where it compiles a caller
        other.__dict__["_torchdynamo_orig_callable"] = original
        other.__dict__["_torchdynamo_inline"] = original
        other.__dict__["_torchdynamo_wrapper_id"] = id(other)
    return other


def not_compiled(function: Function) -> Function:
    """The function, behind a graph break; with `fullgraph=True` the compiler raises an error."""
    why = 'lightning_dp spreads this call: leave fullgraph out, which mode="step" alone allows'
    return cast(Function, torch.compiler.disable(function, reason=why))


dynamo_utils: Callable[[], Any] = partial(sys.modules.get, "torch._dynamo.utils")
"""Dynamo's module with `counters`; None while nothing has been compiled."""


def more_recompilations(times: int) -> AbstractContextManager[None]:
    """Raises dynamo's recompile limits, which count all replicas together, for a while."""
    config: Any = importlib.import_module("torch._dynamo.config")
    defaults = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
    limits = {name: max(getattr(config, name), times * n) for name, n in defaults.items()}
    return cast(AbstractContextManager[None], config.patch(limits))
