"""Each private name of torch in `torch_private` does what the package takes it for."""

from __future__ import annotations

import ast
import copy
import os
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import in_another_process
from torch import Tensor, nn
from torch.autograd import backward as imported_by_name
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel import torch_private as private

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's imports


def test_private_names_are_looked_up_when_they_are_used() -> None:
    """At import, a name that a release of torch has renamed would break the whole package."""
    with open(private.__file__) as file:
        body = ast.parse(file.read()).body
    at_import = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [n.attr for node in at_import for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]


# Modules and state dicts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3, bias=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight + self.mean


def test_parameters_buffers_and_modules() -> None:
    net, twin = Net(), object.__new__(Net)
    tables = [private.parameter_table(net), private.buffer_table(net), private.child_table(net)]
    assert [list(table) for table in tables] == [["weight", "bias"], ["mean"], ["layer"]]
    net.mean, net.layer = torch.ones(3), nn.Linear(2, 3, bias=False)
    assert tables[1]["mean"] is net.mean and tables[2]["layer"] is net.layer
    vars(twin).update(vars(net), **private.tables_as_attributes(*map(dict, tables)))
    twin.weight = nn.Parameter(torch.full((3,), 2.0))
    x = torch.ones(1, 2)
    torch.testing.assert_close(twin(x) - 1, (net(x) - 1) * 2)
    assert list(twin.state_dict()) == ["weight", "mean", "layer.weight"]


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


def test_hook_tables_are_all_there() -> None:
    names = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert names == set(ADD_HOOKS) == set(private.HOOK_TABLES)
    net = Net()
    before = {name: vars(net)[name] for name in private.FIXED_NAMES}
    for name, add in ADD_HOOKS.items():
        handle = add(net)
        assert handle.id in vars(net)[name] and vars(net)[name] in private.hook_tables(net)
    net.load_state_dict(net.double().eval().state_dict())
    changed = {name for name, value in before.items() if vars(net)[name] is not value}
    assert changed <= {"_is_full_backward_hook"}  # None before the first hook


def test_check_input_dim() -> None:
    private.check_batch_norm_input(nn.BatchNorm1d(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected 4D input"):
        private.check_batch_norm_input(nn.BatchNorm2d(2), torch.ones(1, 2))


def test_metadata_of_a_state_dict_says_how_it_is_read() -> None:
    """Before version 2 batch norm did not save how many batches it had seen."""
    state = nn.BatchNorm1d(1).state_dict()
    versions = private.format_versions(state)
    assert versions is not None and versions[""]["version"] == 2
    assert private.format_versions({"weight": torch.ones(1)}) is None
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


class Pair:
    def __init__(self, first: object, second: object) -> None:
        self.both = [first, second]


def test_pytree_supported_nodes_are_taken_apart_one_level_deep() -> None:
    register_pytree_node(Pair, lambda pair: (pair.both, None), lambda values, _: Pair(*values))
    try:
        assert private.flatten_node(Pair([1, 2], {"a": 3})) == [[1, 2], {"a": 3}]
        assert private.unflatten_node(Pair([1, 2], 3), [4, [5]]).both == [4, [5]]
    finally:
        del SUPPORTED_NODES[Pair]
    assert private.flatten_node(Pair(1, 2)) is None


# Tensors and hooks


def test_version_counts_writes_but_through_data() -> None:
    x = torch.zeros(2)
    before = private.version(x)
    x[:1].add_(1)
    x.data.add_(1)
    assert private.version(x) == before + 1
    with torch.inference_mode():
        x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version"):
        private.version(x)


def test_foreach_add_and_foreach_copy() -> None:
    targets = [torch.ones(2), torch.zeros(1)]
    memory = [t.data_ptr() for t in targets]
    private.add_to_each(targets, [torch.ones(2), torch.full((1,), 3.0)])
    assert [t.tolist() for t in targets] == [[2, 2], [3]]
    private.copy_to_each(targets, [torch.tensor([3.0, 4.0]), torch.zeros(1)])
    assert [t.data_ptr() for t in targets] == memory
    assert [t.tolist() for t in targets] == [[3, 4], [0]]


def test_batch_shape_of_a_distribution() -> None:
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    private.set_batch_shape(normal, torch.Size([2]))
    assert normal.batch_shape == (2,)


def test_storage_Use_Count_of_a_cdata_tells_of_views() -> None:
    tensor = torch.ones(4)
    assert private.is_alone_in_memory(tensor)
    view = tensor.view(2, 2)
    assert not private.is_alone_in_memory(tensor) and not private.is_alone_in_memory(view)
    del view
    assert private.is_alone_in_memory(tensor)


@pytest.mark.parametrize("kind", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_hooks_are_seen_taken_off_and_put_back(kind: str) -> None:
    plain, parameter, calls = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), []
    if kind == "_backward_hooks":
        handle = parameter.register_hook(lambda gradient: calls.append(gradient.item()))
        assert private.gradient_hooks(parameter)
    else:
        handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.item()))
        assert private.hooks_of(parameter)[1]
    assert private.hooked([plain, parameter]) == [1]
    hooks = private.take_hooks_off(parameter)
    (parameter * 2).backward()
    assert calls == [] and parameter.grad.item() == 2
    private.put_hooks_back(parameter, hooks)
    parameter.grad = None
    (parameter * 3).backward()
    handle.remove()
    (parameter * 3).backward()
    assert calls == [3] and private.hooked([parameter]) == []


