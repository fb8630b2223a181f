"""Streams, events and unfinished copies of simulated devices, as CUDA documents them.

Each race here fails on a GPU now and then, and on strict simulated devices always; what CUDA leaves
unfinished is full of NaN. The rules are those of "CUDA semantics" in PyTorch's notes (asynchronous
execution, streams, pinned memory buffers) and of `torch.Tensor.record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

SIM = "sim:0"


def main() -> torch.Stream:
    stream: torch.Stream = torch.sim.current_stream(SIM)
    return stream


def ones(n: int = 4) -> Tensor:
    return torch.ones(n, device=SIM)


# --- races ----------------------------------------------------------------------------------------


def on_side_after_main(side: torch.Stream, work: Callable[[], Any]) -> Any:
    side.wait_stream(main())
    with torch.sim.stream(side):
        return work()


def freed_too_early(side: torch.Stream) -> None:
    x = ones(1000)
    side.wait_stream(main())
    with torch.sim.stream(side):
        x + 1
    del x
    ones(10)  # a smaller one, which may lie in the same memory


def pinned_source_changed_too_early(side: torch.Stream) -> None:
    x = torch.ones(4).pin_memory()
    x.to(SIM, non_blocking=True)
    x.zero_()
    torch.sim.synchronize(SIM)


def pinned_memory_overwritten_while_another_stream_reads_it(side: torch.Stream) -> None:
    buffer, zeros = torch.ones(4).pin_memory(), torch.zeros(4, device=SIM)
    with torch.sim.stream(side):
        kept = buffer.to(SIM, non_blocking=True)
    try:
        buffer.copy_(zeros, non_blocking=True)
    finally:
        side.synchronize()
        del kept


def another_device_reads_an_unfinished_copy(side: torch.Stream) -> None:
    ones().to("cpu", non_blocking=True).to("sim:1", non_blocking=True)


def gradient_read_on_another_stream(side: torch.Stream) -> None:
    layer, x = nn.Linear(4, 4, device=SIM), torch.ones(2, 4, device=SIM)
    on_side_after_main(side, lambda: layer(x).sum().backward())
    assert layer.weight.grad is not None
    layer.weight.grad.sum()


def copy_runs_on_the_sources_current_stream(side: torch.Stream) -> None:
    x = ones()
    y = on_side_after_main(side, lambda: x.to("sim:1"))
    y.add_(1)
    x.add_(1)


RACES: list[Callable[[torch.Stream], None]] = [
    freed_too_early,
    pinned_source_changed_too_early,
    pinned_memory_overwritten_while_another_stream_reads_it,
    another_device_reads_an_unfinished_copy,
    gradient_read_on_another_stream,
    copy_runs_on_the_sources_current_stream,
]


@pytest.mark.parametrize("mistake", RACES, ids=lambda mistake: mistake.__name__)
def test_a_race_is_an_error(mistake: Callable[[torch.Stream], None], side: torch.Stream) -> None:
    with pytest.raises(torch.sim.RaceError, match=r"^Race: "):
        mistake(side)


def test_an_error_names_both_ops_and_their_streams(side: torch.Stream) -> None:
    x = ones().mul_(2)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError) as race:
        x + 1
    parts = ("aten::add on stream", "reads", "aten::mul_ on the default stream of sim:0", "written")
    assert all(part in str(race.value) for part in parts)


def from_pinned(x: Tensor) -> Tensor:
    pinned = torch.ones(x.shape).pin_memory()
    x.copy_(pinned, non_blocking=True)
    return pinned


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "x[i] = ...": lambda x, i, rows: x.__setitem__(i, rows),
    "foreach add": lambda x, i, rows: torch._foreach_add_([x[0], x[1]], 1),
    "out of cat": lambda x, i, rows: torch.cat([rows, rows], out=x),
    "normal_": lambda x, i, rows: x.normal_(),
    "copy_": lambda x, i, rows: x.copy_(rows[0]),
    "from pinned memory": lambda x, i, rows: x.copy_(
        torch.ones(4, 4).pin_memory(), non_blocking=True
    ),
    "from another device": lambda x, i, rows: x.copy_(rows.to("sim:1")[0], non_blocking=True),
    "storage": lambda x, i, rows: x.untyped_storage().fill_(0),
    # Their schemas do not say that they write.
    "embedding's renorm": lambda x, i, rows: F.embedding(i, x, max_norm=0.1),
    "batch norm's statistics": lambda x, i, rows: F.batch_norm(rows, x[0], x[1], training=True),
}

READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, i: torch.cat([x, x]),
    "index": lambda x, i: x[i],
    "foreach": lambda x, i: torch._foreach_add([x], 1),
    "to the host": lambda x, i: x.to("cpu", non_blocking=True),
    "contiguous": lambda x, i: x.t().contiguous(),
    "saved for backward": lambda x, i: x.clone().requires_grad_().mul(x),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_reading_what_another_stream_writes_is_a_race(writer: str, side: torch.Stream) -> None:
    x, rows = torch.ones(4, 4, device=SIM), torch.ones(2, 4, device=SIM)
    i = torch.tensor([0, 1], device=SIM)
    kept = on_side_after_main(side, lambda: WRITERS[writer](x, i, rows))
    with pytest.raises(torch.sim.RaceError):
        x.sum()
    main().wait_stream(side)
    x.sum()
    del kept


@pytest.mark.parametrize("reader", READERS)
def test_writing_what_another_stream_reads_is_a_race(reader: str, side: torch.Stream) -> None:
    x, i = torch.ones(4, 4, device=SIM), torch.tensor([0, 1], device=SIM)
    kept = on_side_after_main(side, lambda: READERS[reader](x, i))
    READERS[reader](x, i)  # both may read
    with pytest.raises(torch.sim.RaceError):
        x.fill_(1)
    main().wait_stream(side)
    x.fill_(1)
    del kept


@given(*[st.tuples(st.integers(0, 5), st.integers(1, 6))] * 2)
def test_parts_race_if_they_share_an_element(one: tuple[int, int], other: tuple[int, int]) -> None:
    x, side = ones(11), torch.Stream(SIM)
    (a, n), (b, m) = one, other
    on_side_after_main(side, lambda: x[a : a + n].add_(1))
    raised = False
    try:
        x[b : b + m].add_(1)
    except torch.sim.RaceError:
        raised = True
    main().wait_stream(side)
    assert raised == (a < b + m and b < a + n)


# --- what is ordered ------------------------------------------------------------------------------


ORDERS: dict[str, Callable[[torch.Stream, Tensor], Any]] = {
    "wait_stream": lambda side, x: side.wait_stream(main()),
    "event": lambda side, x: side.wait_event(main().record_event()),
    "synchronize of the stream": lambda side, x: main().synchronize(),
    "synchronize of an event": lambda side, x: main().record_event().synchronize(),
    "query of an event": lambda side, x: main().record_event().query(),
    "synchronize of the device": lambda side, x: torch.sim.synchronize(SIM),
    "item": lambda side, x: x.sum().item(),
    "copy to the host": lambda side, x: x.cpu(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_ordered_is_no_race(order: str, side: torch.Stream) -> None:
    x = ones()
    ORDERS[order](side, x)
    with torch.sim.stream(side):
        y = x + 1
    main().wait_stream(side)
    assert (x + y).tolist() == [3] * 4


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_safe_if_recorded_or_waited_for(recorded: bool, side: torch.Stream) -> None:
    x = ones(1000)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y = x + 1
    if recorded:
        x.record_stream(side)
    else:
        main().wait_stream(side)
    del x
    z = ones(1000)
    main().wait_stream(side)
    assert (y + z).sum().item() == 3000


# --- the host -------------------------------------------------------------------------------------

HOST_WAITS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "index": (lambda x: x[x.long() - 1], False),
    "to a device": (lambda x: x.to("sim:1"), False),
    "from pinned, non_blocking": (
        lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
        False,
    ),
    "index by mask": (lambda x: x[x > 0], True),
    "equal": (lambda x: torch.equal(x, x), True),
    "item": (lambda x: x.sum().item(), True),
    "to the host": (lambda x: x.to("cpu"), True),
    "from the host": (lambda x: x.copy_(torch.ones(4)), True),
}


@pytest.mark.parametrize("case", HOST_WAITS)
def test_the_host_waits_where_it_does_for_cuda(case: str) -> None:
    x, (work, waits) = ones(), HOST_WAITS[case]
    before = torch.sim.host_waits()
    work(x)
    assert (torch.sim.host_waits() > before) == waits


@pytest.mark.parametrize("value", [torch.arange(4.0), torch.tensor([True, False, True])], ids=str)
def test_a_copy_to_the_host_is_wrong_until_it_was_waited_for(value: Tensor) -> None:
    copied = value.to(SIM).to("cpu", non_blocking=True)
    torch.Stream(SIM).synchronize()  # brings nothing
    assert copied.is_pinned() and not torch.equal(copied, value)
    main().record_event().synchronize()
    assert torch.equal(copied, value)
