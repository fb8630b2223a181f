"""Each private name of torch in `parallel.torch_compile` does what is said of it there."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dp.parallel.torch_private import compile as private

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


def test_compiled_call_impl_compiles_the_forward_of_a_module_compiled_in_place() -> None:
    made: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph.forward

    module, x = Own(1, 1), torch.ones(1)
    assert private.compiled_forward(module) == module.forward
    module.compile(backend=backend)
    module.register_forward_hook(lambda *_: torch.zeros(3))
    assert torch.equal(private.compiled_forward(module)(x), module.forward(x)) and made
    assert torch.equal(module(x), torch.zeros(3))
    wrapped = torch.compile(Own(1, 1), backend=backend)
    assert private.compiled_forward(wrapped) == wrapped.forward


def test_orig_mod_is_in_a_compiled_module() -> None:
    inner, other = nn.Linear(1, 1), nn.Linear(1, 1)
    wrapper = torch.compile(inner, backend="eager")
    assert private.compiled_inner(wrapper) is inner and private.compiled_inner(inner) is None
    twin = type(wrapper)(other, wrapper.dynamo_ctx)
    assert private.compiled_inner(twin) is other
    x = torch.ones(1)
    assert torch.equal(twin(x), other(x)) and torch.equal(wrapper(x), inner(x))


def test_torchdynamo_orig_callable_and_torchdynamo_disable() -> None:
    def function(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(function, backend="eager")
    assert private.compiled_function(compiled) is function
    for other in (function, torch.compiler.disable(function), len, nn.Linear(1, 1).forward, None):
        assert private.compiled_function(other) is None


def test_torchdynamo_inline_and_torchdynamo_wrapper_id_are_what_others_compile() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]

    def makes(layer: nn.Module) -> Any:
        return torch.compile(layer.forward, backend="eager")

    first, second = map(makes, layers)
    twin = private.with_cells(first, second.__closure__, layers[1].forward)
    outer = torch.compile(lambda x: twin(x), backend="eager")
    x = torch.ones(1, 2)
    assert torch.equal(outer(x), layers[1](x)) and torch.equal(twin(x), layers[1](x))
    assert copy.copy(first) is first


def test_dynamo_config_limits_are_raised_for_a_while() -> None:
    import torch._dynamo.config as config

    before = config.recompile_limit, config.accumulated_recompile_limit
    with private.more_recompilations(3):
        now = config.recompile_limit, config.accumulated_recompile_limit
        assert now == (3 * before[0], 3 * before[1])
        with private.more_recompilations(3):
            assert now == (config.recompile_limit, config.accumulated_recompile_limit)
    assert before == (config.recompile_limit, config.accumulated_recompile_limit)


def test_dynamo_utils_counters_count_what_is_compiled() -> None:
    before = private.compilation_counts()()["total"]
    compiled = torch.compile(lambda x: x + 2, backend="eager")
    compiled(torch.ones(2))
    after = private.compilation_counts()()["total"]
    compiled(torch.ones(2))
    assert before < after == private.compilation_counts()()["total"]


def test_dynamo_callback_handler_start_callbacks_are_called_before_anything_is_traced() -> None:
    seen: list[str] = []

    def begins(*_: object) -> None:
        seen.append("begins")

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x + len(seen)  # a number that the trace has seen

    torch._dynamo.reset()
    assert private.before_compiling(begins) and private.before_compiling(begins)
    assert torch.compile(traced, backend="eager")(torch.zeros(1)) == 1
    assert seen == ["begins"]
    torch._dynamo.reset()  # forgets it
    torch.compile(traced, backend="eager")(torch.zeros(1))
    assert seen == ["begins"]


def test_compile_fx_is_loaded_where_a_mode_of_compiling_is_given() -> None:
    """So it is before any graph is made."""
    script = (
        "import sys, torch; torch.compile(torch.sin, mode='reduce-overhead'); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "torch._inductor.compile_fx" in modules
    assert "torch._inductor.cudagraph_trees" not in modules, "else it need not be loaded by us"


def test_is_key_in_tls_get_obj_in_tls_and_stash_obj_in_tls_hand_graphs_to_other_threads() -> None:
    """Of a thread that has some: they come with the file that makes them."""
    from torch._inductor import cudagraph_trees

    def graphs() -> Any:
        return cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")

    def elsewhere(first: Callable[[], None]) -> Any:
        seen: list[Any] = []
        thread = Thread(target=lambda: (first(), seen.append(graphs())))
        thread.start()
        thread.join()
        return seen[0]

    own, has = graphs(), private.graphs_of_thread()
    assert has is not None and elsewhere(has) is own
    assert elsewhere(lambda: None) is not own


def test_cudagraph_trees_begin_no_new_invocation_on_a_device() -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    managers = [object.__new__(CUDAGraphTreeManager) for _ in range(2)]
    for index, manager in enumerate(managers):
        manager.device_index, manager.current_gen = index, -100

    def begin() -> list[bool]:
        return [manager.in_new_torch_compile_invocation() for manager in managers]

    assert begin() == [True, True]
    with private.one_invocation(1):
        assert begin() == [True, False]
        assert not managers[1].can_start_new_generation()
        with private.one_invocation(1), private.one_invocation(0):
            assert begin() == [False, False]
        assert begin() == [True, False]
    assert begin() == [True, True]


def test_invocations_of_two_threads_end_in_any_order() -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    own = CUDAGraphTreeManager.in_new_torch_compile_invocation
    manager = object.__new__(CUDAGraphTreeManager)
    manager.device_index, manager.current_gen = 1, -100
    first, second = private.one_invocation(1), private.one_invocation(1)
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not manager.in_new_torch_compile_invocation()
    second.__exit__()
    assert CUDAGraphTreeManager.in_new_torch_compile_invocation is own


def test_an_attribute_that_is_not_compiled_is_refused_or_as_good_as_none() -> None:
    module = Own(1, 1)
    module.compile(disable=True)
    assert private.compiled_forward(module) == module.forward
    setattr(module, private.COMPILED_CALL, lambda x: x)
    with pytest.raises(RuntimeError, match=r"Expected Own to be compiled .* got <func"):
        private.compiled_forward(module)
