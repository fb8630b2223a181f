"""Snapshots of buffers: what a step does to them is taken back, whatever they are."""

from collections.abc import Callable

import pytest
import torch
from support import oracle
from torch import Tensor

from lightning_dp.parallel.reduce import Snapshot

pytestmark = pytest.mark.usefixtures("on")


def here() -> str:
    """The device of the buffers."""
    return str(oracle.devices_of(1)[0])


def kinds_of_buffers(device: str) -> dict[str, Tensor]:
    """Two of the most usual kinds, and one of each that is unusual."""
    rows = torch.arange(6.0, device=device).view(2, 3)
    images = torch.arange(24.0, device=device).view(1, 2, 3, 4)
    return {
        "running_mean": torch.tensor([1.0, float("nan")], device=device),
        "running_var": torch.ones(3, device=device),
        "num_batches_tracked": torch.tensor(3, device=device),
        "counts": torch.tensor([1, 2], device=device),
        "mask": torch.tensor([True, False], device=device),
        "empty": torch.empty(0, 2, device=device),
        "half": torch.ones(2, dtype=torch.bfloat16, device=device),
        "columns": rows.t(),
        "channels_last": images.contiguous(memory_format=torch.channels_last),
        "expanded": torch.zeros(1, device=device).expand(4),
        "trained": torch.ones(2, device=device, requires_grad=True),
    }


def write(buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        if not (buffer.dim() == 1 and buffer.stride() == (0,)):
            buffer.data.fill_(1).add_(buffer.dtype is not torch.bool)


def give_other_memory(buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        buffer.data = torch.zeros_like(buffer)


def give_other_shapes(buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        buffer.data = torch.zeros(5, dtype=buffer.dtype, device=buffer.device)


def resize(buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name in ("running_mean", "counts", "empty"):
            buffers[name].resize_(7).fill_(3)


def nothing(buffers: dict[str, Tensor]) -> None:
    return None


@pytest.mark.parametrize("change", [write, give_other_memory, give_other_shapes, resize, nothing])
def test_buffers_get_their_values_back(change: Callable[[dict[str, Tensor]], None]) -> None:
    buffers, snapshot = kinds_of_buffers(here()), Snapshot()
    present = [None, *buffers.values()]
    for _ in range(2):  # again, with what is known of them
        snapshot.take(present)
        before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        versions = [buffer._version for buffer in buffers.values()]
        change(buffers)
        written = [buffer._version for buffer in buffers.values()]
        snapshot.restore()
        for name, value in before.items():
            torch.testing.assert_close(
                buffers[name].detach(), value, rtol=0, atol=0, equal_nan=True, msg=name
            )
        assert [buffer._version for buffer in buffers.values()] == written
        assert change is resize or written == versions
        snapshot.drop()


def test_other_values_types_and_buffers_than_at_the_last_time_are_seen() -> None:
    device = here()
    a, b = torch.zeros(2, device=device), torch.ones(2, device=device)
    snapshot = Snapshot()
    snapshot.take([a, b])
    b.data = b.data.long()  # the same object, which does not go with the other one any more
    a.fill_(0.5)
    snapshot.take([a, b])
    a.zero_(), b.zero_()
    snapshot.restore()
    assert a.tolist() == [0.5, 0.5] and b.tolist() == [1, 1] and b.dtype is torch.int64
    c = torch.full((2,), 7.0, device=device)
    snapshot.take([a, c])
    a.zero_(), c.zero_(), b.zero_()
    snapshot.restore()
    assert a.tolist() == [0.5, 0.5] and c.tolist() == [7.0, 7.0] and b.tolist() == [0, 0]
    d = torch.full((2,), 8.0, device=device)  # as the one before it, which is not its business
    snapshot.take([a, d])
    d.zero_(), c.zero_()
    snapshot.restore()
    assert d.tolist() == [8.0, 8.0] and c.tolist() == [0.0, 0.0]


def test_what_was_dropped_is_not_restored() -> None:
    a, snapshot = torch.zeros(2), Snapshot()
    snapshot.take([a])
    snapshot.drop()
    a.fill_(3)
    snapshot.restore()
    assert a.tolist() == [3, 3]
