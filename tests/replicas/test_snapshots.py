"""Snapshots of buffers: what a step does to them is taken back, whatever they are."""

from collections.abc import Callable

import pytest
import torch
from support import oracle
from torch import Tensor

from lightning_dp.parallel.reduce import BufferSnapshot

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


def give_other_shapes(buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        buffer.data = torch.zeros(5, dtype=buffer.dtype, device=buffer.device)


def resize(buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name in ("running_mean", "counts", "empty"):
            buffers[name].resize_(7).fill_(3)


@pytest.mark.parametrize("change", [write, give_other_shapes, resize])
def test_buffers_get_their_values_back(change: Callable[[dict[str, Tensor]], None]) -> None:
    buffers, snapshot = kinds_of_buffers(here()), BufferSnapshot()
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
