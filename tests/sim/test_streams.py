"""Streams, events and unfinished copies of simulated devices, as CUDA documents them.

What CUDA leaves unfinished, looks unfinished, and what nothing orders is a race. The rules are
those of "CUDA semantics" in PyTorch's notes (asynchronous execution, streams, pinned memory
buffers), and of `torch.Tensor.record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sim_streams import SIM, main
from torch import Tensor, nn

# --- races: each of these fails on a GPU now and then, and here always ---------------------------


def reads_too_early(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    with torch.sim.stream(side):
        x + 1


def writes_what_is_being_read(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        kept = x + 1
    x.add_(1)
    main().wait_stream(side)
    del kept


def writes_what_is_being_written(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        x.add_(1)
    x.mul_(2)


def overlapping_parts(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        x[1:3].add_(1)
    x[:2].mul_(2)


def uses_memory_that_its_stream_has_not_got_yet(side: torch.Stream) -> None:
    torch.ones(4, device=SIM) + 1  # what was freed may be handed out while this still works
    x = torch.empty(4, device=SIM)
    with torch.sim.stream(side):
        x.fill_(1)


def event_before_the_work(side: torch.Stream) -> None:
    event = torch.Event(SIM)
    event.record()
    x = torch.ones(4, device=SIM)
    side.wait_event(event)
    with torch.sim.stream(side):
        x + 1


def waits_for_the_wrong_stream(side: torch.Stream) -> None:
    other = torch.Stream(SIM)
    x = torch.ones(4, device=SIM)
    side.wait_stream(other)
    with torch.sim.stream(side):
        x + 1


def freed_too_early(side: torch.Stream, *, handed_out_again: int = 1000) -> None:
    x = torch.ones(1000, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        x + 1
    del x
    torch.ones(handed_out_again, device=SIM)


def freed_too_early_for_a_smaller_one(side: torch.Stream) -> None:
    freed_too_early(side, handed_out_again=10)


def source_changed_too_early(side: torch.Stream) -> None:
    x = torch.ones(4).pin_memory()
    x.to(SIM, non_blocking=True)
    x.zero_()
    torch.sim.synchronize(SIM)


def gradient_read_on_another_stream(side: torch.Stream) -> None:
    layer = nn.Linear(4, 4, device=SIM)
    x = torch.ones(2, 4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        layer(x).sum().backward()
    layer.weight.grad.sum()


RACES: list[Callable[[torch.Stream], None]] = [
    reads_too_early,
    writes_what_is_being_read,
    writes_what_is_being_written,
    overlapping_parts,
    uses_memory_that_its_stream_has_not_got_yet,
    event_before_the_work,
    waits_for_the_wrong_stream,
    freed_too_early,
    freed_too_early_for_a_smaller_one,
    source_changed_too_early,
    gradient_read_on_another_stream,
]


@pytest.mark.parametrize("mistake", RACES, ids=lambda mistake: mistake.__name__)
def test_a_race_is_an_error(mistake: Callable[[torch.Stream], None], side: torch.Stream) -> None:
    with pytest.raises(torch.sim.RaceError, match=r"^Race: "):
        mistake(side)


def test_an_error_names_both_ops_their_streams_and_what_to_do(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM).mul_(2)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError) as race:
        x + 1
    text = str(race.value)
    for part in ("aten::add on stream", "reads", "aten::mul_ on the default stream of sim:0",
                 "has written", "wait_stream"):  # fmt: skip
        assert part in text


def test_a_race_in_a_backward_arrives_where_the_backward_was_called(side: torch.Stream) -> None:
    class Racing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.sim.stream(side):
                return gradient + 1

    x = torch.ones(4, device=SIM, requires_grad=True)
    with pytest.raises(torch.sim.RaceError, match="aten::add"):
        Racing.apply(x).sum().backward()


def test_devices_that_are_not_strict_let_races_pass(side: torch.Stream) -> None:
    torch.sim.set_strict(False)
    try:
        x = torch.ones(4, device=SIM)
        with torch.sim.stream(side):
            assert (x + 1).tolist() == [2] * 4
        assert x.to("cpu", non_blocking=True).tolist() == [1] * 4
    finally:
        torch.sim.set_strict(True)


# --- order: none of these is a race --------------------------------------------------------------


def by_wait_stream(side: torch.Stream, x: Tensor) -> None:
    side.wait_stream(main())


def by_an_event(side: torch.Stream, x: Tensor) -> None:
    event = torch.Event(SIM)
    event.record(main())
    side.wait_event(event)


def by_the_streams_synchronize(side: torch.Stream, x: Tensor) -> None:
    main().synchronize()


def by_an_events_synchronize(side: torch.Stream, x: Tensor) -> None:
    event = main().record_event()
    event.synchronize()


def by_an_event_that_says_it_is_through(side: torch.Stream, x: Tensor) -> None:
    event = main().record_event()
    while not event.query():
        pass


def by_the_devices_synchronize(side: torch.Stream, x: Tensor) -> None:
    torch.sim.synchronize(SIM)


def by_the_accelerators_synchronize(side: torch.Stream, x: Tensor) -> None:
    torch.accelerator.synchronize(0)


def by_item(side: torch.Stream, x: Tensor) -> None:
    x.sum().item()


def by_a_copy_to_the_host(side: torch.Stream, x: Tensor) -> None:
    x.cpu()


def by_nonzero(side: torch.Stream, x: Tensor) -> None:
    x.nonzero()


def through_a_third_stream(side: torch.Stream, x: Tensor) -> None:
    third = torch.Stream(SIM)
    third.wait_stream(main())
    side.wait_stream(third)


ORDERS: list[Callable[[torch.Stream, Tensor], None]] = [
    by_wait_stream,
    by_an_event,
    by_the_streams_synchronize,
    by_an_events_synchronize,
    by_an_event_that_says_it_is_through,
    by_the_devices_synchronize,
    by_the_accelerators_synchronize,
    by_item,
    by_a_copy_to_the_host,
    by_nonzero,
    through_a_third_stream,
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_what_is_ordered_is_no_race(
    order: Callable[[torch.Stream, Tensor], None], side: torch.Stream
) -> None:
    x = torch.ones(4, device=SIM)
    order(side, x)
    with torch.sim.stream(side):
        y = x + 1
    main().wait_stream(side)
    assert (x + y).tolist() == [3] * 4


def test_streams_may_read_one_tensor_and_write_disjoint_parts_of_one(side: torch.Stream) -> None:
    x, y = torch.ones(4, device=SIM), torch.zeros(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y[2:].copy_(x[:2])
    y[:2].copy_(x[2:])
    main().wait_stream(side)
    assert y.tolist() == [1] * 4


def test_recorded_memory_is_not_handed_out_too_early(side: torch.Stream) -> None:
    x = torch.ones(1000, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
    torch.ones(1000, device=SIM)
    main().wait_stream(side)
    assert y.sum().item() == 2000


def test_memory_may_be_freed_when_its_own_stream_waits_before_it_is_needed_again(
    side: torch.Stream,
) -> None:
    x = torch.ones(1000, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y = x + 1
    del x
    main().wait_stream(side)
    assert (torch.ones(1000, device=SIM) + y).sum().item() == 3000


def test_copies_between_devices_wait_for_both_current_streams(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y = (x + 1).to("sim:1") + 1
    assert y.tolist() == [3] * 4  # on sim:1 nothing but its default stream was used


# --- the host sees a copy when it has waited for it ----------------------------------------------

VALUES = [
    torch.arange(4.0),
    torch.arange(4.0, dtype=torch.float16),
    torch.arange(4),
    torch.arange(4, dtype=torch.uint8),
    torch.tensor([True, False, True]),
    torch.arange(4.0).to(torch.complex64),
    torch.arange(6.0).view(2, 3).t(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}-{value.dim()}d")
def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(value: Tensor) -> None:
    there = value.to(SIM)
    copy = there.to("cpu", non_blocking=True)
    assert copy.is_pinned()
    assert not torch.equal(copy, value)
    main().record_event().synchronize()
    assert torch.equal(copy, value)


def test_waiting_for_another_stream_brings_nothing(side: torch.Stream) -> None:
    copy = torch.ones(4, device=SIM).to("cpu", non_blocking=True)
    side.synchronize()
    torch.sim.synchronize("sim:1")
    assert copy.isnan().all()
    torch.sim.synchronize(SIM)
    assert copy.tolist() == [1] * 4


def test_copies_into_one_place_arrive_in_order() -> None:
    target = torch.empty(2).pin_memory()
    for value in (1.0, 2.0, 3.0):
        target.copy_(torch.full((2,), value, device=SIM), non_blocking=True)
    torch.sim.synchronize(SIM)
    assert target.tolist() == [3, 3]


def test_a_copy_whose_target_is_gone_harms_nobody() -> None:
    torch.ones(4, device=SIM).to("cpu", non_blocking=True)
    torch.sim.synchronize(SIM)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.cpu, repr], ids=str)
def test_what_reads_on_the_device_waits_for_itself(read: Callable[[Tensor], Any]) -> None:
    assert "1" in str(read(torch.ones((), device=SIM)))


def test_pageable_memory_is_staged() -> None:
    """CUDA's "API synchronization behavior", asynchronous copies of pageable memory.

    The source is staged and may change at once. A copy to the host "might" be synchronous, on which
    nobody may rely.
    """
    source = torch.ones(4)
    there = source.to(SIM, non_blocking=True)
    source.zero_()
    target = torch.empty(4)
    target.copy_(there, non_blocking=True)
    assert target.isnan().all()
    main().synchronize()
    assert target.tolist() == [1] * 4


# --- PyTorch's own parts on streams ---------------------------------------------------------------


def trained(
    make: Callable[[], nn.Module], x: Tensor, stream: torch.Stream | None, **adam: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    net = make().to(SIM)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **adam)
    if stream is not None:
        stream.wait_stream(main())
    with torch.sim.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            output = net(x.to(SIM))
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
            optimizer.step()
    if stream is not None:
        main().wait_stream(stream)
    return [parameter.detach().cpu() for parameter in net.parameters()]


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        torch.ones(6, 4),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8) / 100,
    ),
    "lstm": (lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True), torch.ones(2, 3, 4)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.arange(2 * 3 * 8.0).view(2, 3, 8) / 50,
    ),
}


@pytest.mark.parametrize("adam", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_a_training_on_a_side_stream_is_that_on_the_default_one(
    net: str, adam: dict[str, Any], side: torch.Stream
) -> None:
    make, x = NETS[net]
    for a, b in zip(trained(make, x, None, **adam), trained(make, x, side, **adam), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # two streams, one leaf
def test_a_backward_runs_on_the_streams_of_the_forward(side: torch.Stream) -> None:
    """PyTorch's note on stream semantics of backward passes."""
    one = torch.ones(4, device=SIM, requires_grad=True)
    side.wait_stream(main())
    a = one * 2
    with torch.sim.stream(side):
        b = one * 3
    main().wait_stream(side)
    (a + b).sum().backward()
    assert one.grad is not None and one.grad.tolist() == [5] * 4


