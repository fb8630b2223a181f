"""Which work on two streams is a race and which is not: nothing of the first kind passes, nothing
of the second raises.
"""

from __future__ import annotations

import copy
import io
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.sim_streams import SIM, devices_at_work, main
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

# --- parts of one memory ----

PARTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rows": (lambda x: x[:4], lambda x: x[4:]),
    "columns": (lambda x: x[:, :3], lambda x: x[:, 3:]),
    "blocks": (lambda x: x[2:, 1:3], lambda x: x[:6, 3:5]),
    "a column and a place": (lambda x: x[:, 0], lambda x: x[3, 2]),
    "every other row": (lambda x: x[::2], lambda x: x[1::2]),
    "every other element": (lambda x: x.view(-1)[::2], lambda x: x.view(-1)[1::2]),
    "channels": (lambda x: x.view(2, 4, 6)[:, :1], lambda x: x.view(2, 4, 6)[:, 1:]),
    "transposed": (lambda x: x.t()[:2], lambda x: x.t()[2:]),
    "real and imaginary": (
        lambda x: torch.view_as_complex(x.view(8, 3, 2)).real,
        lambda x: torch.view_as_complex(x.view(8, 3, 2)).imag,
    ),
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_that_share_nothing_may_be_written_at_the_same_time(
    parts: str, side: torch.Stream
) -> None:
    x = torch.zeros(8, 6, device=SIM)
    a, b = (part(x) for part in PARTS[parts])
    side.wait_stream(main())
    with torch.sim.stream(side):
        a.add_(1)
    b.add_(1)
    main().wait_stream(side)
    assert x.sum().item() == a.numel() + b.numel()


places = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 3))


@given(places, places, places, places)
@example((0, 3, 1), (0, 6, 1), (2, 4, 1), (0, 6, 1))
@example((0, 6, 1), (0, 3, 2), (0, 6, 1), (1, 3, 2))
def test_parts_that_share_an_element_may_not(
    rows: Any, columns: Any, other_rows: Any, other_columns: Any
) -> None:
    x = torch.zeros(6, 6, device=SIM)
    where = torch.arange(36).view(6, 6)

    def part(rows: Any, columns: Any, of: Tensor) -> Tensor:
        (r, n, step), (c, m, stride) = rows, columns
        return of[r : r + n : step, c : c + m : stride]

    shared = set(part(rows, columns, where).flatten().tolist())
    shared &= set(part(other_rows, other_columns, where).flatten().tolist())
    side = torch.Stream(SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        part(rows, columns, x).add_(1)
    raised = False
    try:
        part(other_rows, other_columns, x).add_(1)
    except torch.sim.RaceError:
        raised = True
    finally:
        main().wait_stream(side)
    assert raised or not shared


# --- what writes ----


def batch_norm(x: Tensor, i: Tensor, rows: Tensor) -> Any:
    """Its schema does not say that it writes the running statistics."""
    return F.batch_norm(rows, x[0], x[1], training=True)


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "scatter_": lambda x, i, rows: x.scatter_(0, i.view(1, 2), 1.0),
    "index_put_": lambda x, i, rows: x.index_put_((i,), rows),
    "x[i] = ...": lambda x, i, rows: x.__setitem__(i, rows),
    "x[mask] = ...": lambda x, i, rows: x.__setitem__(torch.ones_like(x).bool(), 1.0),
    "index_add_": lambda x, i, rows: x.index_add_(0, i, rows),
    "index_copy_": lambda x, i, rows: x.index_copy_(0, i, rows),
    "index_fill_": lambda x, i, rows: x.index_fill_(0, i, 1),
    "masked_fill_": lambda x, i, rows: x.masked_fill_(torch.ones_like(x).bool(), 1),
    "put_": lambda x, i, rows: x.put_(i, rows[0, :2]),
    "foreach add": lambda x, i, rows: torch._foreach_add_([x[0], x[1]], 1),
    "foreach copy": lambda x, i, rows: torch._foreach_copy_([x[:2]], [rows]),
    "out of cat": lambda x, i, rows: torch.cat([rows, rows], out=x),
    "out of sort": lambda x, i, rows: torch.sort(rows, out=(x[:2], torch.empty_like(rows).long())),
    "normal_": lambda x, i, rows: x.normal_(),
    "bernoulli_": lambda x, i, rows: x.bernoulli_(0.5),
    "dropout in place": lambda x, i, rows: F.dropout(x, inplace=True),
    "relu_": lambda x, i, rows: x.relu_(),
    "copy_": lambda x, i, rows: x.copy_(rows[0]),
    "from pinned memory": lambda x, i, rows: x.copy_(PINNED, non_blocking=True),
    "from another device": lambda x, i, rows: x.copy_(rows.to("sim:1")[0], non_blocking=True),
    "storage": lambda x, i, rows: x.untyped_storage().fill_(0),
    "embedding's renorm": lambda x, i, rows: F.embedding(i, x, max_norm=0.1),
    "batch norm's statistics": batch_norm,
}
PINNED = torch.ones(4, 4)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_read_of_what_another_stream_writes_is_a_race(writer: str, side: torch.Stream) -> None:
    global PINNED
    PINNED = PINNED.pin_memory()
    x, rows = torch.ones(4, 4, device=SIM), torch.ones(2, 4, device=SIM)
    i = torch.tensor([0, 1], device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        kept = WRITERS[writer](x, i, rows)
    with pytest.raises(torch.sim.RaceError):
        x.sum()
    main().wait_stream(side)
    x.sum()
    del kept


# --- what reads ----

READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, i: torch.cat([x, x]),
    "index": lambda x, i: x[i],
    "foreach": lambda x, i: torch._foreach_add([x], 1),
    "to another device": lambda x, i: x.to("sim:1"),
    "to the host": lambda x, i: x.to("cpu", non_blocking=True),
    "clone": lambda x, i: x.clone(),
    "contiguous": lambda x, i: x.t().contiguous(),
    "other dtype": lambda x, i: x.double(),
    "einsum": lambda x, i: torch.einsum("ij,jk", x, x),
    "embedding": lambda x, i: F.embedding(i, x),
    "batch norm": lambda x, i: F.batch_norm(torch.ones(2, 4, device=SIM), x[0], x[1]),
    "a part": lambda x, i: x[1:3, 1:3] + 1,
    "saved for backward": lambda x, i: x.clone().requires_grad_().mul(x),
}


