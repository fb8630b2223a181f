"""Virtual time: schedules computed by hand. Steps: `tests/benchmarks`.

What overlaps what is as in NVIDIA's CUDA C++ Programming Guide, "Asynchronous Concurrent
Execution": kernels of one stream, kernels that fill their device and copies of one direction do not
overlap; kernels with copies, and copies of both directions, do.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

US = 1_000  # nanoseconds


def elapsed() -> int:
    """In nanoseconds, of which there are whole ones."""
    return round(torch.sim.elapsed() * 1e9)


class Machine:
    """Four devices of 10 microseconds per op, a nanosecond per byte of a copy, and tensors."""

    def __init__(self) -> None:
        for k in range(4):
            torch.sim.set_speed(k, seconds_per_op=10e-6)
        for source, target in itertools.permutations(["cpu", *range(4)], 2):
            torch.sim.set_link(source, target, bytes_per_second=1e9)
        self.x = [torch.ones(4, device=f"sim:{k}") for k in range(4)]
        self.side = [torch.Stream(f"sim:{k}") for k in range(4)]
        self.other = [torch.Stream(f"sim:{k}") for k in range(4)]
        self.big = {us: torch.ones(us * US, dtype=torch.uint8, device="sim:0") for us in (20, 30)}
        for k in range(4):
            torch.sim.synchronize(k)
        torch.sim.set_clock("virtual")

    def ops(self, k: int, count: int = 1) -> None:
        for _ in range(count):
            self.x[k] + 1

    def on(self, stream: torch.Stream) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = torch.sim.stream(stream)
        return context

    def host(self, us: int) -> Tensor:
        """So many microseconds of pinned bytes."""
        return torch.ones(us * US, dtype=torch.uint8).pin_memory()

    def copy(self, source: Tensor, target: str) -> Tensor:
        return source.to(target, non_blocking=True)


@pytest.fixture
def machine() -> Machine:
    return Machine()


# --- schedules by hand, in microseconds -----------------------------------------------------------


def streams_of_a_device_share_it(m: Machine) -> int:
    m.ops(0, 2)
    with m.on(m.side[0]):
        m.ops(0, 3)
    return 50


def an_op_waits_for_a_copy_beside_other_ops(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(35), "sim:0")  # 0 to 35
    m.ops(0, 3)  # 0 to 30
    torch.sim.current_stream(0).wait_stream(m.side[0])
    m.ops(0)  # 35 to 45
    return 45


def copies_in_and_out_overlap(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(20), "sim:0")
    with m.on(m.other[0]):
        kept = m.copy(m.big[30], "cpu")
        m.other[0].synchronize()
    del kept
    return 30


def a_copy_between_devices_waits_for_both_and_both_wait_for_it(m: Machine) -> int:
    m.ops(0)  # 0 to 10
    m.ops(1, 3)  # 0 to 30
    m.copy(m.big[20], "sim:1")  # 30 to 50
    m.ops(0)  # 50 to 60
    m.ops(1, 2)  # 50 to 70
    return 70


def the_host_waits_for_an_event_alone(m: Machine) -> int:
    m.ops(0)
    event = torch.sim.current_stream(0).record_event()
    m.ops(0, 5)  # to 60
    event.synchronize()
    m.ops(1, 6)  # 10 to 70
    return 70


def a_copy_that_blocks_holds_up_the_host(m: Machine) -> int:
    m.ops(0)  # to 10
    m.big[20].cpu()  # to 30
    m.ops(1)  # 30 to 40
    return 40


SCHEDULES: list[Callable[[Machine], int]] = [
    streams_of_a_device_share_it,
    an_op_waits_for_a_copy_beside_other_ops,
    copies_in_and_out_overlap,
    a_copy_between_devices_waits_for_both_and_both_wait_for_it,
    the_host_waits_for_an_event_alone,
    a_copy_that_blocks_holds_up_the_host,
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_virtual_time_is_what_was_computed_by_hand(
    schedule: Callable[[Machine], int], machine: Machine
) -> None:
    assert schedule(machine) * US == elapsed()


def test_a_link_has_a_rate_and_a_delay_and_without_one_copies_go_through_the_cpu() -> None:
    x = torch.ones(20 * US, dtype=torch.uint8, device="sim:0")
    torch.sim.set_link(0, "cpu", bytes_per_second=1e9, seconds=1e-6)
    torch.sim.set_link("cpu", 1, bytes_per_second=0.5e9, seconds=2e-6)
    torch.sim.set_clock("virtual")
    x.to("sim:1", non_blocking=True)  # by the slower way, with both delays
    assert elapsed() == (1 + 2 + 40) * US
    x.cpu()
    assert elapsed() == (43 + 21) * US
    torch.sim.set_link(0, 1, bytes_per_second=2e9)
    x.to("sim:1", non_blocking=True)
    assert elapsed() == (43 + 21 + 10) * US


def work_of(op: Callable[[], Any]) -> tuple[int, int]:
    """An op's floating point operations and bytes: at one per nanosecond each."""
    found = []
    for rates in ({"flops_per_second": 1e9}, {"bytes_per_second": 1e9}):
        torch.sim.set_speed(0, **rates)
        torch.sim.set_clock("virtual")
        op()
        found.append(elapsed())
    torch.sim.set_clock("wall")
    return found[0], found[1]


def test_matrix_products_and_convolutions_count_their_sums_of_products() -> None:
    a, b, c = (torch.ones(n, m, device="sim:0") for n, m in ((64, 32), (32, 16), (64, 16)))
    of_product, of_matrices = 2 * 64 * 16 * 32, 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert work_of(lambda: a @ b) == (of_product, of_matrices)
    assert work_of(lambda: torch.addmm(c, a, b)) == (of_product, of_matrices + c.nbytes)
    assert work_of(lambda: a + a) == (64 * 32, 3 * a.nbytes)
    assert work_of(lambda: a.t()) == (0, 0)
    layer = nn.Conv2d(3, 5, 3, bias=False, device="sim:0")
    image = torch.ones(2, 3, 8, 8, device="sim:0")
    assert work_of(lambda: layer(image))[0] == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_events_tell_the_time_of_the_clock_that_both_have(machine: Machine) -> None:
    first, last = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
    before = torch.sim.busy_seconds(0)
    machine.ops(0, 1)
    first.record()
    machine.ops(0, 3)
    last.record()
    assert torch.sim.busy_seconds(0) - before == pytest.approx(40e-6, rel=1e-9)
    torch.sim.set_clock("wall")
    assert first.elapsed_time(last) == 0.03
    last.record()
    assert 0 < first.elapsed_time(last) < 100_000


# --- host threads ---------------------------------------------------------------------------------


def test_a_thread_goes_on_after_the_threads_that_work_for_it(machine: Machine) -> None:
    machine.ops(0, 3)
    torch.sim.synchronize(0)
    work_for_main = torch.sim.hand_over()

    def work() -> None:
        with work_for_main():
            machine.ops(1, 2)  # 30 to 50
            torch.sim.synchronize(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    machine.ops(2)  # 50 to 60
    assert elapsed() == 60 * US


def test_a_thread_goes_on_after_the_backward_it_has_called(machine: Machine) -> None:
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            torch.sim.synchronize(0)
            return gradient

    y = Waiting.apply(machine.x[0].requires_grad_())
    gradient = torch.ones_like(machine.x[0].detach())  # 0 to 10
    machine.ops(1, 6)
    torch.sim.synchronize(1)  # the host is at 60
    (y * 2).backward(gradient)  # forward 60 to 70, backward 70 to 80, which the host waits for
    machine.ops(2)  # 80 to 90
    assert elapsed() == 90 * US
