"""Programs on several streams do on simulated devices what the documentation of PyTorch and CUDA
says of GPUs: what it calls safe gives the numbers of one stream, and what it calls unsafe fails.

Each test names page and section. "CUDA semantics" is docs.pytorch.org/docs/stable/notes/cuda.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from side_streams import SIM, main
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

on_two_streams = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


def weight() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], device=SIM, requires_grad=True)


def gradient(w: Tensor) -> Tensor:
    assert w.grad is not None
    return w.grad


# --- CUDA semantics, "Stream semantics of backward passes" ----------------------------------------


class Noted(torch.autograd.Function):
    """Doubles, and notes on which streams forward and backward run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: list[Any]) -> Tensor:
        ctx.streams = streams
        streams.append(main())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.streams.append(main())
        return gradients[0] * 2, None


@on_two_streams
def test_a_backward_op_runs_on_the_stream_of_its_forward_op(side: torch.Stream) -> None:
    """Section "Stream semantics of backward passes", first paragraph."""
    w, on_main, on_side = weight(), [], []
    a = Noted.apply(w, on_main)
    side.wait_stream(main())
    with torch.sim.stream(side):
        b = Noted.apply(w, on_side)
    main().wait_stream(side)
    (a * b).sum().backward()
    assert on_main == [main()] * 2 and on_side == [side] * 2
    assert gradient(w).tolist() == [8, 16, 24]


def in_the_same_context(side: torch.Stream, w: Tensor) -> Tensor:
    with torch.sim.stream(side):
        (w * w).sum().backward()
        return gradient(w) * 1


def in_another_context(side: torch.Stream, w: Tensor) -> Tensor:
    with torch.sim.stream(side):
        (w * w).sum().backward()
    return gradient(w) * 1


def in_another_context_that_waits(side: torch.Stream, w: Tensor) -> Tensor:
    with torch.sim.stream(side):
        (w * w).sum().backward()
    main().wait_stream(side)
    return gradient(w) * 1


def with_an_initial_gradient_of_the_same_context(side: torch.Stream, w: Tensor) -> Tensor:
    with torch.sim.stream(side):
        loss = w * w
        loss.backward(gradient=torch.ones_like(loss))
        return gradient(w) * 1


def with_an_initial_gradient_of_another_context(side: torch.Stream, w: Tensor) -> Tensor:
    initial = torch.ones_like(w)
    with torch.sim.stream(side):
        (w * w).backward(gradient=initial)
        return gradient(w) * 1


def with_an_initial_gradient_that_is_waited_for(side: torch.Stream, w: Tensor) -> Tensor:
    initial = torch.ones_like(w)
    side.wait_stream(main())
    with torch.sim.stream(side):
        initial.record_stream(side)
        (w * w).backward(gradient=initial)
        return gradient(w) * 1


def by_autograd_grad_in_another_context(side: torch.Stream, w: Tensor) -> Tensor:
    with torch.sim.stream(side):
        (found,) = torch.autograd.grad((w * w).sum(), w)
    return found * 1


SAFE = [
    in_the_same_context,
    in_another_context_that_waits,
    with_an_initial_gradient_of_the_same_context,
    with_an_initial_gradient_that_is_waited_for,
]
UNSAFE = [
    in_another_context,  # also "BC note: Using grads on the default stream"
    with_an_initial_gradient_of_another_context,
    by_autograd_grad_in_another_context,
]


@pytest.mark.parametrize("use", SAFE, ids=lambda use: use.__name__)
def test_gradients_that_are_used_safely(use: Any, side: torch.Stream) -> None:
    """The examples of section "Stream semantics of backward passes" that it calls safe."""
    w = weight()
    side.wait_stream(main())
    found = use(side, w)
    side.synchronize()
    assert found.tolist() == [2, 4, 6]