# Autograd


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


def test_get_current_graph_task_keep_graph_and_current_graph_task_id() -> None:
    seen: list[tuple[bool, bool]] = []
    ask = lambda _: seen.append((private.keeps_graph(), private.is_in_backward()))
    loss = _with_node(torch.ones(1, requires_grad=True), ask)
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [(True, True), (False, True)] and not private.is_in_backward()


def test_will_engine_execute_node() -> None:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen: list[bool] = []

    def ask(node: Any) -> None:
        stack, _ = node.next_functions[0]
        seen.extend(private.will_run(leaf) for leaf, _ in stack.next_functions)

    loss = _with_node(torch.stack([x, y]), ask)
    loss.backward(retain_graph=True)
    loss.backward(inputs=[y])
    assert seen == [True, True, False, True]


def test_execution_engine_queue_callback_runs_at_the_end_of_that_backward() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_post_accumulate_grad_hook(lambda _: seen.append("leaf"))
    ask = lambda _: private.at_end_of_backward(lambda: seen.append("end"))
    _with_node(x, ask).backward()
    x.sum().backward()
    assert seen == ["leaf", "end", "leaf"]


def test_top_saved_tensors_default_hooks() -> None:
    assert private.saved_tensors_functions() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert private.saved_tensors_functions() == (pack, unpack)
    seen: list[str] = []

    def part(x: Tensor) -> Tensor:
        functions = private.saved_tensors_functions()
        seen.append(functions[0].__module__)
        return x.sin()

    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == ["torch.utils.checkpoint"]


