"""Thread state: what PyTorch keeps per thread, taken along from the caller into a worker.

Process-wide state (the default dtype, deterministic flags) is the main thread's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext

from lightning_dp.parallel.devices import current_device, current_stream


@dataclass(frozen=True)
class ThreadState:
    """The modes of the thread that captured them, for other threads to enter.

    Attributes:
        root: the root device.
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocasts: device type, dtype and cache flag of every enabled autocast.
        default_device: of `torch.set_default_device` or `with torch.device(...)`, or None.
        function_modes: torch function modes, outermost first.
        dispatch_modes: torch dispatch modes, outermost first.
        saved_tensors: the pack and unpack functions of `saved_tensors_hooks`, or None.
        streams: the current stream of each device that has streams.
    """

    root: torch.device
    grad: bool
    inference: bool
    autocasts: Sequence[tuple[str, torch.dtype, bool]]
    default_device: torch.device | None
    function_modes: Sequence[Any]
    dispatch_modes: Sequence[Any]
    saved_tensors: tuple[Callable[..., Any], Callable[..., Any]] | None
    streams: dict[torch.device, torch.Stream | None]

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadState:
        """The calling thread's state, as far as it concerns work on `devices` (root first)."""
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        defaults = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
        kinds = {"cpu", *[device.type for device in devices]}
        cache = torch.is_autocast_cache_enabled()
        return cls(
            root=devices[0],
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=[
                (kind, torch.get_autocast_dtype(kind), cache)
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            ],
            default_device=defaults[-1] if defaults else None,
            function_modes=[mode for mode in modes if not isinstance(mode, DeviceContext)],
            dispatch_modes=dispatch._get_current_dispatch_mode_stack(),
            saved_tensors=torch._C._autograd._top_saved_tensors_default_hooks(False),
            streams={d: current_stream(d) for d in devices if d.type != "cpu"},
        )

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Gives the calling thread this state, with `device` as its current device.

        A default device that names the root device names the replica's device here: code that
        leaves the device out means "the module's".
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(current_device(device, self.streams.get(device)))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, cache in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            self._enter_modes(stack, device)
            if self.saved_tensors is not None:
                stack.enter_context(saved_tensors_hooks(*self.saved_tensors))
            yield

    @contextlib.contextmanager
    def moved_to(self, device: torch.device) -> Iterator[None]:
        """Gives the thread that captured this state the current and default device of `entered`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(current_device(device, self.streams.get(device)))
            default = self._default_device_on(device)
            if default is not None and default != self.default_device:
                stack.enter_context(DeviceContext(default))
            yield

    def _default_device_on(self, device: torch.device) -> torch.device | None:
        return device if self.default_device == self.root else self.default_device

    def _enter_modes(self, stack: contextlib.ExitStack, device: torch.device) -> None:
        # Modes are pushed, not entered: entering writes to the object, or to a global that names
        # the default device, and other threads are entering the same one.
        default = self._default_device_on(device)
        defaults = [] if default is None else [DeviceContext(default)]
        for mode in (*defaults, *self.function_modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]
            stack.callback(_pop_mode)
        for mode in self.dispatch_modes:
            dispatch._push_mode(mode)
            stack.callback(dispatch._pop_mode)
