"""Virtual time: schedules computed by hand, and numbers that no load changes.

What overlaps what is as in NVIDIA's CUDA C++ Programming Guide, "Asynchronous Concurrent
Execution": kernels of one stream, kernels that fill their device and copies of one direction do not
overlap; kernels with copies, and copies of both directions, do.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sim_devices.links import PRESETS
from support import oracle
from support.oracle import Classifier, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelMonitor, DataParallelStrategy

US = 1_000  # nanoseconds
OP = 10 * US


def elapsed() -> int:
    """In nanoseconds, of which there are whole ones."""
    return round(torch.sim.elapsed() * 1e9)


class Machine:
    """Four devices of 10 microseconds per op, a nanosecond per byte of a copy, and tensors."""

    def __init__(self) -> None:
        for k in range(4):
            torch.sim.set_speed(k, seconds_per_op=OP / 1e9)
        ends = ["cpu", *range(4)]
        for source, target in itertools.permutations(ends, 2):
            torch.sim.set_link(source, target, bytes_per_second=1e9)
        self.x = [torch.ones(4, device=f"sim:{k}") for k in range(4)]
        self.side = [torch.Stream(f"sim:{k}") for k in range(4)]
        self.other = [torch.Stream(f"sim:{k}") for k in range(4)]
        self.big = {
            (k, us): torch.ones(us * US, dtype=torch.uint8, device=f"sim:{k}")
            for k in range(4)
            for us in (20, 30)
        }
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
def machine() -> Iterator[Machine]:
    yield Machine()
    for k in range(4):
        torch.sim.synchronize(k)


# --- schedules by hand, in microseconds -----------------------------------------------------------


def ops_of_a_stream_come_one_after_another(m: Machine) -> int:
    m.ops(0, 3)
    return 30


def devices_work_side_by_side(m: Machine) -> int:
    m.ops(0, 3)
    m.ops(1, 5)
    return 50


def streams_of_a_device_share_it(m: Machine) -> int:
    m.ops(0, 2)
    with m.on(m.side[0]):
        m.ops(0, 3)
    return 50


def a_copy_is_hidden_behind_ops(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(25), "sim:0")  # 0 to 25
    m.ops(0, 3)  # 0 to 30
    return 30


def an_op_waits_for_a_copy_that_is_longer(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(35), "sim:0")  # 0 to 35
    m.ops(0, 3)  # 0 to 30
    torch.sim.current_stream(0).wait_stream(m.side[0])
    m.ops(0)  # 35 to 45
    return 45


def a_copy_and_ops_of_one_stream_do_not_overlap(m: Machine) -> int:
    m.copy(m.host(25), "sim:0")
    m.ops(0, 3)
    return 55


def copies_into_a_device_share_its_engine(m: Machine) -> int:
    for stream in (m.side[0], m.other[0]):
        with m.on(stream):
            m.copy(m.host(20), "sim:0")
    return 40


def copies_in_and_out_overlap(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(20), "sim:0")
    with m.on(m.other[0]):
        kept = m.copy(m.big[0, 30], "cpu")
        m.other[0].synchronize()
    del kept
    return 30


def copies_into_two_devices_overlap(m: Machine) -> int:
    for k in (0, 1):
        m.copy(m.host(20), f"sim:{k}")
    return 20


def copies_out_of_a_device_to_two_others_share_its_engine(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.big[0, 20], "sim:1")  # 0 to 20
    with m.on(m.other[0]):
        m.copy(m.big[0, 30], "sim:2")  # 20 to 50
    return 50


def copies_from_two_devices_into_one_share_its_engine(m: Machine) -> int:
    with m.on(m.side[2]):
        m.copy(m.big[0, 20], "sim:2")
    with m.on(m.other[2]):
        m.copy(m.big[1, 30], "sim:2")
    return 50


def copies_between_different_pairs_overlap(m: Machine) -> int:
    m.copy(m.big[0, 20], "sim:1")
    m.copy(m.big[2, 30], "sim:3")
    return 30


def two_devices_exchange_at_once(m: Machine) -> int:
    with m.on(m.side[1]), m.on(m.side[0]):
        m.copy(m.big[0, 20], "sim:1")
    with m.on(m.other[0]), m.on(m.other[1]):
        m.copy(m.big[1, 20], "sim:0")
    return 20


def a_copy_between_devices_waits_for_both_and_both_wait_for_it(m: Machine) -> int:
    m.ops(0)  # 0 to 10
    m.ops(1, 3)  # 0 to 30
    m.copy(m.big[0, 20], "sim:1")  # 30 to 50
    m.ops(0)  # 50 to 60
    m.ops(1, 2)  # 50 to 70
    return 70


def a_chain_of_events(m: Machine) -> int:
    for k in (0, 1, 2):
        m.ops(k)  # 0 to 10, 10 to 20, 20 to 30
        event = torch.sim.current_stream(k).record_event()
        torch.sim.current_stream(k + 1).wait_event(event)
    m.ops(3, 2)  # 30 to 50
    m.ops(0, 3)  # 10 to 40
    return 50


def an_event_is_its_moment_and_not_what_comes_later(m: Machine) -> int:
    m.ops(0)
    event = torch.sim.current_stream(0).record_event()
    m.ops(0, 5)  # to 60
    torch.sim.current_stream(1).wait_event(event)
    m.ops(1, 4)  # 10 to 50
    return 60


def the_host_issues_what_comes_after_a_wait_later(m: Machine) -> int:
    m.ops(0, 3)  # to 30
    torch.sim.synchronize(0)
    m.ops(1)  # 30 to 40
    return 40


def the_host_waits_for_an_event_alone(m: Machine) -> int:
    m.ops(0)
    event = torch.sim.current_stream(0).record_event()
    m.ops(0, 5)  # to 60
    event.synchronize()
    m.ops(1, 6)  # 10 to 70
    return 70


def to_ask_is_not_to_wait(m: Machine) -> int:
    m.ops(0, 3)
    stream = torch.sim.current_stream(0)
    for asked in (stream, stream.record_event()):
        while not asked.query():
            pass
    m.ops(1)
    return 30


def a_copy_that_blocks_holds_up_the_host(m: Machine) -> int:
    m.ops(0)  # to 10
    m.big[0, 20].cpu()  # to 30
    m.ops(1)  # 30 to 40
    return 40


def a_copy_from_pageable_memory_that_does_not_block_holds_up_nobody(m: Machine) -> int:
    m.copy(torch.ones(20 * US, dtype=torch.uint8), "sim:0")
    m.ops(1, 3)
    return 30


def of_copies_the_one_that_has_been_ready_for_longest_comes_first(m: Machine) -> int:
    with m.on(m.side[0]):
        m.copy(m.host(20), "sim:0")  # 0 to 20
    m.ops(0)  # 0 to 10
    m.copy(m.host(20), "sim:0")  # ready at 10: 40 to 60
    with m.on(m.other[0]):
        m.copy(m.host(20), "sim:0")  # ready at 0: 20 to 40
        m.ops(0, 4)  # 40 to 80
    return 80


SCHEDULES: list[Callable[[Machine], int]] = [
    ops_of_a_stream_come_one_after_another,
    devices_work_side_by_side,
    streams_of_a_device_share_it,
    a_copy_is_hidden_behind_ops,
    an_op_waits_for_a_copy_that_is_longer,
    a_copy_and_ops_of_one_stream_do_not_overlap,
    copies_into_a_device_share_its_engine,
    copies_in_and_out_overlap,
    copies_into_two_devices_overlap,
    copies_out_of_a_device_to_two_others_share_its_engine,
    copies_from_two_devices_into_one_share_its_engine,
    copies_between_different_pairs_overlap,
    two_devices_exchange_at_once,
    a_copy_between_devices_waits_for_both_and_both_wait_for_it,
    a_chain_of_events,
    an_event_is_its_moment_and_not_what_comes_later,
    the_host_issues_what_comes_after_a_wait_later,
    the_host_waits_for_an_event_alone,
    to_ask_is_not_to_wait,
    a_copy_that_blocks_holds_up_the_host,
    a_copy_from_pageable_memory_that_does_not_block_holds_up_nobody,
    of_copies_the_one_that_has_been_ready_for_longest_comes_first,
]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_it_takes_what_was_computed_by_hand(
    schedule: Callable[[Machine], int], strict: bool, machine: Machine
) -> None:
    torch.sim.set_strict(strict)
    try:
        assert schedule(machine) * US == elapsed()
    finally:
        torch.sim.set_strict(True)


def test_a_link_has_a_rate_and_a_delay_and_the_way_back_its_own(machine: Machine) -> None:
    torch.sim.set_link("cpu", "sim:0", bytes_per_second=1e9, seconds=5e-6)
    torch.sim.set_link("sim:0", "cpu", bytes_per_second=2e9, seconds=1e-6)
    x = machine.host(8).to("sim:0", non_blocking=True)
    assert elapsed() == 13 * US
    x.cpu()
    assert elapsed() == 18 * US


def test_without_a_link_copies_go_through_the_cpu_by_the_slower_way(machine: Machine) -> None:
    torch.sim.remove_link(0, 1)
    torch.sim.set_link(0, "cpu", bytes_per_second=1e9, seconds=1e-6)
    torch.sim.set_link("cpu", 1, bytes_per_second=0.5e9, seconds=2e-6)
    machine.copy(machine.big[0, 20], "sim:1")
    assert elapsed() == (1 + 2 + 40) * US


def test_copies_through_the_cpu_hold_up_those_of_the_cpu(machine: Machine) -> None:
    torch.sim.remove_link(0, 1)
    machine.copy(machine.big[0, 20], "sim:1")  # 0 to 20
    with machine.on(machine.side[1]):
        machine.copy(machine.host(20), "sim:1")  # 20 to 40
    assert elapsed() == 40 * US


def test_reading_a_result_is_an_op_a_copy_of_eight_bytes_and_a_wait(machine: Machine) -> None:
    torch.sim.set_link(0, "cpu", bytes_per_second=1e9, seconds=2e-6)
    x = machine.x[0][:1]
    x.item()
    assert elapsed() == OP + 2 * US + 8
    machine.ops(1)
    assert elapsed() == 2 * OP + 2 * US + 8


def test_issuing_takes_the_host_time_where_it_is_told(machine: Machine) -> None:
    torch.sim.set_clock("virtual", seconds_per_launch=3e-6)
    machine.ops(0, 4)  # issued at 3, 6, 9, 12; the device is busy from 3 on
    assert elapsed() == 3 * US + 4 * OP
    torch.sim.set_speed(0, seconds_per_op=1e-6)
    torch.sim.set_clock("virtual", seconds_per_launch=3e-6)
    machine.ops(0, 4)  # the device waits for the host
    assert elapsed() == 13 * US
    machine.x[0].view(2, 2).t()  # views are launched nowhere
    assert elapsed() == 13 * US


def work_of(op: Callable[[], Any]) -> tuple[int, int]:
    """An op's floating point operations and bytes: at one per nanosecond each."""
    found = []
    for rates in ({"flops_per_second": 1e9}, {"bytes_per_second": 1e9}):
        torch.sim.set_speed(0, **rates)
        torch.sim.set_clock("virtual")
        op()
        found.append(elapsed())
    torch.sim.set_speed(0, flops_per_second=1e9, bytes_per_second=1e9)
    torch.sim.set_clock("virtual")
    op()
    assert elapsed() == max(found)
    torch.sim.set_clock("wall")
    return found[0], found[1]


