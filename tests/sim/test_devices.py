"""What makes a simulated device a device: separate, counted, limited, paced, seeded, threaded."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sim_devices
import torch
import torch.nn.functional as F
from support.processes import in_another_process
from support.waiting import quickest, soon
from torch import nn

MIB = 2**20
ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, warnings being errors there too."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- enabling ---


def test_enabling_again_with_the_same_count_does_nothing() -> None:
    sim_devices.enable(8)
    assert torch.sim.device_count() == 8


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (4, RuntimeError, "8 simulated devices are enabled already, got 4"),
        (0, ValueError, "expected 1 to 127 devices, got 0"),
        (128, ValueError, "expected 1 to 127 devices, got 128"),
        ("8", TypeError, "expected an int, got '8'"),
        (True, TypeError, "expected an int, got True"),
    ],
)
def test_a_wrong_device_count_is_refused(count: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sim_devices.enable(count)


def test_importing_compiles_and_enables_nothing() -> None:
    code = (
        "import torch, sys; import sim_devices\n"
        "assert not sim_devices.is_enabled() and not hasattr(torch, 'sim')\n"
        "assert 'torch.utils.cpp_extension' not in sys.modules"
    )
    in_another_process(exec, code)


@pytest.mark.slow
def test_devices_can_be_enabled_after_a_backward_on_the_cpu() -> None:
    code = (
        "import torch; import sim_devices\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "sim_devices.enable(3)\n"
        "x = torch.ones(2, device='sim:2', requires_grad=True)\n"
        "(x * 3).sum().backward()\n"
        "assert x.grad.tolist() == [3, 3]"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_process_may_end_right_after_a_backward_also_when_memory_is_full() -> None:
    """A thread of autograd's that has the last reference to Python's context is waited for."""
    code = """
import contextvars, itertools, threading, time, torch
import sim_devices

sim_devices.enable(8)
main, late = threading.get_ident(), threading.Event()

class Slow:
    def __del__(self):
        if threading.get_ident() != main:
            late.set()
            for _ in range(1000):
                time.sleep(0.001)

held = contextvars.ContextVar("held")
leaves = [torch.ones(2, device=f"sim:{index}", requires_grad=True) for index in range(8)]

def backward(leaf):
    held.set(Slow())
    (leaf * 3).sum().backward()

deadline = time.monotonic() + 120
for leaf in itertools.cycle(leaves):  # each has another thread: the next need not wait for one
    if late.is_set() or time.monotonic() > deadline:
        break
    contextvars.copy_context().run(backward, leaf)
assert late.is_set()
torch.sim.set_memory_limit(0, torch.sim.memory_allocated(0))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert not result.stderr


@pytest.mark.slow
def test_a_process_ends_soon_though_a_hook_does_not_return_and_memory_was_let_go_early() -> None:
    code = """
import atexit, os, threading, time, torch
import sim_devices

sim_devices.enable(2)
begun = threading.Event()

def hook(gradient):
    begun.set()
    time.sleep(600)

def early():
    x = torch.ones(1024, device="sim:1")
    side = torch.Stream("sim:1")
    side.wait_stream(torch.accelerator.current_stream(1))
    with torch.sim.stream(side):
        return x * 2

kept = early()
x = torch.ones(2, device="sim:0", requires_grad=True)
y = (x * 2).sum()
x.register_hook(hook)
threading.Thread(target=y.backward, daemon=True).start()
assert begun.wait(60)
atexit._run_exitfuncs()
print("through")
os._exit(0)
"""
    began = time.monotonic()
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "through\n", "")
    assert time.monotonic() - began < 100


@pytest.mark.slow
def test_nothing_is_recorded_when_a_process_ends() -> None:
    """Else each thread that works then gets an object of Python's, which it frees when it ends."""
    code = """
import atexit, os, torch
import sim_devices
from sim_devices import attached

sim_devices.enable(2)
torch.sim.set_clock("virtual")
torch.ones(2, device="sim:1", requires_grad=True).sum().backward()
before = attached.extension.recording_version()
atexit._run_exitfuncs()
assert not attached.extension.is_recording()
assert attached.extension.recording_version() == before
print("through", flush=True)
os._exit(0)
"""
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "through\n", "")


