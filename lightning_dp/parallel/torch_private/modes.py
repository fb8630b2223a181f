"""Modes: the default device, and what torch functions and dispatches go through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _device, _python_dispatch

from lightning_dp.parallel.contexts import Paired
from lightning_dp.parallel.torch_private.found import found


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