def test_matrix_products_and_convolutions_count_their_sums_of_products() -> None:
    a, b, c = (torch.ones(n, m, device="sim:0") for n, m in ((64, 32), (32, 16), (64, 16)))
    image, kernel = torch.ones(2, 3, 8, 8, device="sim:0"), torch.ones(5, 3, 3, 3, device="sim:0")
    up = torch.ones(3, 5, 3, 3, device="sim:0")
    of_product, of_matrices = 2 * 64 * 16 * 32, 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert work_of(lambda: a @ b) == (of_product, of_matrices)
    assert work_of(lambda: torch.addmm(c, a, b)) == (of_product, of_matrices + c.nbytes)
    assert work_of(lambda: a + a) == (64 * 32, 3 * a.nbytes)
    assert work_of(lambda: a.t()) == (0, 0)
    flops, _ = work_of(lambda: nn.functional.conv2d(image, kernel))
    assert flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)
    flops, _ = work_of(lambda: nn.functional.conv_transpose2d(image, up))
    assert flops == 2 * (2 * 3 * 8 * 8) * (5 * 3 * 3)


def test_a_convolutions_backward_counts_once_for_each_gradient() -> None:
    layer = nn.Conv2d(3, 5, 3, bias=False, device="sim:0")
    y = layer(torch.ones(2, 3, 8, 8, device="sim:0"))
    gradient = torch.ones_like(y)
    flops, _ = work_of(lambda: torch.autograd.grad(y, layer.weight, gradient, retain_graph=True))
    assert flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_events_tell_virtual_time(machine: Machine) -> None:
    first, last = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
    machine.ops(0, 1)
    first.record()
    machine.ops(0, 3)
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) == 0.03
    torch.sim.set_clock("wall")
    assert first.elapsed_time(last) == 0.03