def read_on(side: torch.Stream, reader: str) -> tuple[Tensor, Callable[[], Any], Any]:
    """What a stream has read, how to read it again, and what must live until it is through."""
    x, i = torch.ones(4, 4, device=SIM), torch.tensor([0, 1], device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        kept = READERS[reader](x, i)
    return x, lambda: READERS[reader](x, i), kept


@pytest.mark.parametrize("reader", READERS)
def test_a_write_to_what_another_stream_reads_is_a_race(reader: str, side: torch.Stream) -> None:
    x, _, kept = read_on(side, reader)
    with pytest.raises(torch.sim.RaceError):
        x.fill_(1)
    main().wait_stream(side)
    x.fill_(1)
    del kept


@pytest.mark.parametrize("reader", READERS)
def test_two_streams_may_read_at_the_same_time(reader: str, side: torch.Stream) -> None:
    _, read_again, kept = read_on(side, reader)
    read_again()
    main().wait_stream(side)
    del kept


def test_a_copy_waits_for_the_targets_current_stream_only() -> None:
    y, reader = torch.ones(4, device="sim:1"), torch.Stream("sim:1")
    reader.wait_stream(torch.sim.current_stream("sim:1"))
    with torch.sim.stream(reader):
        kept = y + 1
    with pytest.raises(torch.sim.RaceError, match="a copy"):
        y.copy_(torch.ones(4, device=SIM))
    torch.sim.synchronize(1)
    del kept


def test_a_copy_runs_on_the_sources_current_stream(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        y = x.to("sim:1")
    y.add_(1)
    with pytest.raises(torch.sim.RaceError, match="a copy"):
        x.add_(1)


# --- no work of the device ----


def test_views_are_no_work(side: torch.Stream) -> None:
    x = torch.ones(4, 4, device=SIM)
    with torch.sim.stream(side):  # which waits for nothing
        x.t()[1:].unsqueeze(0).expand(2, 3, 4).as_strided((2, 2), (1, 1)).detach().squeeze()
        x.view(torch.int32), x.reshape(2, 8), x.unbind(), x.split(2), x.chunk(2), x.diagonal()
        torch.unsafe_split(x, 2), x.unfold(0, 2, 1), x.movedim(0, 1), x.flatten(), x.data
        x.is_set_to(x), x.data_ptr(), x.is_contiguous(), x.new_empty(3), torch.empty_like(x)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.is_set_to(x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x[x.long() - 1],
        lambda x: x.masked_fill_(x > 0, 1),
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: torch._assert_async(x.all()),
        lambda x: x.to("sim:1"),
        lambda x: x.copy_(torch.ones(4)[:1].pin_memory(), non_blocking=True),
    ],
    ids=["is_set_to", "attention", "index", "masked_fill_", "fill by mask", "assert", "to a device",
         "from pinned memory"],
)  # fmt: skip
def test_the_host_does_not_wait(ask: Callable[[Tensor], Any]) -> None:
    """What the host has waited for is in order with all that follows: a race less is seen."""
    x = torch.ones(1, 2, 3, 4, device=SIM) if "attention" in str(ask) else torch.ones(1, device=SIM)
    before = torch.sim.host_waits()
    ask(x.view(1, 1, 1, 1) if x.numel() == 1 else x)
    assert torch.sim.host_waits() == before


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, torch.ones(4, device=SIM)),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.multinomial(2),
        lambda x: torch.equal(x, x),
        lambda x: x.sum().item(),
        lambda x: x.to("cpu"),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x.copy_(torch.ones(4).pin_memory()),
    ],
    ids=["index by mask", "put by mask", "index on the host", "nonzero", "masked_select", "unique",
         "multinomial", "equal", "item", "to the host", "from the host", "from pinned memory"],
)  # fmt: skip
def test_the_host_waits(ask: Callable[[Tensor], Any]) -> None:
    x = torch.ones(4, device=SIM)
    before = torch.sim.host_waits()
    ask(x)
    assert torch.sim.host_waits() > before


