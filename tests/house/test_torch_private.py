"""Each private name of torch in `parallel.torch_private` does what is said of it there.

A test is named after the name that it is about, so that a new release tells which one it changed.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward as imported_by_name
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel import torch_private as private
from lightning_dp.parallel.contexts import Contexts


def test_a_name_that_is_gone_is_told_with_the_release() -> None:
    with pytest.raises(ImportError, match=r"torch to have Tensor\._gone, got torch [\d.]+"):
        private.found(Tensor, "_gone")


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3, bias=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", None)
        self.child = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight + self.mean


def test_parameters() -> None:
    net = Net()
    table = private.parameter_table(net)
    assert list(table) == ["weight", "bias"] and table["bias"] is None
    assert table["weight"] is net.weight
    table["weight"] = nn.Parameter(torch.zeros(3))
    assert net.weight is table["weight"], "it is the module's own table"


def test_buffers() -> None:
    net = Net()
    table = private.buffer_table(net)
    assert list(table) == ["mean", "var"] and table["var"] is None
    net.mean = torch.ones(3)
    assert table["mean"] is net.mean, "it is the module's own table"


def test_modules() -> None:
    net = Net()
    table = private.child_table(net)
    assert list(table) == ["layer"] and table["layer"] is net.layer
    net.layer = nn.Linear(2, 3)
    assert table["layer"] is net.layer, "it is the module's own table"


def test_parameters_buffers_and_modules_make_a_module_without_init() -> None:
    net, twin = Net(), object.__new__(Net)
    tables = [private.parameter_table(net), private.buffer_table(net), private.child_table(net)]
    vars(twin).update(vars(net), **private.tables_as_attributes(*map(dict, tables)))
    twin.weight = nn.Parameter(torch.full((3,), 2.0))
    x = torch.ones(1, 2)
    assert torch.equal(twin(x), net(x) * 2)
    assert list(twin.state_dict()) == list(net.state_dict()) == ["weight", "mean", "layer.weight"]


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


@pytest.mark.parametrize("name", ADD_HOOKS)
def test_tables_of(name: str) -> None:
    """Of `_forward_hooks` and so on."""
    module = nn.Linear(1, 1)
    handle = ADD_HOOKS[name](module)
    assert vars(module)[name] in private.hook_tables(module)
    assert handle.id in vars(module)[name]
    tables = [table for table in private.hook_tables(module) if table]
    assert all(list(table) == [handle.id] for table in tables)


def test_no_table_of_forward_hooks_or_backward_hooks_is_new() -> None:
    names = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert names == set(ADD_HOOKS), "hook_tables has to know them all"


def test_forward_hooks_and_others_are_copied_and_run() -> None:
    net, twin = nn.Linear(1, 1), object.__new__(nn.Linear)
    seen: list[nn.Module] = []
    net.register_forward_hook(lambda module, *_: seen.append(module))
    vars(twin).update(vars(net))
    private.copy_hook_tables(vars(twin))
    twin.register_forward_pre_hook(lambda module, *_: seen.append(module))
    net(torch.ones(1))
    assert seen == [net], "the twin's own hook is not the module's"
    twin(torch.ones(1))
    assert seen == [net, twin, twin]


def test_fixed_names_of_modules_stay_the_same_objects() -> None:
    net = Net()
    before = {name: vars(net)[name] for name in private.FIXED_NAMES}
    for add in ADD_HOOKS.values():
        add(net)
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    net.load_state_dict(net.state_dict())
    net.double().eval()
    changed = {name for name, value in before.items() if vars(net)[name] is not value}
    # The kind of backward hooks, which is None before the first of them.
    assert changed <= {"_is_full_backward_hook"}


def test_BatchNorm_is_the_class_of_all_layers() -> None:
    layers = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d]
    assert all(issubclass(layer, private.BatchNorm) for layer in layers)
    assert not issubclass(nn.InstanceNorm1d, private.BatchNorm)
    assert not issubclass(nn.GroupNorm, private.BatchNorm)


def test_check_input_dim() -> None:
    private.check_batch_norm_input(nn.BatchNorm1d(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected 4D input"):
        private.check_batch_norm_input(nn.BatchNorm2d(2), torch.ones(1, 2))


# State dicts


def test_metadata_of_a_state_dict() -> None:
    layer = nn.BatchNorm1d(1)
    versions = private.format_versions(layer.state_dict())
    assert versions is not None and versions[""]["version"] == layer._version
    assert private.format_versions({"weight": torch.ones(1)}) is None


def test_metadata_says_how_load_state_dict_reads() -> None:
    """Before version 2 batch norm did not save how many batches it had seen."""
    state = nn.BatchNorm1d(1).state_dict()
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


# Tensors


def test_version_counts_writes_in_place() -> None:
    x = torch.zeros(2)
    before = private.version(x)
    x.add_(1)
    assert private.version(x) == before + 1
    x.data.add_(1)
    assert private.version(x) == before + 1, "through .data no write is seen"
    x[:1].add_(1)
    assert private.version(x) == before + 2, "a view counts with its base"


def test_version_of_an_inference_tensor_raises() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version"):
        private.version(x)


def test_foreach_add() -> None:
    targets, terms = [torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.full((1,), 3.0)]
    memory = [t.data_ptr() for t in targets]
    private.add_to_each(targets, terms)
    assert [t.tolist() for t in targets] == [[2, 2], [3]]
    assert [t.data_ptr() for t in targets] == memory


def test_foreach_copy() -> None:
    targets, sources = [torch.ones(2), torch.zeros(1)], [torch.zeros(2), torch.full((1,), 3.0)]
    memory = [t.data_ptr() for t in targets]
    private.copy_to_each(targets, sources)
    assert [t.tolist() for t in targets] == [[0, 0], [3]]
    assert [t.data_ptr() for t in targets] == memory


def test_foreach_norm() -> None:
    norms = private.norm_of_each([torch.tensor([3.0, 4.0]), torch.full((2, 2), -1.0)])
    assert [norm.tolist() for norm in norms] == [5.0, 2.0]


def test_flatten_dense_tensors() -> None:
    flat = private.flattened([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0), torch.empty(0)])
    assert flat.tolist() == [1, 2, 3]
    column = torch.arange(4.0).view(2, 2).t()
    assert private.flattened([column, torch.ones(1)]).tolist() == [0, 2, 1, 3, 1]


# Hooks of parameters


def test_backward_hooks_and_post_accumulate_grad_hooks_are_seen() -> None:
    plain, first, second, removed = (nn.Parameter(torch.ones(1)) for _ in range(4))
    first.register_hook(lambda gradient: gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    removed.register_hook(lambda gradient: gradient).remove()
    assert private.hooked([plain, first, second, removed]) == [1, 2]
    on_gradient = [private.gradient_hooks(p) for p in (plain, first, second, removed)]
    assert list(map(bool, on_gradient)) == [False, True, False, False]


@pytest.mark.parametrize("kind", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_taken_off_and_put_back(kind: str) -> None:
    parameter, calls = nn.Parameter(torch.ones(1)), []
    if kind == "_backward_hooks":
        handle = parameter.register_hook(lambda gradient: calls.append(gradient.item()))
    else:
        handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.item()))
    (parameter * 2).backward()
    assert calls == [2]
    hooks = private.take_hooks_off(parameter)
    (parameter * 2).backward()
    assert calls == [2] and parameter.grad.item() == 4
    assert sum(len(table or ()) for table in hooks) == 1
    private.put_hooks_back(parameter, hooks)
    parameter.grad = None
    (parameter * 3).backward()
    assert calls == [2, 3]
    handle.remove()
    (parameter * 3).backward()
    assert calls == [2, 3] and private.hooked([parameter]) == []


def test_backward_hooks_that_are_taken_off_take_others_meanwhile() -> None:
    parameter, calls = nn.Parameter(torch.ones(1)), []
    hooks = private.take_hooks_off(parameter)
    parameter.register_hook(lambda gradient: calls.append("meanwhile"))
    (parameter * 2).backward()
    private.put_hooks_back(parameter, hooks)
    (parameter * 2).backward()
    assert calls == ["meanwhile"]
    parameter.register_hook(lambda gradient: calls.append("later"))
    (parameter * 2).backward()
    assert calls == ["meanwhile", "later"]


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


# Modes


class _Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


class _CountsDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


def test_get_current_function_mode_stack() -> None:
    outer, inner = _Counts(), _Counts()
    with outer, inner:
        assert private.current_modes() == (None, (outer, inner), ())
    assert private.current_modes() == (None, (), ())


def test_get_current_dispatch_mode_stack() -> None:
    outer, inner = _CountsDispatch(), _CountsDispatch()
    with outer, inner:
        assert private.current_modes() == (None, (), (outer, inner))
    assert private.current_modes() == (None, (), ())


def test_len_torch_function_stack() -> None:
    assert private.count_function_modes() == 0
    with _Counts(), _Counts():
        assert private.count_function_modes() == 2
    with _default_device():
        assert private.count_function_modes() == 1


def test_len_torch_dispatch_stack() -> None:
    assert private.count_dispatch_modes() == 0
    with _CountsDispatch(), _CountsDispatch():
        assert private.count_dispatch_modes() == 2


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("enter", [_default_device, lambda: torch.device("meta")])
def test_device_context_is_the_default_device(enter: Any) -> None:
    counts = _Counts()
    with enter(), counts:
        assert private.current_modes() == (torch.device("meta"), (counts,), ())
    with torch.device("cpu"), enter():
        assert private.current_modes().default_device == torch.device("meta")


def test_push_mode_and_pop_mode_in_other_threads() -> None:
    """Several threads are in the same modes at once, and leave them in any order."""
    counts, dispatches, meta = _Counts(), _CountsDispatch(), torch.device("meta")
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            with Contexts(private.entries_of(private.Modes(meta, (counts,), (dispatches,)))):
                barrier.wait(10)
                assert torch.ones(1).device == meta
                assert private.current_modes() == (meta, (counts,), (dispatches,))
                barrier.wait(10)
            assert private.current_modes() == (None, (), ())
            assert torch.ones(1).device == torch.device("cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert set(counts.calls) == set(dispatches.calls) == {"worker 0", "worker 1"}
    assert private.current_modes() == (None, (), ())