def test_events_of_different_clocks_tell_the_walls_time(machine: Machine) -> None:
    first, last = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
    first.record()
    machine.ops(0, 1000)
    torch.sim.set_clock("virtual")
    machine.ops(0, 1000)
    last.record()
    assert first.elapsed_time(last) > 0
    torch.sim.set_clock("wall")
    first.record()
    last.record()
    assert 0 < first.elapsed_time(last) < 10_000


def test_busy_seconds_count_without_a_wait(machine: Machine) -> None:
    before = torch.sim.busy_seconds(0)
    machine.ops(0, 3)
    assert torch.sim.busy_seconds(0) - before == pytest.approx(30e-6, rel=1e-9)


# --- host threads ---------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any], name: str = "worker") -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_a_thread_goes_on_after_one_whose_memory_it_uses(machine: Machine) -> None:
    made: list[Tensor] = []

    def work() -> None:
        machine.ops(0, 3)
        torch.sim.synchronize(0)
        made.append(machine.x[1] + 1)  # 30 to 40

    in_a_thread(work)
    machine.ops(2)  # knows nothing of the thread's wait: 0 to 10
    assert elapsed() == 40 * US
    made[0].to("sim:3")  # 40 to 40.016, and the host goes on
    machine.ops(2)
    assert elapsed() == 40 * US + 16
    machine.ops(2, 3)
    assert elapsed() == 70 * US