@pytest.mark.parametrize("use", UNSAFE, ids=lambda use: use.__name__)
def test_gradients_that_are_used_unsafely(use: Any, side: torch.Stream) -> None:
    """The examples of the same section that it calls unsafe."""
    w = weight()
    side.wait_stream(main())
    with pytest.raises(torch.sim.RaceError):
        use(side, w)


@on_two_streams
@pytest.mark.parametrize("caller_is_on_main", [True, False])
def test_the_callers_current_stream_waits_for_all_that_a_backward_used(
    caller_is_on_main: bool, side: torch.Stream
) -> None:
    """Same section: internal syncs, also where the forward was on several streams; and the note
    below it: the caller's current stream is meant, the default one has no part in it.
    """
    third, w, v = torch.Stream(SIM), weight(), weight()
    side.wait_stream(main())
    third.wait_stream(main())
    with torch.sim.stream(side):
        a = w * 2
    with torch.sim.stream(third):
        b = v * 3
    caller = main() if caller_is_on_main else torch.Stream(SIM)
    caller.wait_stream(side)
    caller.wait_stream(third)
    with torch.sim.stream(caller):
        (a + b).sum().backward()
        assert (gradient(w) + gradient(v)).tolist() == [5] * 3
        w.grad = v.grad = None
        (w * 2 + v * 3).sum().backward()
    if not caller_is_on_main:
        with pytest.raises(torch.sim.RaceError):
            gradient(w) + gradient(v)


def test_a_backward_through_two_devices_is_in_order() -> None:
    """CUDA semantics, "Asynchronous execution": PyTorch synchronises copies between devices."""
    w = weight()
    away = (w * 2).to("sim:1") * 3
    (away.to(SIM) + away.to("sim:2").to(SIM)).sum().backward()
    assert gradient(w).tolist() == [12] * 3


# --- CUDA semantics, "CUDA streams"; torch.cuda.Stream; torch.cuda.Event --------------------------


def test_the_examples_of_the_section_on_streams(side: torch.Stream) -> None:
    """Section "CUDA streams": incorrect; fixed; and still required where nothing is read."""
    with pytest.raises(torch.sim.RaceError):
        a = torch.empty(100, 100, device=SIM).normal_(0.0, 1.0)
        with torch.sim.stream(side):
            torch.sum(a)
    a = torch.empty(100, 100, device=SIM).normal_(0.0, 1.0)
    expected = a.sum().item()
    a.mul_(1)
    side.wait_stream(torch.sim.default_stream(SIM))
    with torch.sim.stream(side):
        b = torch.sum(a)
    a.record_stream(side)
    del a
    torch.empty(100, 100, device=SIM).normal_(0.0, 1.0)  # is not the memory of a
    side.synchronize()
    assert b.item() == expected
    torch.ones(100, 100, device=SIM) + 1  # whose memory c may get
    c = torch.empty(100, 100, device=SIM)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError, match="allocated"):
        c.normal_(0.0, 1.0)


def test_an_event_stands_for_what_was_issued_before_it_was_recorded(side: torch.Stream) -> None:
    """torch.cuda.Stream.wait_event: only future work of the stream waits, for the event as it is.

    CUDA Runtime API, "Event Management", cudaEventRecord: a later record does not change what was
    waited for before.
    """
    x, event = torch.ones(4, device=SIM), torch.Event(SIM)
    event.record()
    side.wait_event(event)
    x.add_(1)
    event.record()
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError):
        x + 1
    side.wait_event(event)
    with torch.sim.stream(side):
        assert (x + 1).tolist() == [3] * 4


def test_an_event_that_was_never_recorded_is_no_wait(side: torch.Stream) -> None:
    """CUDA Runtime API, "Event Management", cudaEventQuery: it counts as complete."""
    x, event = torch.ones(4, device=SIM), torch.Event(SIM)
    assert event.query()
    event.synchronize()
    side.wait_event(event)
    with torch.sim.stream(side), pytest.raises(torch.sim.RaceError):
        x + 1