def test_a_gradient_scaler_works_on_a_side_stream(side: torch.Stream) -> None:
    layer = nn.Linear(4, 1, device=SIM)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler("sim", 256.0)
    before = layer.weight.detach().cpu()
    side.wait_stream(main())
    with torch.sim.stream(side):
        with torch.autocast("sim", dtype=torch.float16):
            loss = layer(torch.ones(2, 4, device=SIM)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    side.synchronize()
    assert not torch.equal(layer.weight.detach().cpu(), before)


def test_a_pinning_loader_feeds_devices() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    batches = [batch.to(SIM, non_blocking=True) for (batch,) in loader]
    assert torch.equal(torch.cat(batches).cpu(), data.tensors[0])


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_refuses_gradients_of_other_strides(optimizer: Any) -> None:
    x = torch.ones(3, 4, device=SIM, requires_grad=True)
    x.grad = torch.ones(4, 3, device=SIM).t()
    with pytest.raises(RuntimeError, match=r"expected grads\[0\] of the strides of its parameter"):
        optimizer([x], lr=0.1, fused=True).step()
    optimizer([x], lr=0.1, foreach=True).step()


# --- the module's face ----------------------------------------------------------------------------


def test_streams_are_current_per_thread_and_device_and_restored(side: torch.Stream) -> None:
    before = main()
    with torch.sim.device(1), torch.sim.stream(side):
        assert torch.sim.current_stream(0) == side and torch.sim.current_device() == 0
        assert torch.sim.current_stream(1) == torch.sim.default_stream(1)
    assert main() == before
    with torch.sim.stream(None):
        assert main() == before


def test_a_device_has_32_streams_and_hands_them_out_in_turn() -> None:
    streams = [torch.Stream(SIM) for _ in range(32)]
    assert len({stream.stream_id for stream in [main(), *streams]}) == 33
    assert [torch.Stream(SIM) for _ in range(32)] == streams
    assert torch.Stream("sim:1") not in streams


def test_waits_of_the_host_are_counted() -> None:
    x = torch.ones(4, device=SIM)
    before = torch.sim.host_waits()
    y = (x + 1).to("sim:1", non_blocking=True).sum()
    assert torch.sim.host_waits() == before
    y.item()
    assert torch.sim.host_waits() == before + 1