def test_threads_that_work_for_another_one_go_on_from_it_and_it_after_them(
    machine: Machine,
) -> None:
    machine.ops(0, 3)
    torch.sim.synchronize(0)
    work_for = torch.sim.hand_over()

    def work() -> None:
        with work_for():
            machine.ops(1, 2)  # 30 to 50
            torch.sim.synchronize(1)

    in_a_thread(work)
    assert elapsed() == 50 * US
    machine.ops(2)  # 50 to 60
    assert elapsed() == 60 * US


def test_work_is_handed_on_by_those_who_do_none_themselves(machine: Machine) -> None:
    machine.ops(0, 3)
    torch.sim.synchronize(0)
    work_for_main = torch.sim.hand_over()

    def work() -> None:
        with work_for_main():
            work_for_worker = torch.sim.hand_over()
            in_a_thread(lambda: work_on(work_for_worker), "helper")

    def work_on(work_for: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        with work_for():
            machine.ops(1, 2)  # 30 to 50
            torch.sim.synchronize(1)

    in_a_thread(work)
    machine.ops(2)  # 50 to 60
    assert elapsed() == 60 * US


def test_a_backward_begins_after_its_call_and_its_caller_goes_on_after_it(
    machine: Machine,
) -> None:
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            torch.sim.synchronize(0)
            return gradient

    x = machine.x[0].requires_grad_()
    y = Waiting.apply(x)
    gradient = torch.ones_like(machine.x[0].detach())  # 0 to 10
    machine.ops(1, 6)
    torch.sim.synchronize(1)  # the host is at 60
    (y * 2).backward(gradient)  # forward 60 to 70, backward 70 to 80, which the host waits for
    machine.ops(2)  # 80 to 90
    assert elapsed() == 90 * US


def test_on_the_wall_nothing_is_recorded_nor_handed_over() -> None:
    torch.sim.set_clock("virtual")
    torch.sim.set_clock("wall")
    torch.ones(2, device="sim:0") + 1
    assert torch.sim.timeline().records == []
    assert torch.sim.hand_over() is None and torch.sim.elapsed() == 0


# --- a training step ------------------------------------------------------------------------------


class OneStep(Callback):
    """Puts the second training step on virtual time."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 1:  # `global_step` counts steps of optimizers, of which there may be several
            torch.sim.set_clock("virtual", seconds_per_launch=2e-6)

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 1:
            torch.sim.set_clock("wall")
            self.seconds = torch.sim.elapsed()


class WithARead(Classifier):
    """A step in which every replica's host waits for its device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() > 0
        return loss


def simulate(
    executor: str, make: Callable[[], LightningModule] = Classifier, **options: Any
) -> tuple[float, LightningModule]:
    """Trains for two steps on four unequal devices and returns the time of the second one."""
    for k in range(4):
        torch.sim.set_speed(
            k, seconds_per_op=1e-6, flops_per_second=1e9 * (k + 1), bytes_per_second=1e10
        )
    torch.sim.set_links("pcie4")
    step = OneStep()
    torch.manual_seed(0)
    module = make()
    strategy = DataParallelStrategy(executor=executor, **options)
    fit(module, strategy, callbacks=[step])
    return step.seconds, module


def fit(module: LightningModule, strategy: Any, **options: Any) -> None:
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}
    job = trainer(4, strategy, max_epochs=1, **limits, **options)
    job.fit(module, loader(), loader())