def test_wait_stream_does_not_let_the_host_wait(side: torch.Stream) -> None:
    """torch.cuda.Stream.wait_stream, note: it returns at once, only future work is affected."""
    before = torch.sim.host_waits()
    there = torch.ones(4, device=SIM).to("cpu", non_blocking=True)
    side.wait_stream(main())
    assert torch.sim.host_waits() == before and there.isnan().all()
    side.synchronize()  # which has waited
    assert there.tolist() == [1] * 4


# --- torch.Tensor.record_stream -------------------------------------------------------------------


def filled_on(side: torch.Stream) -> Tensor:
    """A tensor of another stream, as a function with a stream of its own returns it."""
    with torch.sim.stream(side):
        return torch.ones(1000, device=SIM)


def again_on(side: torch.Stream) -> None:
    with torch.sim.stream(side):
        torch.zeros(1000, device=SIM)


def test_a_tensor_of_a_side_stream_is_let_go_safely_by_recording(side: torch.Stream) -> None:
    """Page torch.Tensor.record_stream, warning: what it is for."""
    x = filled_on(side)
    main().wait_stream(side)
    x.record_stream(main())
    y = x + 1
    del x
    again_on(side)
    assert y.sum().item() == 2000


def test_a_tensor_of_a_side_stream_is_let_go_unsafely(side: torch.Stream) -> None:
    """Same page, note: the allocator knows only the stream on which memory was allocated."""
    x = filled_on(side)
    main().wait_stream(side)
    kept = x + 1
    del x
    with pytest.raises(torch.sim.RaceError, match=r"handed out again. Call `tensor.record_stream"):
        again_on(side)
    del kept


def test_a_tensor_of_a_side_stream_is_let_go_safely_by_an_event(side: torch.Stream) -> None:
    """Same page, warning: events instead, where one manages the lifetime oneself."""
    x = filled_on(side)
    main().wait_stream(side)
    y = x + 1
    is_used = main().record_event()
    side.wait_event(is_used)
    del x
    again_on(side)
    assert y.sum().item() == 2000


def test_recording_a_view_or_early_counts_for_the_memory(side: torch.Stream) -> None:
    """Same page: all work that is queued when the tensor is let go counts."""
    x = filled_on(side)
    x[10:].record_stream(main())
    main().wait_stream(side)
    y = x + 1
    del x
    again_on(side)
    assert y.sum().item() == 2000


# --- CUDA semantics, "Use pinned memory buffers"; torch.utils.data, "Memory Pinning" --------------

DATA = torch.arange(24.0).view(12, 2)


def batches() -> Iterator[Tensor]:
    for (batch,) in DataLoader(TensorDataset(DATA), batch_size=4, pin_memory=True):
        assert batch.is_pinned()
        yield batch


def prefetched(copies: torch.Stream, *, waits: bool = True, records: bool = True) -> float:
    """The sum of all data, which a stream of its own copies ahead."""
    total, upcoming = torch.zeros((), device=SIM), batches()

    def fetch() -> Tensor | None:
        with torch.sim.stream(copies):
            batch = next(upcoming, None)
            return None if batch is None else batch.to(SIM, non_blocking=True)

    ready = fetch()
    while ready is not None:
        if waits:
            main().wait_stream(copies)
        if records:
            ready.record_stream(main())
        total += ready.sum()
        ready = None
        ready = fetch()
    return total.item()


def test_batches_are_copied_ahead(side: torch.Stream) -> None:
    assert prefetched(side) == DATA.sum().item()


def test_a_batch_that_is_used_before_it_is_copied(side: torch.Stream) -> None:
    """Section "CUDA streams": with other streams than the default one, to wait is one's own."""
    with pytest.raises(torch.sim.RaceError, match="nothing orders the two"):
        prefetched(side, waits=False)


def test_a_batch_whose_memory_is_used_again_too_early(side: torch.Stream) -> None:
    """Page torch.Tensor.record_stream, note."""
    with pytest.raises(torch.sim.RaceError, match="handed out again"):
        prefetched(side, records=False)


