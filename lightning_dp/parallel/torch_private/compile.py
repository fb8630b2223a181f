"""Torch's compiler, and the CUDA graphs that its code makes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from operator import is_not
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lightning_dp.parallel.contexts import Contexts, Lasting, Paired
from lightning_dp.parallel.torch_private.found import found
from lightning_dp.parallel.torch_private.modules import child_table
from lightning_dp.parallel.torch_private.substitute import Substitute

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that calls of a module go to after `module.compile()`; None before."""

found(nn.Module, COMPILED_CALL)


def compiled_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward; after `module.compile()`, compiled with the options given there.

    Gone: an error, for modules that are compiled so.
    """
    compiled, forward = getattr(module, COMPILED_CALL), module.forward
    if compiled is None or getattr(compiled, "__func__", None) is nn.Module._call_impl:  # disabled
        return forward
    call, known = compiled_function(compiled), getattr(compiled, "__closure__", None) or ()
    cells = [CellType(forward) if _content(cell) == call else cell for cell in known]
    if call is None or not any(map(is_not, cells, known)):
        raise RuntimeError(
            f"Expected {type(module).__qualname__} to be compiled by compile(), got {compiled}, of "
            "which lightning_dp does not find what it calls. Wrap the module in torch.compile."
        )
    return with_cells(compiled, cells, forward)


def with_cells(
    function: FunctionType, cells: Iterable[CellType], original: Any = None
) -> FunctionType:
    """A function that knows other things by its own names.

    Of a compiled one, `original` is what it calls: that tells who compiles it as a part of more.
    """
    code, names, defaults = function.__code__, function.__globals__, function.__defaults__
    other = FunctionType(code, names, function.__name__, defaults, tuple(cells))
    other.__kwdefaults__ = function.__kwdefaults__
    other.__dict__.update(function.__dict__)
    if original is not None:
        set_compiled_function(other, original)
    return other


def not_compiled(function: Function) -> Function:
    """The function, at which the compiler ends what it compiles, and goes on behind it.

    Of what is compiled with `fullgraph=True` that is an error.
    """
    why = 'lightning_dp spreads this call: leave fullgraph out, which mode="step" alone allows'
    return cast(Function, torch.compiler.disable(function, reason=why))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def compiled_inner(module: nn.Module) -> nn.Module | None:
    """What `torch.compile(module)` wraps, or None. Gone: None, and replicas use root weights."""
    return child_table(module).get("_orig_mod")


def compiled_function(value: Any) -> Callable[..., Any] | None:
    """What `torch.compile(function)` calls, or None. Gone: None, and threads may compile."""
    if type(value) is not FunctionType or "_torchdynamo_disable" in value.__dict__:
        return None
    original: Callable[..., Any] | None = value.__dict__.get("_torchdynamo_orig_callable")
    return original


def set_compiled_function(function: FunctionType, original: Callable[..., Any]) -> None:
    """Tells who compiles a copy of a compiled function, as a part of more, what it calls."""
    function.__dict__["_torchdynamo_orig_callable"] = original
    function.__dict__["_torchdynamo_inline"] = original
    function.__dict__["_torchdynamo_wrapper_id"] = id(function)


def compilation_counts() -> Callable[[], Mapping[str, int]]:
    """What tells how often anything was compiled so far, as "total".

    Every step asks it, so it is no function of Python's where the compiler has been loaded. Gone:
    an error, where torch compiles at all.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return _no_counts
    counters: dict[str, Mapping[str, int]] = found(dynamo, "counters")
    return partial(counters.__getitem__, "frames")


def _no_counts() -> Mapping[str, int]:
    """Those of a program that had not loaded the compiler when it was asked first."""
    return {"total": 0} if "torch._dynamo.utils" not in sys.modules else compilation_counts()()


def before_compiling(callback: Callable[..., None]) -> bool:
    """Has a function called in every thread that is going to compile, until the compiler is reset.

    False if the compiler is not loaded. Gone: an error.
    """
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return False
    callbacks: list[Any] = found(found(module, "callback_handler"), "start_callbacks")
    if callback not in callbacks:
        callbacks.append(callback)
    return True


_is_raised: ContextVar[bool] = ContextVar("_is_raised", default=False)


def more_recompilations(times: int) -> AbstractContextManager[Any]:
    """Lets code be compiled so many times as often before it is given up; inside of itself, once.

    It holds in this context and its copies. Gone: an error, since code would not be compiled.
    """
    if _is_raised.get():
        return nullcontext()
    config: Any = importlib.import_module("torch._dynamo.config")
    names = ("recompile_limit", "accumulated_recompile_limit")
    limits = {name: found(config, name) * times for name in names}
    raised = Paired(partial(_is_raised.set, True), partial(_is_raised.set, False))
    return Contexts([raised, config.patch(limits)])


# CUDA graphs of compiled code (`mode="reduce-overhead"`)

_GRAPHS = ("tree_manager_containers", "tree_manager_locks")
_GRAPHS_MODULE = "torch._inductor.cudagraph_trees"


def graphs_of_thread() -> Callable[[], None] | None:
    """What gives another thread the CUDA graphs that this one makes, if compiled code may make any.

    A thread without them cannot call code that has some, or makes others, apart from these. Those
    of autograd have them. Gone: an error, where compiled code may make CUDA graphs.
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    importlib.import_module(_GRAPHS_MODULE)  # here: the thread that does it is given what they need
    known, get = found(torch._C, "_is_key_in_tls"), found(torch._C, "_get_obj_in_tls")
    if not all(map(known, _GRAPHS)):
        return None
    return partial(_have_graphs, list(map(get, _GRAPHS)))


def _have_graphs(graphs: list[Any]) -> None:
    for name, value in zip(_GRAPHS, graphs, strict=True):
        found(torch._C, "_stash_obj_in_tls")(name, value)


class one_invocation(Lasting):
    """While it lasts, what is called on a GPU belongs to the call of compiled code before it.

    CUDA graphs write over what they have returned as soon as a new call begins that they take for
    the next batch's. Gone: an error, where compiled code makes CUDA graphs.
    """

    def __init__(self, device: int) -> None:
        self.device = device

    def begin(self) -> None:
        """From here on, if there may be graphs."""
        if _GRAPHS_MODULE in sys.modules:
            _begins().add(self)

    def end(self) -> None:
        """No longer."""
        if _GRAPHS_MODULE in sys.modules:
            _begins().discard(self)


@cache
def _begins() -> Substitute:
    manager = found(sys.modules[_GRAPHS_MODULE], "CUDAGraphTreeManager")
    return Substitute(manager, "in_new_torch_compile_invocation", _begins_elsewhere)


def _begins_elsewhere(graphs: Any) -> bool:
    held = [user.device for user in [*_begins().users]]
    return graphs.device_index not in held and _begins().original(graphs)