@contextlib.contextmanager
def busy(threads: int = 3, processes: int = 2) -> Iterator[None]:
    """A machine that has other things to do, and a Python that changes threads all the time."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not over.is_set():
            torch.ones(100, 100) @ torch.ones(100, 100)

    burners = [threading.Thread(target=work) for _ in range(threads)]
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    sys.setswitchinterval(1e-5)
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for burner in burners:
            burner.join()
        for other in others:
            other.kill()
            other.wait()


@pytest.fixture
def on_sim(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(oracle, "ON", "sim")


@pytest.mark.parametrize("make", [Classifier, WithARead])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_step_takes_the_same_on_an_idle_and_on_a_busy_machine(
    executor: str, make: type[Classifier], on_sim: None
) -> None:
    idle, _ = simulate(executor, make)
    with busy():
        loaded = [simulate(executor, make)[0] for _ in range(3)]
    assert idle > 0 and loaded == [idle] * 3


@pytest.mark.parametrize("watched", [False, True])
def test_clocks_may_change_while_steps_are_measured(watched: bool, on_sim: None) -> None:
    class Changing(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            torch.sim.set_clock(("virtual", "wall", "virtual")[trainer.global_step % 3])

    callbacks = [Changing(), *([DataParallelMonitor()] if watched else [])]
    strategy = DataParallelStrategy(executor="auto")
    job = trainer(4, strategy, max_epochs=5, limit_val_batches=0, callbacks=callbacks)
    job.fit(Classifier(), loader(), loader())
    assert job.global_step == 15


class Way(WithARead):
    """Notes how each step ran."""

    in_threads: ClassVar[dict[int, bool]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Way.in_threads[batch_idx] = threading.current_thread() is not threading.main_thread()
        return super().training_step(batch, batch_idx)


def simulated_fit(steps: int = 20) -> tuple[dict[int, bool], float]:
    """How the steps of a fit with `executor="auto"` ran, and how long it took."""
    for k in range(4):
        torch.sim.set_speed(k, seconds_per_op=1e-6 * (k + 1))
    torch.sim.set_links("pcie4")
    torch.manual_seed(0)
    Way.in_threads.clear()
    strategy = DataParallelStrategy(executor="auto")
    job = trainer(4, strategy, max_epochs=1, max_steps=steps, limit_val_batches=0)
    torch.sim.set_clock("virtual", seconds_per_launch=2e-6)
    job.fit(Way(), loader(8 * steps, 8), loader(3))
    torch.sim.set_clock("wall")
    return dict(Way.in_threads), torch.sim.elapsed()


def test_auto_goes_by_virtual_time(on_sim: None) -> None:
    """By which replicas are sooner in threads, where their hosts' waits overlap."""
    ways, _ = simulated_fit()
    assert len(ways) == 20 and all([ways[k] for k in (17, 18, 19)])


@pytest.mark.slow
def test_a_fit_with_auto_takes_the_same_on_a_busy_machine(on_sim: None) -> None:
    idle = simulated_fit()
    with busy():
        assert simulated_fit() == idle


def test_replicas_whose_host_waits_overlap_in_threads_and_not_in_order(on_sim: None) -> None:
    times = {executor: simulate(executor, WithARead)[0] for executor in ("threads", "inorder")}
    assert times["threads"] < times["inorder"]