@devices_at_work()
def test_nobody_may_rely_on_a_device_to_be_through_at_once(side: torch.Stream) -> None:
    """A question that is answered by no orders nothing; one that is asked again ends."""
    x = torch.ones(4, device=SIM)
    event = main().record_event()
    assert not event.query() and not main().query()
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError):
        x + 1
    assert event.query()
    with torch.sim.stream(side):
        x + 1
    assert main().query()  # what the host has waited for needs no second question
    torch.ones(4, device=SIM)
    assert not main().query() and main().query() and not side.query() and side.query()
    x.add_(1)


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_an_op_that_fails_has_done_nothing(out_of_memory: bool, side: torch.Stream) -> None:
    x, other = torch.ones(1000, device=SIM), torch.ones(3, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        if out_of_memory:
            torch.sim.set_memory_limit(0, torch.sim.memory_allocated(0) + 10)
            with pytest.raises(torch.OutOfMemoryError):
                x + 1
        else:
            with pytest.raises(RuntimeError, match="size"):
                x + other
            with pytest.raises(RuntimeError, match="size"):
                x.add_(other)
    x.add_(1)


def test_an_op_that_races_has_done_nothing(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError):
        x.add_(1)
    assert x.add_(1).tolist() == [2] * 4


# --- host memory that streams go on with ----


def test_a_stream_reads_what_it_has_copied_to_pinned_memory() -> None:
    buffer, arrived = torch.empty(4).pin_memory(), []
    for value in range(3):
        buffer.copy_(torch.full((4,), float(value), device=SIM), non_blocking=True)
        arrived.append(buffer.to(SIM, non_blocking=True))
        assert buffer.isnan().all()  # for the host
    torch.sim.synchronize(SIM)
    assert [tensor.tolist() for tensor in arrived] == [[value] * 4 for value in (0.0, 1.0, 2.0)]
    assert buffer.tolist() == [2] * 4


def test_a_device_reads_what_another_one_has_copied_to_pinned_memory() -> None:
    buffer = torch.ones(4, device=SIM).to("cpu", non_blocking=True)
    with pytest.raises(torch.sim.RaceError, match="a copy"):
        buffer.to("sim:1", non_blocking=True)
    torch.sim.current_stream("sim:1").wait_stream(main())
    assert buffer.to("sim:1", non_blocking=True).tolist() == [1] * 4


def test_pinned_memory_is_overwritten_when_its_stream_has_read_it() -> None:
    buffer = torch.ones(4).pin_memory()
    there = buffer.to(SIM, non_blocking=True)
    buffer.copy_(torch.zeros(4, device=SIM), non_blocking=True)
    torch.sim.synchronize(SIM)
    assert there.tolist() == [1] * 4 and buffer.tolist() == [0] * 4


def test_pinned_memory_is_not_overwritten_while_another_stream_reads_it(side: torch.Stream) -> None:
    buffer, zeros = torch.ones(4).pin_memory(), torch.zeros(4, device=SIM)
    with torch.sim.stream(side):
        kept = buffer.to(SIM, non_blocking=True)
    with pytest.raises(torch.sim.RaceError, match="a copy"):
        buffer.copy_(zeros, non_blocking=True)
    del kept


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_that_blocks_comes_after_those_that_do_not(pinned: bool) -> None:
    target = torch.empty(4, pin_memory=pinned)
    target.copy_(torch.ones(4, device=SIM), non_blocking=True)
    target.copy_(torch.zeros(4, device=SIM))
    assert target.tolist() == [0] * 4
    torch.sim.synchronize(SIM)
    assert target.tolist() == [0] * 4


def test_the_host_changes_a_source_between_two_streams_unnoticed_by_neither() -> None:
    buffer = torch.ones(4).pin_memory()
    buffer.to(SIM, non_blocking=True)
    buffer[0] = 2
    with pytest.raises(torch.sim.RaceError, match="was changed"):
        buffer.copy_(torch.zeros(4, device=SIM), non_blocking=True)


def test_pinned_memory_that_is_let_go_is_read_in_time() -> None:
    """CUDA's allocator of pinned memory keeps it until the copy is through."""
    there = torch.ones(4).pin_memory().to(SIM, non_blocking=True)
    others = [torch.zeros(4).pin_memory() for _ in range(5)]
    torch.sim.synchronize(SIM)
    assert there.tolist() == [1] * 4 and len(others) == 5


def test_threads_have_pinned_memory_under_way_at_the_same_time() -> None:
    """The host is one for all: what one has waited for, another may bring."""
    failed: list[BaseException] = []

    def work(k: int) -> None:
        device, own = f"sim:{k}", torch.Stream(f"sim:{k}")
        buffer = torch.empty(64).pin_memory()
        try:
            with torch.sim.stream(own):
                for i in range(300):
                    buffer.copy_(torch.full((64,), float(i), device=device), non_blocking=True)
                    there = buffer.to(device, non_blocking=True)
                    own.record_event().synchronize()
                    assert buffer.tolist() == [i] * 64
                    assert there.sum().item() == 64 * i
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


# --- what programs do ----


def test_memory_that_grows_and_shrinks() -> None:
    x = torch.ones(4, device=SIM)
    x.resize_(100).fill_(1).resize_(2)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(400)
    out = torch.empty(0, device=SIM)
    torch.add(torch.ones(4, device=SIM), 1, out=out)
    assert torch.cat([out, out], out=out[:0].clone()).tolist() == [2] * 8


def test_memory_that_grows_on_another_stream_is_copied_in_order(side: torch.Stream) -> None:
    x = torch.ones(4, device=SIM)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError, match="a resize"):
        x.resize_(100)
    side.wait_stream(main())
    with torch.sim.stream(side):
        x.resize_(100)
    with pytest.raises(torch.sim.RaceError):
        x.sum()


