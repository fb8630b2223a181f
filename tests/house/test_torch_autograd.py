"""Each private name of torch in `torch_private.autograd` does what is said of it there."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several_processes import in_another_process
from torch import Tensor
from torch.autograd import backward as imported_by_name
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.torch_private import autograd as private


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Callable[[Any], None]) -> Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.ask(ctx)
        return gradient, None


def _with_node(x: Tensor, ask: Callable[[Any], None]) -> Tensor:
    result: Tensor = _AsksInBackward.apply(x, ask)
    return result.sum()


def test_profiler_enabled() -> None:
    assert not private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiling()
    assert not private.is_profiling()


def test_get_current_graph_task_keep_graph() -> None:
    seen: list[bool] = []
    loss = _with_node(torch.ones(1, requires_grad=True), lambda _: seen.append(keeps()))
    keeps = private.keeps_graph
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


def test_will_engine_execute_node() -> None:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen: list[bool] = []

    def ask(node: Any) -> None:
        stack, _ = node.next_functions[0]
        seen.extend(private.will_run(leaf) for leaf, _ in stack.next_functions)

    loss = _with_node(torch.stack([x, y]), ask)
    loss.backward(retain_graph=True)
    assert seen == [True, True]
    seen.clear()
    loss.backward(inputs=[y])
    assert seen == [False, True]


def test_current_graph_task_id() -> None:
    seen: list[bool] = []
    assert not private.is_in_backward()
    loss = _with_node(torch.ones(1, requires_grad=True), lambda _: seen.append(is_in()))
    is_in = private.is_in_backward
    loss.backward()
    assert seen == [True] and not private.is_in_backward()


def test_current_graph_task_id_in_a_recomputed_part() -> None:
    seen: list[bool] = []

    def part(x: Tensor) -> Tensor:
        seen.append(private.is_in_backward())
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    checkpoint(part, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_execution_engine_calls_back_at_the_end() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_post_accumulate_grad_hook(lambda _: seen.append("leaf"))
    ask = lambda _: private.at_end_of_backward(lambda: seen.append("end"))
    loss = _with_node(x, ask)
    loss.backward()
    assert seen == ["leaf", "end"]
    x.sum().backward()
    assert seen == ["leaf", "end", "leaf"], "of that backward only"


def test_top_saved_tensors_default_hooks() -> None:
    assert private.saved_tensors_functions() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    ):
        assert private.saved_tensors_functions() == (pack, unpack)
    assert private.saved_tensors_functions() is None


def test_top_saved_tensors_default_hooks_in_a_checkpoint() -> None:
    """Where they come from tells that a part will be computed again."""
    seen: list[str] = []

    def part(x: Tensor) -> Tensor:
        functions = private.saved_tensors_functions()
        assert functions is not None
        seen.append(functions[0].__module__)
        return x.sin()

    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == ["torch.utils.checkpoint"]


def _backward(name: str, loss: Tensor, **options: Any) -> None:
    if name == "method":
        loss.backward(**options)
    elif name == "function":
        torch.autograd.backward(loss, **options)
    else:
        imported_by_name(loss, **options)


@pytest.mark.parametrize("name", ["method", "function", "imported by name"])
def test_engine_run_backward_goes_to_a_handler(name: str) -> None:
    x = torch.ones(1, requires_grad=True)
    calls: list[tuple[Any, ...]] = []

    def handler(run: Callable[[], None], *args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            run()

    loss = 2 * x
    with private.backwards_go_to(handler):
        _backward(name, loss, retain_graph=True)
        assert x.grad is None, "the handler has not run it"
        _backward(name, loss, inputs=[x])
        assert x.grad.tolist() == [2]
        (gradient,) = torch.autograd.grad(3 * x, x)
        assert gradient.tolist() == [3]
    _backward(name, 2 * x)
    assert x.grad.tolist() == [4]
    (tensors, gradients, keep, create, inputs), second = calls
    assert tensors == (loss,) and [g.tolist() for g in gradients] == [[1]]
    assert (keep, create, inputs) == (True, False, ())
    assert second[2:4] == (False, False) and second[4] == (x,)


def test_engine_run_backward_is_back_after_an_error() -> None:
    own = torch.autograd._engine_run_backward
    with pytest.raises(KeyboardInterrupt), private.backwards_go_to(lambda *_: None):
        assert torch.autograd._engine_run_backward is not own
        raise KeyboardInterrupt
    assert torch.autograd._engine_run_backward is own


def test_engine_run_backward_of_other_threads_is_as_ever() -> None:
    """Two threads have handlers that end in another order than they began; a third has none."""
    own = torch.autograd._engine_run_backward
    turn = [threading.Event() for _ in range(4)]
    seen: dict[str, list[str]] = {"first": [], "second": []}
    grads: dict[str, float] = {}

    def work(name: str, begin: threading.Event, begun: threading.Event, end: int) -> None:
        x = torch.ones(1, requires_grad=True)
        begin.wait(10)
        with private.backwards_go_to(lambda run, *_: seen[name].append(name)):
            begun.set()
            turn[end].wait(10)
            x.backward()
        grads[name] = -1.0 if x.grad is None else x.grad.item()

    begin = threading.Event()
    begin.set()
    first = threading.Thread(target=work, args=("first", begin, turn[0], 2))
    second = threading.Thread(target=work, args=("second", turn[0], turn[1], 3))
    for thread in (first, second):
        thread.start()
    turn[1].wait(10)
    x = torch.ones(1, requires_grad=True)
    x.backward()
    assert x.grad is not None and x.grad.item() == 1, "this thread has no handler"
    for event, thread in ((turn[2], first), (turn[3], second)):
        event.set()
        thread.join(10)
        assert (torch.autograd._engine_run_backward is own) == (thread is second)
    assert seen == {"first": ["first"], "second": ["second"]}
    assert grads == {"first": -1.0, "second": -1.0}


def test_engine_run_backward_in_a_copied_context() -> None:
    """As workers run replicas."""
    x, calls = torch.ones(1, requires_grad=True), []
    with private.backwards_go_to(lambda run, *_: calls.append("handler")):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(x.backward,))
        thread.start()
        thread.join(10)
    assert calls == ["handler"] and x.grad is None


def fork_after_a_backward() -> int:
    """How the child ends, in which the next one goes on with another engine."""
    x = torch.ones(1, requires_grad=True)
    x.sin().backward()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_right = False
    try:
        signal.alarm(60)
        private.renew_engine()
        x.sin().backward()
        is_right = torch.equal(x.grad, 2 * x.cos())  # type: ignore[arg-type]  # there was a backward
    finally:
        os._exit(0 if is_right else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_execution_engine_is_checkpoint_valid_in_a_forked_child() -> None:
    assert in_another_process(fork_after_a_backward) == 0
    assert private.renew_engine(), "outside of a backward it says yes"