@pytest.mark.slow
def test_missing_tools_are_named(tmp_path: Path) -> None:
    code = "import sim_devices; sim_devices.enable(2)"
    result = python(code, TORCH_EXTENSIONS_DIR=str(tmp_path), PATH="", CXX="no-such-compiler")
    assert result.returncode == 1
    assert (
        "RuntimeError: Simulated devices are compiled on first use. Please install:"
        in result.stderr
    )
    assert "pip install ninja" in result.stderr
    assert "'no-such-compiler' was not found" in result.stderr


# --- the names people know ---


def test_the_current_device_is_where_sim_points() -> None:
    assert torch.sim.is_available() and torch.sim.is_initialized()
    with torch.sim.device("sim:5"):
        assert torch.sim.current_device() == 5
        assert torch.empty(1, device="sim").device == torch.device("sim:5")
        with torch.sim.device(None):
            assert torch.sim.current_device() == 5
    assert torch.sim.current_device() == 0
    torch.sim.set_device(2)
    assert torch.ones(1).to("sim").device == torch.ones(1).sim().device == torch.device("sim:2")


def test_every_thread_has_its_own_current_device() -> None:
    torch.sim.set_device(4)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.sim.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.mark.parametrize("device", [8, -3, "sim:8"])
def test_a_device_that_is_not_there_is_refused(device: int | str) -> None:
    with pytest.raises(ValueError, match=r"expected one of sim:0 to sim:7, got .*enable"):
        torch.sim.set_device(device)


def test_a_tensor_cannot_be_made_on_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="from sim:0 to sim:7, got sim:9"):
        torch.ones(2, device="sim:9")
    with pytest.raises(ValueError, match="expected a simulated device such as 'sim:0', got 'cpu'"):
        torch.sim.memory_allocated("cpu")


def test_torch_accelerator_means_the_simulated_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 8
    torch.accelerator.set_device_index(3)
    assert torch.accelerator.current_device_index() == torch.sim.current_device() == 3
    torch.accelerator.synchronize()
    x = torch.ones(1000, device="sim:3")
    assert torch.accelerator.memory_allocated(3) == torch.sim.memory_allocated(3) >= x.nbytes
    assert torch.accelerator.max_memory_allocated(3) == torch.sim.max_memory_allocated(3)
    assert torch.accelerator.get_memory_info(3) == torch.sim.mem_get_info(3)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(3)


def test_streams_and_events_are_there() -> None:
    stream = torch.sim.current_stream(2)
    assert stream == torch.accelerator.current_stream(2) == torch.sim.default_stream(2)
    assert stream.device == torch.device("sim:2")
    start, end = (torch.sim.Event("sim:2", enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    start.record(stream)
    time.sleep(0.01)
    end.record(stream)
    end.synchronize()
    stream.synchronize()
    stream.wait_event(end)
    most = (time.perf_counter() - begin) * 1e3
    assert end.query() and 5 < start.elapsed_time(end) <= most
    torch.ones(2, device="sim:2").record_stream(stream)
    with stream:
        assert torch.sim.current_stream(2) == stream


def test_tensors_modules_and_storages_know_the_backend() -> None:
    layer = nn.Linear(2, 3).sim(6)
    assert layer.weight.is_sim and not torch.ones(1).is_sim
    assert layer.weight.device == torch.device("sim:6")
    assert layer.weight.untyped_storage().device == torch.device("sim:6")
    assert repr(torch.arange(2, device="sim:6")) == "tensor([0, 1], device='sim:6')"
    assert torch.arange(3, device="sim:6").tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"Tensor.cpu"):
        layer.weight.detach().numpy()


# --- separate ---


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda a, b: a + b, "aten::add"),
        (lambda a, b: a.mul_(b), "aten::mul_"),
        (lambda a, b: a @ b, "aten::mm"),
        (lambda a, b: torch.cat([a, b]), "aten::cat"),
        (lambda a, b: F.linear(a, b), "aten::"),
        (lambda a, b: F.mse_loss(a, b), "aten::mse_loss"),
        (lambda a, b: F.layer_norm(a, (4,), b[0]), "aten::native_layer_norm"),
        (lambda a, b: F.embedding(b.long(), a), "aten::"),
        (lambda a, b: torch.where(a > 0, a, b), "aten::where"),
        (lambda a, b: torch.add(a, a, out=b), "aten::add"),
        (lambda a, b: F.conv1d(a[None], b[None]), "aten::convolution_overrideable"),
        (lambda a, b: a.index_put((b.long(),), a), "aten::_index_put_impl_"),
        (lambda a, b: a[b > 0], "aten::index"),
        (lambda a, b: torch._foreach_add([a, a], [a, b]), "aten::"),
        (lambda a, b: a.set_(b.untyped_storage()), "aten::set_"),
    ],
)
def test_an_op_on_two_devices_raises_and_names_itself(
    function: Callable[[torch.Tensor, torch.Tensor], object], op: str
) -> None:
    a, b = torch.rand(4, 4, device="sim:1"), torch.rand(4, 4, device="sim:3")
    with pytest.raises(RuntimeError, match=r"at least two devices, sim:[13] and sim:[13]!.*" + op):
        function(a, b)