def test_random_numbers_on_two_streams(side: torch.Stream) -> None:
    """A generator counts on the host what it has given out: no two streams get the same."""
    torch.manual_seed(0)
    side.wait_stream(main())
    with torch.sim.stream(side):
        a = torch.randn(4, device=SIM)
    b = torch.randn(4, device=SIM)
    torch.sim.set_rng_state(torch.sim.get_rng_state(0), 0)
    main().wait_stream(side)
    assert not torch.equal(a, b)


def test_lists_of_tensors_on_a_side_stream(side: torch.Stream) -> None:
    xs, ys = ([torch.ones(3, device=SIM) for _ in range(5)] for _ in range(2))
    side.wait_stream(main())
    with torch.sim.stream(side):
        torch._foreach_add_(xs, ys)
        norms = torch._foreach_norm(xs)
        torch._foreach_lerp_(xs, ys, 0.5)
        torch.nn.utils.clip_grad_norm_(torch.nn.ParameterList(xs), 1.0)
    main().wait_stream(side)
    assert len(norms) == 5 and xs[0].tolist() == [1.5] * 3


def test_copies_of_modules_and_files() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(SIM)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    copies = [copy.deepcopy(net).state_dict(), pickle.loads(pickle.dumps(net)).state_dict()]
    for state in (*copies, torch.load(file), torch.load(io.BytesIO(file.getvalue()), "sim:1")):
        assert torch.equal(state["0.weight"].cpu(), net[0].weight.cpu())


