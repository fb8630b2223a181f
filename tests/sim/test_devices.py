"""What makes a simulated device a device: separate, counted, limited, seeded, with threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sim_devices
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from support.oracle import QUIET, Classifier, loader
from torch import Tensor

MIB = 2**20
TESTS = Path(__file__).parents[1]


def test_the_number_of_devices_is_fixed_for_a_process() -> None:
    sim_devices.enable(8)  # the same count does nothing
    with pytest.raises(RuntimeError, match="8 simulated devices are enabled already, got 4"):
        sim_devices.enable(4)


# --- placement ------------------------------------------------------------------------------------


def test_the_current_device_is_where_sim_points_in_each_thread() -> None:
    with torch.sim.device("sim:5"):
        assert torch.empty(1, device="sim").device == torch.device("sim:5")
    torch.sim.set_device(2)
    assert torch.ones(1).to("sim").device == torch.device("sim:2")
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.sim.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


MIXING: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda a, b: a + b, "aten::add"),
    (lambda a, b: a.mul_(b), "aten::mul_"),
    (lambda a, b: torch.cat([a, b]), "aten::cat"),
    (lambda a, b: F.linear(a, b), "aten::"),
    (lambda a, b: torch.add(a, a, out=b), "aten::add"),
    (lambda a, b: torch._foreach_add([a, a], [a, b]), "aten::"),
]


@pytest.mark.parametrize("other", ["sim:3", "cpu"])
@pytest.mark.parametrize(("function", "op"), MIXING)
def test_an_op_on_two_devices_raises_and_names_itself(
    function: Callable[[Tensor, Tensor], Any], op: str, other: str
) -> None:
    a, b = torch.rand(4, 4, device="sim:1"), torch.rand(4, 4, device=other)
    with pytest.raises(RuntimeError, match=op):
        function(a, b)


# --- autograd and random numbers ------------------------------------------------------------------


def test_every_device_has_an_autograd_thread() -> None:
    threads: dict[int, set[int]] = {}
    outputs = []
    for index in range(4):
        output = torch.ones(2, device=f"sim:{index}", requires_grad=True) * 2
        for _ in range(3):
            output = output.sin()
            output.register_hook(
                lambda _, index=index: threads.setdefault(index, set()).add(threading.get_ident())
            )
        outputs.append(output.sum().to("sim:0"))
    torch.stack(outputs).sum().backward()
    assert all(len(idents) == 1 for idents in threads.values())
    assert len(set.union(*threads.values()) - {threading.get_ident()}) == 4


def test_every_device_has_its_generator() -> None:
    torch.manual_seed(11)
    first = [torch.rand(5, device=f"sim:{index}") for index in (0, 1)]
    torch.manual_seed(11)
    torch.rand(7, device="sim:0")
    state = torch.sim.get_rng_state("sim:1")
    for _ in range(2):
        assert torch.equal(torch.rand(5, device="sim:1"), first[1])
        torch.sim.set_rng_state(state, 1)
    assert torch.equal(torch.rand(5), first[0].cpu())  # drawing on devices left the CPU's alone


# --- memory ---------------------------------------------------------------------------------------


def test_bytes_are_counted_on_their_device_and_given_back() -> None:
    gc.collect()
    before = [torch.sim.memory_allocated(index) for index in range(8)]
    torch.sim.reset_peak_memory_stats(3)
    x = torch.empty(MIB, dtype=torch.float32, device="sim:3")
    y = x + 1
    view = y[5:].view(-1)
    z = x * 2 * 3  # one temporary
    del y, z
    assert torch.sim.memory_allocated(3) - before[3] == 8 * MIB  # the view holds y's memory
    assert torch.sim.max_memory_allocated(3) - before[3] == 16 * MIB
    view.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated(3) - before[3] == 4 * MIB
    del x, view
    assert [torch.sim.memory_allocated(index) for index in range(8)] == before


def test_the_limit_raises_out_of_memory_and_the_device_works_on() -> None:
    gc.collect()
    before = torch.sim.memory_allocated(1)
    torch.sim.set_memory_limit(1, before + 4 * MIB)
    x = torch.ones(MIB // 2, device="sim:1")
    for work in (
        lambda: torch.empty(MIB, device="sim:1"),
        lambda: torch.cat([x, x, x]),  # the result of a kernel
        lambda: torch.ones(MIB).to("sim:1"),
        lambda: (x.requires_grad_().exp() * 2).sum().backward(),
    ):
        with pytest.raises(torch.OutOfMemoryError, match="sim:1 out of memory"):
            work()
    x.requires_grad_(False)
    gc.collect()
    assert torch.sim.memory_allocated(1) - before == x.nbytes
    assert torch.sim.mem_get_info(1) == (2 * MIB, before + 4 * MIB)
    torch.ones(MIB, device="sim:2")  # the others have no limit
    torch.sim.set_memory_limit(1, None)
    torch.empty(MIB, device="sim:1")


def test_copies_between_devices_are_counted() -> None:
    torch.sim.reset_copy_stats()
    x = torch.ones(100).to("sim:1")
    y = x.to("sim:3")
    y.copy_(x)
    x.clone()  # within a device
    y.cpu()
    found = {pair: (stats.copies, stats.bytes) for pair, stats in torch.sim.copy_stats().items()}
    assert found == {
        ("cpu", "sim:1"): (1, 400),
        ("sim:1", "sim:3"): (2, 800),
        ("sim:3", "cpu"): (1, 400),
    }


# --- Lightning's accelerator ----------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 3])
def test_a_trainer_on_one_device_gives_the_cpus_numbers(device: int) -> None:
    modules = []
    for place in (
        {"accelerator": "cpu", "devices": 1},
        {"accelerator": "sim", "devices": [device]},
    ):
        torch.manual_seed(0)
        modules.append(Classifier())
        options = {**QUIET, **place, "max_epochs": 1, "log_every_n_steps": 1}
        job = Trainer(**options)
        job.fit(modules[-1], loader(), loader())
    assert str(job.strategy.root_device) == f"sim:{device}"
    for expected, got in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(got, expected)