@pytest.mark.parametrize("name", ["method", "function", "imported by name"])
def test_engine_run_backward_goes_to_a_handler(name: str) -> None:
    def backward(loss: Tensor, **options: Any) -> None:
        if name == "method":
            loss.backward(**options)
        else:
            (torch.autograd.backward if name == "function" else imported_by_name)(loss, **options)

    own = torch.autograd._engine_run_backward
    x = torch.ones(1, requires_grad=True)
    calls: list[tuple[Any, ...]] = []

    def handler(run: Callable[[], None], *args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            run()

    loss = 2 * x
    with pytest.raises(ZeroDivisionError), private.backwards_go_to(handler):
        backward(loss, retain_graph=True)
        assert x.grad is None, "the handler has not run it"
        backward(loss, inputs=[x])
        assert x.grad.tolist() == [2] and torch.autograd.grad(3 * x, x)[0].tolist() == [3]
        with private.backwards_go_to(None):
            backward(2 * x)
        assert x.grad.tolist() == [4]
        raise ZeroDivisionError
    assert torch.autograd._engine_run_backward is own
    (tensors, gradients, keep, create, inputs), second = calls
    assert tensors == (loss,) and [g.tolist() for g in gradients] == [[1]]
    assert (keep, create, inputs) == (True, False, ())
    assert second[2:4] == (False, False) and second[4] == (x,)


def test_engine_run_backward_of_other_threads_is_as_ever() -> None:
    """Two threads have handlers that end in another order than they began; this one has none."""
    own = torch.autograd._engine_run_backward
    begun, end = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    seen: list[int] = []

    def work(k: int) -> None:
        with private.backwards_go_to(lambda run, *_: seen.append(k)):
            begun[k].set()
            end[k].wait(10)
            torch.ones(1, requires_grad=True).backward()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for k in range(2):
        threads[k].start()
        assert begun[k].wait(10)
    x = torch.ones(1, requires_grad=True)
    x.backward()
    assert x.grad is not None and x.grad.item() == 1
    for k in range(2):
        end[k].set()
        threads[k].join(10)
    assert seen == [0, 1] and torch.autograd._engine_run_backward is own


def fork_after_a_backward() -> int:
    """The exit status of a child in which the next backward uses another engine."""
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


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoint_without_reentrant_generator_and_function_are_noticed(
    is_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, noticed = torch.utils.checkpoint, list[str]()
    for owner, name in (
        (module, "_checkpoint_without_reentrant_generator"),
        (module.CheckpointFunction, "forward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    private.watch_checkpoints(lambda: noticed.append("begins"))
    x = torch.ones(2, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        noticed.append("computes")
        return x.exp()

    checkpoint(part, x, use_reentrant=is_reentrant).sum().backward()
    assert noticed == ["begins", "computes", "computes"] and x.grad is not None
    noticed.clear()
    checkpoint(part, x, use_reentrant=is_reentrant, preserve_rng_state=False)
    with torch.no_grad():
        checkpoint(part, torch.ones(2), use_reentrant=False)
    assert noticed == ["computes", "computes"]


def test_cache_of_parametrize_is_one_for_all_modules_of_a_class() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    other = object.__new__(type(layer))
    other.__dict__.update(layer.__dict__)
    before = private.cached_values()
    with parametrize.cached():
        assert other.weight is layer.weight and private.cached_values() is before
    assert private.cached_values() is not before


# Modes


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


class CountsDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


def test_get_current_function_mode_stack_and_get_current_dispatch_mode_stack() -> None:
    outer, inner, dispatch, meta = Counts(), Counts(), CountsDispatch(), torch.device("meta")
    assert private.current_modes() == (None, (), ())
    names = "_len_torch_function_stack", "_len_torch_dispatch_stack"
    with outer, torch.device("cpu"), meta, inner, dispatch:
        assert [getattr(torch._C, name)() for name in names] == [4, 1]
        assert private.current_modes() == (meta, (outer, inner), (dispatch,))
    with dispatch:
        assert private.current_modes() == (None, (), (dispatch,))
    torch.set_default_device("meta")
    assert private.current_modes() == (meta, (), ())
    torch.set_default_device(None)
    assert [getattr(torch._C, name)() for name in names] == [0, 0]


def test_push_mode_and_pop_mode_of_TorchDispatchMode_in_two_threads_at_once() -> None:
    counts, dispatch, meta = Counts(), CountsDispatch(), torch.device("meta")
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            with private.in_modes(private.Modes(meta, (counts,), (dispatch,))):
                barrier.wait(10)
                assert torch.ones(1).device == meta
                assert private.current_modes() == (meta, (counts,), (dispatch,))
                barrier.wait(10)
            assert private.current_modes() == (None, (), ())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert counts.threads == dispatch.threads == {"worker 0", "worker 1"}


# The compiler


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


def test_compiled_call_impl_and_eval_frame_TorchDynamoContext_compile_with_the_options() -> None:
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
    disabled = Own(1, 1)
    disabled.compile(disable=True)
    assert private.compiled_forward(disabled) == disabled.forward


def test_orig_mod_torchdynamo_orig_callable_and_torchdynamo_disable() -> None:
    inner = nn.Linear(1, 1)
    assert private.compiled_inner(torch.compile(inner, backend="eager")) is inner
    assert private.compiled_inner(inner) is None

    def function(x: Any) -> Any:
        return x + 1

    assert private.compiled_function(torch.compile(function, backend="eager")) is function
    for other in (function, torch.compiler.disable(function), len, inner.forward, None):
        assert private.compiled_function(other) is None


def test_torchdynamo_inline_and_torchdynamo_wrapper_id_are_what_others_compile() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first, second = (torch.compile(layer.forward, backend="eager") for layer in layers)
    twin = private.with_cells(first, second.__closure__, layers[1].forward)
    outer = torch.compile(lambda x: twin(x), backend="eager")
    x = torch.ones(1, 2)
    assert torch.equal(outer(x), layers[1](x)) and torch.equal(twin(x), layers[1](x))
    assert copy.copy(first) is first


def test_dynamo_config_limits_are_raised_once() -> None:
    import torch._dynamo.config as config

    limits = lambda: (config.recompile_limit, config.accumulated_recompile_limit)
    before = limits()
    with private.more_recompilations(3), private.more_recompilations(3):
        assert limits() == (3 * before[0], 3 * before[1])
    assert limits() == before


def test_dynamo_counters_count_what_is_compiled() -> None:
    counts = private.compilation_counts()
    before = counts()["total"]
    compiled = torch.compile(lambda x: x + 2, backend="eager")
    compiled(torch.ones(2))
    after = counts()["total"]
    compiled(torch.ones(2))
    assert before < after == counts()["total"] and "torch._dynamo.utils" in sys.modules
