"""Private names of torch: all that the package uses stand here, and nowhere else.

A release of torch may take any of them away. That ends the import of this file, with an error that
tells the name and the release, unless it is said below what happens instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.utils import _device, _python_dispatch

from lightning_dp.parallel.contexts import Lasting, Paired

Tensors: TypeAlias = Sequence[Tensor]
Table: TypeAlias = dict[str, Any]
Functions: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


def found(owner: Any, name: str) -> Any:
    """A private name of torch's, or an ImportError that tells the release that has it no longer."""
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ImportError(
            f"Expected torch to have {where}.{name}, got torch {torch.__version__} without it. "
            "Install torch 2.13, with which lightning_dp has been tested, or a later lightning_dp."
        )
    return getattr(owner, name)


_AUTOGRAD = found(torch._C, "_autograd")


def _getter(example: Any, *names: str) -> Any:
    """A function that reads attributes, which an example must have."""
    for name in names:
        found(example, name)
    return attrgetter(*names)


# Modules

parameter_table: Callable[[nn.Module], Table] = _getter(nn.Module(), "_parameters")
"""The parameters of a module itself. `named_parameters` leaves out None, and takes its time."""

buffer_table: Callable[[nn.Module], Table] = _getter(nn.Module(), "_buffers")
"""The buffers of a module itself."""

child_table: Callable[[nn.Module], Table] = _getter(nn.Module(), "_modules")
"""The children of a module."""


def tables_as_attributes(parameters: Table, buffers: Table, children: Table) -> dict[str, Table]:
    """What gives a module these tables, put into its `__dict__`: it may have had no `__init__`."""
    return {"_parameters": parameters, "_buffers": buffers, "_modules": children}


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

hook_tables: Callable[[nn.Module], Sequence[dict[int, Any]]] = _getter(nn.Module(), *HOOK_TABLES)
"""A module's tables of hooks of forwards and backwards. A test tells of one that is new."""


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something is called when a backward comes through a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


FIXED_NAMES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
"""Attributes that every module has, and that stay the same objects; some tables of hooks do not."""


def copy_hook_tables(attributes: dict[str, Any]) -> None:
    """Gives a module, by its `__dict__`, tables of its own with the hooks that it has."""
    attributes.update({name: OrderedDict(attributes[name]) for name in HOOK_TABLES})


BatchNorm = batchnorm._BatchNorm
"""The class of batch norm layers of all dimensions."""


def check_batch_norm_input(layer: BatchNorm, x: Tensor) -> None:
    """Raises the layer's own error if it does not take inputs of so many dimensions."""
    layer._check_input_dim(x)


# State dicts