def test_the_error_lists_the_devices_in_the_order_of_the_arguments() -> None:
    a, b = torch.ones(2, device="sim:1"), torch.ones(2, device="sim:3")
    with pytest.raises(RuntimeError) as error:
        a * b
    assert str(error.value).splitlines()[0] == (
        "Expected all tensors to be on the same device, but found at least two devices, "
        "sim:1 and sim:3! "
        "(when checking argument 'other' of aten::mul.Tensor)"
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda sim_tensor, cpu_tensor: sim_tensor + cpu_tensor,
        lambda sim_tensor, cpu_tensor: cpu_tensor @ sim_tensor,
        lambda sim_tensor, cpu_tensor: cpu_tensor.add_(sim_tensor),
        lambda sim_tensor, cpu_tensor: F.cross_entropy(sim_tensor, cpu_tensor[0].long()),
        lambda sim_tensor, cpu_tensor: sim_tensor.gather(0, cpu_tensor.long()),
        lambda sim_tensor, cpu_tensor: cpu_tensor[sim_tensor > 0],
        lambda sim_tensor, cpu_tensor: cpu_tensor + sim_tensor.sum(),
        lambda sim_tensor, cpu_tensor: cpu_tensor.sum().add_(sim_tensor.sum()),
        lambda sim_tensor, cpu_tensor: F.linear(sim_tensor, cpu_tensor),
        lambda sim_tensor, cpu_tensor: F.embedding(cpu_tensor.long(), sim_tensor),
    ],
)
def test_mixing_with_a_cpu_tensor_raises(
    function: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    with pytest.raises(RuntimeError, match=r"same device.*(sim:3|cpu).*aten::|indices should be"):
        function(torch.ones(4, 4, device="sim:3"), torch.ones(4, 4))


def test_a_cpu_number_and_cpu_indices_are_taken_as_with_cuda() -> None:
    x = torch.arange(4.0, device="sim:3")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert (torch.tensor(2.0) - x).device == torch.device("sim:3")
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    x[torch.tensor([1])] = 9
    x[0] = torch.tensor(5.0)
    assert x.tolist() == [5, 9, 2, 3]
    # A number of dimension 0 keeps out of type promotion.
    assert (x.half() * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float16


def test_sparse_tensors_are_refused_clearly() -> None:
    with pytest.raises(NotImplementedError, match=r"aten::.*strided tensors only"):
        torch.eye(3, device="sim:3").to_sparse()


# --- autograd ---


def test_every_device_has_an_autograd_thread() -> None:
    threads: dict[int, set[int]] = {}
    leaves = [torch.ones(2, device=f"sim:{index}", requires_grad=True) for index in range(4)]
    outputs = []
    for index, leaf in enumerate(leaves):
        output = leaf * 2
        for _ in range(3):
            output = output.sin()
            output.register_hook(
                lambda _, index=index: threads.setdefault(index, set()).add(threading.get_ident())
            )
        outputs.append(output.sum().to("sim:0"))
    torch.stack(outputs).sum().backward()
    assert all(len(idents) == 1 for idents in threads.values())
    assert len(set.union(*threads.values())) == 4
    assert threading.get_ident() not in set.union(*threads.values())


def test_gradients_flow_through_copies_between_devices() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.to("sim:1") * 2
    z = y.to("sim:2") * 3 + y.to("sim:4").to("sim:2")
    z.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [8, 8, 8] and x.grad.device.type == "cpu"


# --- random numbers ---


def test_every_device_has_its_generator() -> None:
    torch.manual_seed(11)
    first = [torch.rand(5, device=f"sim:{index}") for index in (0, 1)]
    assert torch.equal(first[0].cpu(), first[1].cpu())
    torch.manual_seed(11)
    torch.rand(7, device="sim:0")
    assert torch.equal(torch.rand(5, device="sim:1"), first[1])
    torch.manual_seed(11)
    assert torch.equal(torch.rand(5), first[0].cpu())
    assert torch.sim.initial_seed() == 11


def test_drawing_on_a_device_leaves_the_cpus_generator_alone() -> None:
    state = torch.get_rng_state()
    x = torch.randn(50, device="sim:2")
    F.dropout(x)
    nn.init.trunc_normal_(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_state_of_a_generator_can_be_kept() -> None:
    state, states = torch.sim.get_rng_state("sim:3"), torch.sim.get_rng_state_all()
    first = torch.randn(5, device="sim:3")
    torch.sim.set_rng_state(state, 3)
    assert torch.equal(torch.randn(5, device="sim:3"), first)
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.randn(5, device="sim:3"), first)
    with torch.sim.device(3):
        torch.sim.manual_seed(1)
        seeded = torch.rand(3, device="sim")
    torch.sim.manual_seed_all(1)
    assert torch.equal(torch.rand(3, device="sim:3"), seeded)
    with torch.random.fork_rng([3], device_type="sim"):
        inside = torch.rand(3, device="sim:3")
    assert torch.equal(torch.rand(3, device="sim:3"), inside)


def test_a_generator_belongs_to_one_device() -> None:
    generator = torch.Generator("sim:3").manual_seed(4)
    assert generator.device == torch.device("sim:3")
    drawn = torch.rand(4, device="sim:3", generator=generator)
    assert torch.equal(drawn.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(4)))
    for wrong in (torch.Generator(), torch.Generator("sim:1")):
        with pytest.raises(RuntimeError, match=r"[Gg]enerator"):
            torch.rand(4, device="sim:3", generator=wrong)


# --- memory ---


def test_bytes_are_counted_on_their_device_and_given_back() -> None:
    gc.collect()
    before = [torch.sim.memory_allocated(index) for index in range(8)]
    torch.sim.reset_peak_memory_stats(3)
    x = torch.empty(MIB, dtype=torch.float32, device="sim:3")
    y = x + 1
    view = y[5:].view(-1)
    assert torch.sim.memory_allocated("sim:3") - before[3] == 8 * MIB
    z = x * 2 * 3  # one temporary
    del y, z
    assert torch.sim.memory_allocated(3) - before[3] == 8 * MIB  # the view holds y's memory
    assert torch.sim.max_memory_allocated(3) - before[3] == 16 * MIB
    del x, view
    assert [torch.sim.memory_allocated(index) for index in range(8)] == before
    assert torch.sim.memory_reserved(3) == before[3]
    torch.sim.reset_peak_memory_stats("sim:3")
    assert torch.sim.max_memory_allocated(3) == before[3]


def test_a_training_step_gives_its_memory_back() -> None:
    gc.collect()
    before = torch.sim.memory_allocated(4)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))
    model.to("sim:4")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, device="sim:4")).square().sum().backward()
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert soon(lambda: torch.sim.memory_allocated(4) == before)