def test_the_step_goes_on_when_its_replicas_have_ended(on_sim: None) -> None:
    simulate("threads", WithARead)
    timeline = torch.sim.timeline()
    of_replicas = [
        i
        for i, record in enumerate(timeline.records)
        if timeline.threads[record.thread].startswith("dp-replica") and record.kind == "host"
    ]
    later = [
        i
        for i, record in enumerate(timeline.records)
        if timeline.threads[record.thread] == "MainThread" and i > max(of_replicas)
    ]
    assert len(of_replicas) == 4 and later
    ended = max(timeline.schedule.ends[i] for i in of_replicas)
    assert min(timeline.schedule.starts[i] for i in later) >= ended


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_with_the_caller_on_side_streams_too(
    executor: str, on_sim: None, on_side_streams: None
) -> None:
    idle, _ = simulate(executor, WithARead)
    with busy():
        loaded = [simulate(executor, WithARead)[0] for _ in range(3)]
    assert idle > 0 and loaded == [idle] * 3


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_in_forward_mode_too_where_autograd_has_one_thread(executor: str, on_sim: None) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        idle, _ = simulate(executor, mode="forward")
        with busy():
            loaded = [simulate(executor, mode="forward")[0] for _ in range(3)]
    assert idle > 0 and loaded == [idle] * 3


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_step_takes_the_same_in_another_process(executor: str, on_sim: None) -> None:
    code = (
        "import sim_devices; sim_devices.enable(8); import torch; torch.set_num_threads(1)\n"
        "import oracle; oracle.ON = 'sim'; import test_virtual_time as here\n"
        f"print(here.simulate({executor!r})[0].hex())"
    )
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path]
    script = f"import sys; sys.path[:0] = {path!r}\n{code}"
    here, _ = simulate(executor)
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert there.stdout.split()[-1:] == [here.hex()], there.stderr


def test_the_clock_does_not_change_what_is_learnt(on_sim: None) -> None:
    _, module = simulate("threads")
    torch.manual_seed(0)
    expected = Classifier()
    fit(expected, DataParallelStrategy(executor="threads"))
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_faster_links_make_a_step_faster(on_sim: None) -> None:
    seconds = {}
    for preset in PRESETS:
        for k in range(4):
            torch.sim.set_speed(k, flops_per_second=1e13, bytes_per_second=1e12)
        torch.sim.set_links(preset)
        x = torch.ones(2**20, device="sim:0")
        torch.sim.set_clock("virtual")
        for k in (1, 2, 3):
            x.to(f"sim:{k}", non_blocking=True)
        seconds[preset] = torch.sim.elapsed()
    assert seconds["pcie4"] > seconds["pcie4_peer"] > 5 * seconds["nvlink4"]
    # By the docstring: three copies of 4 MiB at 26 GB/s, through the CPU with 15 microseconds.
    assert seconds["pcie4"] == pytest.approx(3 * (2**22 / 26e9 + 15e-6), abs=3e-9)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.sim.set_clock("real"), "expected 'wall' or 'virtual', got 'real'"),
        (
            lambda: torch.sim.set_clock("virtual", seconds_per_launch=-1),
            "expected seconds_per_launch of at least 0, got -1",
        ),
        (lambda: torch.sim.set_link(0, 0), "expected a link between two devices, got 0 twice"),
        (lambda: torch.sim.set_link(0, 9), "'cpu' or one of sim:0 to sim:7, got 9"),
        (lambda: torch.sim.set_link(0, "meta"), "'cpu' or one of sim:0 to sim:7, got 'meta'"),
        (
            lambda: torch.sim.set_link(0, 1, bytes_per_second=0),
            "expected bytes_per_second of more than 0, got 0",
        ),
        (lambda: torch.sim.set_link(0, 1, seconds=-1), "expected seconds of at least 0, got -1"),
        (lambda: torch.sim.set_links("token ring"), "expected one of .*'nvlink4'.*'token ring'"),
        (lambda: torch.sim.set_speed(0, flops_per_second=0), "rates of more than 0"),
    ],
)
def test_a_wrong_value_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){message}"):
        call()


@pytest.mark.slow
def test_a_program_that_was_on_the_wall_has_no_virtual_time() -> None:
    code = (
        "import sim_devices; import torch; sim_devices.enable(2)\n"
        "try: torch.sim.elapsed()\n"
        "except RuntimeError as error: print(error)"
    )
    command, folder = [sys.executable, "-c", code], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "Call torch.sim.set_clock('virtual')" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_program_on_virtual_time_ends_while_its_threads_do() -> None:
    """Nothing of Python's is left for a thread that ends while the interpreter does."""
    code = (
        "import sim_devices; import threading; import torch; sim_devices.enable(2)\n"
        "torch.sim.set_clock('virtual')\n"
        "def work(): (torch.ones(3, device='sim:1', requires_grad=True) * 2).sum().backward()\n"
        "threads = [threading.Thread(target=work, daemon=k % 2 == 1) for k in range(20)]\n"
        "for thread in threads: thread.start()\n"
        "x = torch.ones(3, device='sim:0') + 1"
    )
    command, folder = [sys.executable, "-c", code], Path(__file__).parents[1]
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