def test_a_pinned_buffer_that_is_filled_again_too_early() -> None:
    """Tutorial "A guide on good usage of non_blocking and pin_memory()": what is pinned and changed
    after a copy that does not block may arrive changed.
    """
    buffer = torch.empty(4, 2).pin_memory()
    with pytest.raises(torch.sim.RaceError, match="pinned source"):
        for batch in DATA.split(4):
            buffer.copy_(batch)
            buffer.to(SIM, non_blocking=True).sum().item()
            buffer.to(SIM, non_blocking=True)


def test_pinned_buffers_in_turn() -> None:
    """Same: each is filled again when its copy is through."""
    buffers = [torch.empty(4, 2).pin_memory() for _ in range(2)]
    copied: list[torch.Event | None] = [None, None]
    arrived = []
    for i, batch in enumerate(DATA.split(4)):
        event = copied[i % 2]
        if event is not None:
            event.synchronize()
        buffers[i % 2].copy_(batch)
        arrived.append(buffers[i % 2].to(SIM, non_blocking=True))
        copied[i % 2] = main().record_event()
    assert torch.equal(torch.cat(arrived).cpu(), DATA)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_the_host_reads_has_to_be_waited_for(pinned: bool) -> None:
    """Same tutorial, on copies to the host: only after a synchronisation may it be read; and CUDA
    Runtime API, "API synchronization behavior": to pageable memory it might be synchronous.
    """
    target = torch.empty(4, pin_memory=pinned)
    target.copy_(torch.ones(4, device=SIM), non_blocking=True)
    assert target.isnan().all()
    torch.sim.synchronize()
    assert target.tolist() == [1] * 4


def test_pageable_memory_may_change_when_a_copy_to_a_device_returns() -> None:
    """Same page: pageable memory is staged first."""
    source = torch.ones(4)
    there = source.to(SIM, non_blocking=True)
    source.zero_()
    assert there.tolist() == [1] * 4


# --- nets and optimizers --------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM of packed sequences of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 4), lengths, batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        head: Tensor = self.head(output)
        return head


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 4)),
        nn.Conv1d(3, 4, 2),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.ConvTranspose1d(4, 2, 2),
        nn.MaxPool1d(2),
    )


NETS: dict[str, Callable[[], nn.Module]] = {"lstm": Recurrent, "conv": convolutional}
ADAMS: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]


def trained(net: str, device: str, adam: dict[str, Any], backward: Any, step: Any) -> list[Tensor]:
    """Three steps; backward and optimizer each in a context."""
    torch.manual_seed(0)
    module = NETS[net]().to(device)
    # Batch norm takes a bias away, whose gradient is rounding. A small eps would make steps of it,
    # and autograd's threads may have other numbers of cores.
    adam = {"lr": 0.1, "eps": 0.01, "amsgrad": True, **adam}
    optimizer = torch.optim.AdamW(module.parameters(), **adam)
    x = (torch.arange(24.0).view(2, 12) / 12 - 1).to(device)
    for _ in range(3):
        with backward:
            optimizer.zero_grad()
            module(x).square().mean().backward()
        with step:
            optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


class On:
    """A context in which a stream is current. It waits for another one first, if it is told to."""

    def __init__(self, stream: torch.Stream, waits_for: torch.Stream | None = None) -> None:
        self._stream, self._waits_for = stream, waits_for

    def __enter__(self) -> None:
        if self._waits_for is not None:
            self._stream.wait_stream(self._waits_for)
        self._context = torch.sim.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