def test_resizing_is_counted() -> None:
    before = torch.sim.memory_allocated(5)
    x = torch.arange(4, device="sim:5")
    x.resize_(1000)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert torch.sim.memory_allocated(5) - before == 8000
    out = torch.empty(0, device="sim:5")
    torch.add(x, 1.5, out=out)
    assert torch.sim.memory_allocated(5) - before == 12000
    out.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated(5) - before == 8000


def test_the_limit_raises_out_of_memory_and_the_device_works_on() -> None:
    gc.collect()
    before = torch.sim.memory_allocated(1)
    torch.sim.set_memory_limit(1, before + 4 * MIB)
    x = torch.ones(MIB // 2, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(MIB, device="sim:1")
    message = str(error.value)
    assert "sim:1 out of memory. Tried to allocate 4.00 MiB" in message
    assert "is free" in message and "in use" in message and "set_memory_limit" in message
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x, x])  # the result of a kernel
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(MIB).to("sim:1")
    assert torch.sim.memory_allocated(1) - before == x.nbytes
    assert x.add_(1).sum().item() == MIB
    torch.ones(MIB, device="sim:2")  # the others have no limit
    assert torch.sim.mem_get_info(1) == (2 * MIB, before + 4 * MIB)
    assert torch.sim.get_device_properties(1).total_memory == before + 4 * MIB
    torch.sim.set_memory_limit(1, None)
    torch.empty(MIB, device="sim:1")
    with pytest.raises(ValueError, match="at least 1 byte or None"):
        torch.sim.set_memory_limit(1, 0)