def test_what_is_copied_by_deepcopy_has_to_be_there(side: torch.Stream) -> None:
    net = nn.Linear(3, 3).to(SIM)
    nn.init.ones_(net.weight)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError):
        copy.deepcopy(net)


def test_printing_waits() -> None:
    x = torch.arange(40, device=SIM).view(5, 8)
    assert "39" in str(x) and "39" in repr(nn.Parameter(x.float())) and f"{x[0, 1]:.1f}" == "1.0"


def test_threads_hand_over_what_the_host_has_waited_for() -> None:
    asked: queue.Queue[Tensor | None] = queue.Queue()
    answers: queue.Queue[Tensor] = queue.Queue()

    def work() -> None:
        own = torch.Stream(SIM)
        with torch.sim.stream(own):
            while (x := asked.get()) is not None:
                y = x + 1
                own.synchronize()
                answers.put(y)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        x = torch.ones(4, device=SIM)
        main().synchronize()
        asked.put(x)
        assert (answers.get(timeout=60) + 1).tolist() == [3] * 4
    asked.put(None)
    thread.join()


def test_threads_hand_over_with_events() -> None:
    asked: queue.Queue[tuple[Tensor, torch.Event] | None] = queue.Queue()
    answers: queue.Queue[tuple[Tensor, torch.Event]] = queue.Queue()

    def work() -> None:
        own = torch.Stream(SIM)
        with torch.sim.stream(own):
            while (task := asked.get()) is not None:
                x, is_there = task
                own.wait_event(is_there)
                x.record_stream(own)
                answers.put((x + 1, own.record_event()))
                del x, task

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        x = torch.ones(4, device=SIM)
        asked.put((x, main().record_event()))
        del x
        y, is_there = answers.get(timeout=60)
        main().wait_event(is_there)
        y.record_stream(main())
        assert (y + 1).tolist() == [3] * 4
    asked.put(None)
    thread.join()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_computed_again_on_their_stream(
    reentrant: bool, side: torch.Stream
) -> None:
    side.wait_stream(main())
    with torch.sim.stream(side):
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).to(SIM)
        x = torch.ones(2, 4, device=SIM, requires_grad=True)
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all().item()


def test_a_compiled_module_runs_on_a_side_stream(side: torch.Stream) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(SIM)
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.ones(2, 4, device=SIM)
    side.wait_stream(main())
    with torch.sim.stream(side):
        compiled(x).sum().backward()
        gradient = net[0].weight.grad
        assert gradient is not None
    with pytest.raises(torch.sim.RaceError):
        gradient.sum()
    main().wait_stream(side)
    assert gradient.isfinite().all().item()


def test_packed_sequences_of_an_lstm() -> None:
    lstm = nn.LSTM(4, 5, batch_first=True).to(SIM)
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.ones(2, 3, 4, device=SIM), torch.tensor([3, 2]), batch_first=True
    )
    output, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
    output.sum().backward()
    assert lstm.weight_ih_l0.grad is not None


@pytest.mark.slow
def test_loaders_with_workers_and_pinned_memory() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    batches = DataLoader(data, batch_size=2, num_workers=2, pin_memory=True)
    sums = [batch.to(SIM, non_blocking=True).sum() for (batch,) in batches]
    assert [total.item() for total in sums] == [6, 22, 38]