@pytest.mark.parametrize("adam", ADAMS, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_backward_and_optimizer_on_two_streams_that_wait_for_each_other(
    net: str, adam: dict[str, Any], side: torch.Stream
) -> None:
    """CUDA semantics, "CUDA streams", for the kernels of LSTMs, convolutions and AdamW."""
    other = torch.Stream(SIM)
    side.wait_stream(main())
    found = trained(net, SIM, adam, On(side, other), On(other, side))
    torch.sim.synchronize(SIM)
    nowhere = On(main())
    for a, b in zip(found, trained(net, "cpu", adam, nowhere, nowhere), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("adam", ADAMS, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_an_optimizer_that_does_not_wait_for_the_backward(
    net: str, adam: dict[str, Any], side: torch.Stream
) -> None:
    """Same."""
    with pytest.raises(torch.sim.RaceError):
        trained(net, SIM, adam, On(side, main()), On(torch.Stream(SIM)))


@pytest.mark.parametrize("adam", ADAMS, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_a_backward_that_does_not_wait_for_the_optimizer(
    net: str, adam: dict[str, Any], side: torch.Stream
) -> None:
    """Same."""
    with pytest.raises(torch.sim.RaceError):
        trained(net, SIM, adam, On(side), On(torch.Stream(SIM), side))


# --- AMP: notes/amp_examples.html -----------------------------------------------------------------


def mixed(stream: torch.Stream, steps: Callable[..., None], fused: bool) -> tuple[float, Tensor]:
    """Some steps of a net on two devices; the scale after them, and a weight.

    On one device for a fused optimizer: to its kernels, infinities on two are none.
    """
    torch.manual_seed(0)
    there = SIM if fused else "sim:1"
    first, second = nn.Linear(4, 4).to(SIM), nn.Linear(4, 1).to(there)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("sim", init_scale=2.0**10, growth_interval=2)
    x = torch.arange(12.0).view(3, 4).to(SIM) / 12

    def loss() -> Tensor:
        with torch.autocast("sim", dtype=torch.float16):
            output: Tensor = second(first(x).to(there))
        return output.float().square().mean().to(SIM)

    stream.wait_stream(main())
    with torch.sim.stream(stream):
        steps(loss, optimizer, scaler, parameters)
    main().wait_stream(stream)
    return scaler.get_scale(), first.weight.detach().cpu()


def typical(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()


def clipped(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()


def accumulated(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
    for i in range(4):
        scaler.scale(loss() / 2).backward()
        if i % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def penalised(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
    found = torch.autograd.grad(scaler.scale(loss()), parameters, create_graph=True)
    norms = [(g / scaler.get_scale()).square().sum().to(SIM) for g in found]
    scaler.scale(loss() + torch.stack(norms).sum().sqrt()).backward()
    scaler.step(optimizer)
    scaler.update()


def overflowing(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
    scaler.scale(loss() * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()


SECTIONS = [typical, clipped, accumulated, penalised, overflowing]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
@pytest.mark.parametrize("fused", [False, True])
def test_mixed_precision_on_a_side_stream(section: Any, fused: bool, side: torch.Stream) -> None:
    """Page "Automatic Mixed Precision examples": typical training, clipping, accumulation, penalty;
    and class GradScaler: a step with infinities is left out and halves the scale.
    """
    if fused and section is clipped:
        pytest.skip("clipping takes the unscaled gradients from the optimizer")
    scale, found = mixed(side, section, fused)
    expected_scale, expected = mixed(main(), section, fused)
    assert (
        scale == expected_scale == {overflowing: 2.0**9, penalised: 2.0**10}.get(section, 2.0**11)
    )
    assert torch.equal(found, expected) and found.isfinite().all()


def test_a_scaler_that_steps_before_the_backward_is_through(side: torch.Stream) -> None:
    """CUDA semantics, "Stream semantics of backward passes", for a scaler's own kernels."""

    def apart(loss: Any, optimizer: Any, scaler: Any, parameters: Any) -> None:
        scaler.scale(loss()).backward()
        with torch.sim.stream(torch.sim.default_stream(SIM)):
            scaler.step(optimizer)

    with pytest.raises(torch.sim.RaceError):
        mixed(side, apart, fused=False)