def test_out_of_memory_in_backward_is_raised_where_backward_was_called() -> None:
    x = torch.ones(MIB // 4, device="sim:1", requires_grad=True)
    y = (x.exp() * x.exp()).sum()
    torch.sim.set_memory_limit(1, torch.sim.memory_allocated(1) + 1000)
    with pytest.raises(torch.OutOfMemoryError, match="sim:1 out of memory"):
        y.backward()


def test_properties_tell_name_and_memory() -> None:
    properties = torch.sim.get_device_properties("sim:2")
    assert properties.name == torch.sim.get_device_name(2) == "Simulated device 2"
    assert properties.total_memory == torch.sim.mem_get_info(2)[1] > MIB


def test_copies_between_devices_are_counted() -> None:
    torch.sim.reset_copy_stats()
    x = torch.ones(100).to("sim:1")
    y = x.to("sim:3")
    y.copy_(x)
    x.clone()  # within a device
    y.cpu()
    assert torch.sim.copy_stats() == {
        ("cpu", "sim:1"): torch.sim.CopyStats(1, 400),
        ("sim:1", "sim:3"): torch.sim.CopyStats(2, 800),
        ("sim:3", "cpu"): torch.sim.CopyStats(1, 400),
    }
    assert torch.sim.copy_stats()[("sim:1", "sim:3")].bytes == 800
    torch.sim.reset_copy_stats()
    assert torch.sim.copy_stats() == {}


# --- speed ---


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ops(device: str, count: int, size: int = 4) -> None:
    x = torch.zeros(size, device=device)
    for _ in range(count):
        x.add_(1)
    torch.sim.synchronize(device)


def test_ops_wait_as_long_as_they_are_told() -> None:
    ops("sim:3", 10)
    unpaced = seconds(lambda: ops("sim:3", 400))
    torch.sim.set_speed(3, seconds_per_op=50e-6)
    assert torch.sim.get_speed(3) == (50e-6, 0.0)
    most = 0.02 + 3 * unpaced + 0.15  # not 400 sleeps of a millisecond
    assert 0.019 < quickest(lambda: seconds(lambda: ops("sim:3", 400)), most) < most
    torch.sim.set_speed(3, seconds_per_element=1e-6)
    assert seconds(lambda: ops("sim:3", 4, size=5000)) >= 0.019
    others = quickest(lambda: seconds(lambda: ops("sim:2", 400)), 0.2)
    assert others < 0.2  # they are as fast as ever
    torch.sim.set_speed(3)
    assert torch.sim.get_speed(3) == (0.0, 0.0)


def test_views_are_free_and_results_are_waited_for() -> None:
    x = torch.ones(4, 4, device="sim:3")
    torch.sim.set_speed(3, seconds_per_op=0.02)

    def views() -> None:
        for _ in range(50):
            x.view(2, 8).t()[1:].unsqueeze(0).expand(3, -1, -1)

    assert quickest(lambda: seconds(views), 0.5) < 0.5
    assert seconds(lambda: x.sum().item()) >= 0.039
    torch.sim.set_speed(3, seconds_per_op=100e-6)
    assert seconds(lambda: (x + 1).cpu()) >= 190e-6


def test_devices_overlap_and_a_slow_one_is_slow() -> None:
    for index in range(4):
        torch.sim.set_speed(index, seconds_per_op=5e-3 if index < 3 else 15e-3)
    took = [0.0] * 4

    def work(index: int) -> None:
        took[index] = seconds(lambda: ops(f"sim:{index}", 20))

    def all_at_once() -> None:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together = quickest(lambda: seconds(all_at_once), 0.55)
    assert 0.3 <= together < 0.55  # the slow device's time; one after the other would be 0.6
    assert took[3] >= 0.3

    def fast_ones() -> float:
        all_at_once()
        return max(took[:3])

    assert quickest(fast_ones, 0.3) < 0.3


def test_two_threads_on_one_device_share_its_time() -> None:
    torch.sim.set_speed(2, seconds_per_op=5e-3)
    threads = [threading.Thread(target=ops, args=("sim:2", 10)) for _ in range(2)]

    def both() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert seconds(both) >= 0.1


def test_backward_overlaps_between_devices() -> None:
    leaves = [torch.ones(3, device=f"sim:{index}", requires_grad=True) for index in range(4)]
    losses = []
    for leaf in leaves:
        output = leaf
        for _ in range(10):
            output = output.sin()
        losses.append(output.sum().to("sim:0"))
    total = torch.stack(losses).sum()
    backward = partial(total.backward, retain_graph=True)
    for index in range(4):
        torch.sim.set_speed(index, seconds_per_op=5e-3)
    # sin's backward is two ops: 0.1 s for every device.
    assert 0.1 <= quickest(lambda: seconds(backward), 0.35) < 0.35


def test_a_speed_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got seconds_per_op=-1"):
        torch.sim.set_speed(0, seconds_per_op=-1)


# --- saving, copying, loading ---


@pytest.mark.parametrize(
    ("saved_on", "map_location", "loaded_on"),
    [
        ("cpu", "sim:3", "sim:3"),
        ("sim:3", "cpu", "cpu"),
        ("sim:1", "sim:3", "sim:3"),
        ("sim:1", {"sim:1": "sim:3"}, "sim:3"),
        ("sim:1", None, "sim:1"),
    ],
)
def test_saved_tensors_load_where_they_are_mapped(
    saved_on: str, map_location: object, loaded_on: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(saved_on)
    base = torch.arange(12.0, device=saved_on).view(3, 4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "view": base.t()[1:], "base": base}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=map_location)
    for name, value in model.state_dict().items():
        assert loaded["model"][name].device == torch.device(loaded_on)
        assert torch.equal(loaded["model"][name].cpu(), value.cpu())
    assert loaded["view"].data_ptr() == loaded["base"].data_ptr() + 4  # storage is still shared
    assert torch.equal(loaded["view"].cpu(), base.t()[1:].cpu())


def test_copies_of_modules_stay_on_their_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("sim:3")
    twin = copy.deepcopy(model)
    assert all(tensor.device == torch.device("sim:3") for tensor in twin.state_dict().values())
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    moved = copy.deepcopy(model).to("sim:1").double()
    assert torch.equal(moved[0].weight.float().cpu(), model[0].weight.cpu())


def test_meta_modules_come_to_life_on_a_device() -> None:
    layer = nn.Linear(3, 4, device="meta").to_empty(device="sim:3")
    nn.init.ones_(layer.weight)
    assert layer.weight.sum().item() == 12


def test_pinned_memory_says_so_and_copies() -> None:
    x = torch.arange(5.0).pin_memory()
    assert x.is_pinned() and not torch.arange(5.0).is_pinned()
    assert x.to("sim:3", non_blocking=True).tolist() == [0, 1, 2, 3, 4]
    back = torch.ones(3, device="sim:3").to("cpu", non_blocking=True)
    torch.sim.synchronize(3)
    assert back.tolist() == [1, 1, 1]


def test_data_loader_workers_and_pinning_leave_the_devices_alone() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches).to("sim:3").cpu(), data.tensors[0])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_process_is_told_that_devices_are_out_of_reach() -> None:
    code = (
        "import os, torch; import sim_devices\n"
        "sim_devices.enable(2); x = torch.ones(2, device='sim:1')\n"
        "if os.fork() == 0:\n"
        "    torch.manual_seed(1)\n"
        "    try: x + 1\n"
        "    except RuntimeError as error: os._exit(3 if 'forked process' in str(error) else 4)\n"
        "    os._exit(5)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 3"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_many_threads_on_many_devices_compute_what_one_does() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = [torch.randn(5, 6) for _ in range(8)]
    expected, got = [], {}
    for x in inputs:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
        expected.append(gradient)

    def work(index: int) -> None:
        replica = copy.deepcopy(model).to(f"sim:{index}")
        for _ in range(10):
            loss = replica(inputs[index].to(f"sim:{index}")).square().sum()
            (got[index],) = torch.autograd.grad(loss, replica[0].weight)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, gradient in enumerate(expected):
        torch.testing.assert_close(got[index].cpu(), gradient)


def test_an_op_may_run_out_of_memory_after_it_has_resized_an_argument() -> None:
    """It then looks at no block that it has freed, as AddressSanitizer shows."""
    x = torch.rand(100, 50, device="sim:0")
    values, indices = torch.ones(1, device="sim:0"), torch.ones(1, device="sim:0").long()
    torch.sim.set_memory_limit(0, torch.sim.memory_allocated(0) + 900)  # for one of the two
    with pytest.warns(UserWarning, match="output"), pytest.raises(torch.OutOfMemoryError):
        torch.max(x, 1, out=(values, indices))
    torch.sim.set_memory_limit(0, None)
    assert torch.equal(x.max(1).values.cpu(), x.cpu().max(1).values)
