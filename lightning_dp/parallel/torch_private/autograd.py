"""Autograd: its engine, and the backward that runs."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.torch_private.found import found
from lightning_dp.parallel.torch_private.substitute import Substitute

Functions: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
_AUTOGRAD = found(torch._C, "_autograd")

is_profiling: Callable[[], bool] = found(_AUTOGRAD, "_profiler_enabled")
"""Whether a profiler wants to know of ranges."""

keeps_graph: Callable[[], bool] = found(_AUTOGRAD, "_get_current_graph_task_keep_graph")
"""In a node: whether this backward was called with `retain_graph=True`."""

will_run: Callable[[Any], bool] = found(torch._C, "_will_engine_execute_node")
"""In a node: whether this backward, which may be for some `inputs=` alone, runs another node."""

_engine = found(torch.autograd.Variable, "_execution_engine")
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""In a node: lets this backward, once it has run all nodes, call something."""

renew_engine: Callable[[], bool] = _engine.is_checkpoint_valid
"""Makes the engine anew if the process has forked since it was made.

The first forward of a forked child would do so. Of two threads' first forwards both would, at the
same time, and the process would crash.
"""

_top_functions = found(_AUTOGRAD, "_top_saved_tensors_default_hooks")
saved_tensors_functions: Callable[[], Functions | None] = partial(_top_functions, False)
"""What the innermost `saved_tensors_hooks` of the calling thread was given."""

backward_id: Callable[[], int] = found(torch._C, "_current_graph_task_id")
"""The number of the backward of which the calling thread runs a node; -1 outside of backwards."""


def is_in_backward() -> bool:
    """Whether the calling thread runs a node of a backward."""
    return backward_id() != -1


_handler: ContextVar[Callable[..., None] | None] = ContextVar("_handler", default=None)


def _run_or_hand_over(*args: Any, **options: Any) -> Any:
    run, handler = partial(_run_backward.original, *args, **options), _handler.get()
    # torch.autograd.grad comes here, too.
    return handler(run, *args) if handler and options.get("accumulate_grad") else run()


_run_backward = Substitute(torch.autograd, "_engine_run_backward", _run_or_hand_over)


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
        _run_backward.add(self)
        _handler.set(self._handler)

    def end(self) -> None:
        """No longer."""
        _handler.set(self._before)
        _run_backward.discard(self)