def format_versions(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The versions that modules have noted, by path. Gone: None, as of the oldest releases."""
    return getattr(state_dict, "_metadata", None)


def set_format_versions(state_dict: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Notes such versions in a state dict. Gone: nobody reads them."""
    state_dict._metadata = versions  # type: ignore[attr-defined]  # which torch gives it


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict is that of `get_extra_state`. Gone: not in files."""
    return key.endswith("_extra_state")


# Tensors

version: Callable[[Tensor], int] = _getter(Tensor, "_version")
"""How often a tensor was written to, though not through `.data`. Inference tensors raise."""

add_to_each: Callable[[Tensors, Tensors], None] = found(torch, "_foreach_add_")
"""Adds a term to each tensor, in place: few kernels for many tensors. See `add_as_read`."""

copy_to_each: Callable[[Tensors, Tensors], None] = found(torch, "_foreach_copy_")
"""Copies into each tensor of the first list what is in the second: few kernels."""

norm_of_each: Callable[[Tensors], Tensors] = found(torch, "_foreach_norm")
"""The 2-norm of each tensor, without dimension: few kernels."""

flattened: Callable[[Tensors], Tensor] = found(torch._utils, "_flatten_dense_tensors")
"""Tensors in one of a single dimension, without a Python call for each; it may be a view of one."""

# Hooks of parameters


class ParameterHooks(NamedTuple):
    """Those of `register_hook` and `register_post_accumulate_grad_hook`; None before the first."""

    on_gradient: Mapping[int, Callable[[Tensor], Tensor | None]] | None
    on_parameter: Mapping[int, Callable[[Tensor], Any]] | None


hooks_of = _getter(Tensor, "_backward_hooks", "_post_accumulate_grad_hooks")
"""Those of a parameter, of which `ParameterHooks` can be made."""


def hooked(parameters: Sequence[Tensor]) -> list[int]:
    """Positions of the parameters that have hooks of either kind."""
    return [i for i, (a, b) in enumerate(map(hooks_of, parameters)) if a or b]


gradient_hooks: Callable[[Tensor], Mapping[int, Any] | None] = _getter(Tensor, "_backward_hooks")
"""Those that autograd calls with the gradient, and with None where there is none."""

accumulation_hooks: Callable[[Tensor], Mapping[int, Any] | None] = _getter(
    Tensor, "_post_accumulate_grad_hooks"
)
"""Those that autograd calls when it has added the gradient to what was there."""


def take_hooks_off(parameter: Tensor) -> ParameterHooks:
    """Autograd calls no hook of the parameter until they are put back."""
    hooks = ParameterHooks(*hooks_of(parameter))
    # None would not take them off: autograd goes on with the table it was last given.
    put_hooks_back(parameter, ParameterHooks(OrderedDict(), OrderedDict()))
    return hooks


def put_hooks_back(parameter: Any, hooks: ParameterHooks) -> None:
    """The parameter has these hooks, and no others."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


# Autograd

is_profiling: Callable[[], bool] = found(_AUTOGRAD, "_profiler_enabled")
"""Whether a profiler wants to know of ranges."""

keeps_graph: Callable[[], bool] = found(_AUTOGRAD, "_get_current_graph_task_keep_graph")
"""In a node: whether this backward was called with `retain_graph=True`."""

will_run: Callable[[Any], bool] = found(torch._C, "_will_engine_execute_node")
"""In a node: whether this backward, which may be for some `inputs=` alone, runs another node."""

_engine = found(torch.autograd.Variable, "_execution_engine")
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""In a node: lets this backward, once it has run all nodes, call something."""

_top_functions = found(_AUTOGRAD, "_top_saved_tensors_default_hooks")
saved_tensors_functions: Callable[[], Functions | None] = partial(_top_functions, False)
"""What the innermost `saved_tensors_hooks` of the calling thread was given."""

backward_id: Callable[[], int] = found(torch._C, "_current_graph_task_id")
"""The number of the backward of which the calling thread runs a node; -1 outside of backwards."""


def is_in_backward() -> bool:
    """Whether the calling thread runs a node of a backward."""
    return backward_id() != -1


_run_backward = found(torch.autograd, "_engine_run_backward")
_handler: ContextVar[Callable[..., None] | None] = ContextVar("_handler", default=None)
_users: set[object] = set()


def _run_or_hand_over(*args: Any, **options: Any) -> Any:
    run, handler = partial(_run_backward, *args, **options), _handler.get()
    # torch.autograd.grad comes here, too.
    return handler(run, *args) if handler and options.get("accumulate_grad") else run()


class backwards_go_to(Lasting):
    """In this context, and in copies of it, a handler is given each backward that fills `.grad`.

    That is `loss.backward()` and `torch.autograd.backward`, by whatever name: both end in one
    function, which is replaced as long as anybody has a handler. A handler gets what runs the
    backward, the tensors and their gradients (a sequence each; None for a tensor without a graph),
    `retain_graph`, `create_graph` and the sequence of inputs, which is empty for all leaves.
    """

    def __init__(self, handler: Callable[..., None]) -> None:
        self._handler, self._before = handler, _handler.get()

    def begin(self) -> None:
        """From here on."""
        _users.add(self)
        _update()
        _handler.set(self._handler)

    def end(self) -> None:
        """No longer."""
        _handler.set(self._before)
        _users.discard(self)
        _update()


def _update() -> None:
    """Without a lock, which an interrupt could leave locked: the last one to write looks again."""
    function = None
    while function is not (wanted := _run_or_hand_over if _users else _run_backward):
        torch.autograd._engine_run_backward = function = wanted  # type: ignore[attr-defined]  # private


# Modes


class Modes(NamedTuple):
    """What a thread is in, outermost first; a default device apart from torch function modes."""

    default_device: torch.device | None = None
    function: tuple[Any, ...] = ()
    dispatch: tuple[Any, ...] = ()


NO_MODES = Modes()


_function_modes = found(torch.overrides, "_get_current_function_mode_stack")
_push_function_mode = found(torch.overrides, "_push_mode")
_pop_function_mode = found(torch.overrides, "_pop_mode")
_dispatch_modes = found(_python_dispatch, "_get_current_dispatch_mode_stack")
_push_dispatch_mode = found(_python_dispatch, "_push_mode")
_pop_dispatch_mode = found(_python_dispatch, "_pop_mode")


count_function_modes: Callable[[], int] = found(torch._C, "_len_torch_function_stack")
"""How many modes of torch functions the calling thread is in; a default device is one."""

count_dispatch_modes: Callable[[], int] = found(torch._C, "_len_torch_dispatch_stack")
"""How many dispatch modes the calling thread is in."""


def current_modes() -> Modes:
    """Those of the calling thread."""
    default_device, others = None, []
    for mode in _function_modes():
        if isinstance(mode, _device.DeviceContext):
            default_device = mode.device
        else:
            others.append(mode)
    return Modes(default_device, tuple(others), tuple(_dispatch_modes()))


def entries_of(modes: Modes) -> list[AbstractContextManager[Any]]:
    """Contexts in which a thread has these modes, to be entered in this order.

    Entered themselves, they would be written to, and threads share them.
    """
    default = modes.default_device  # which pushes, too, and writes nothing else
    function = [Paired(partial(_push_function_mode, m), _pop_function_mode) for m in modes.function]
    dispatch = [Paired(partial(_push_dispatch_mode, m), _pop_dispatch_mode) for m in modes.dispatch]
    return [*([] if default is None else [default]), *function, *dispatch]
