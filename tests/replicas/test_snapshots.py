"""Snapshots of buffers: what a step does to them is taken back, whatever they are."""

from __future__ import annotations

import pytest
import torch
from support import oracle
from torch import Tensor

from lightning_dp.parallel.reduce import BufferSnapshot

pytestmark = pytest.mark.usefixtures("on")

KINDS = {
    "floats": lambda: torch.tensor([1.0, float("nan")]),
    "a number": lambda: torch.tensor(3),
    "a mask": lambda: torch.tensor([True, False]),
    "empty": lambda: torch.empty(0, 2),
    "half": lambda: torch.ones(2, dtype=torch.bfloat16),
    "columns": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.zeros(1).expand(4),
    "trained": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("change", ["values", "shapes"])
def test_buffers_get_their_values_back(change: str) -> None:
    device, snapshot = oracle.devices_of(1)[0], BufferSnapshot()
    with torch.no_grad():
        buffers: list[Tensor] = [make().to(device) for make in KINDS.values()]
    for _ in range(2):  # again, with what is known of them
        snapshot.take([None, *buffers])
        before = [buffer.detach().clone() for buffer in buffers]
        versions = [buffer._version for buffer in buffers]
        for buffer in buffers:
            if change == "shapes":
                buffer.data = torch.zeros(5, dtype=buffer.dtype, device=device)
            elif buffer.stride() != (0,):
                buffer.data.fill_(1).add_(buffer.dtype is not torch.bool)
        snapshot.restore()
        assert [buffer._version for buffer in buffers] == versions
        for buffer, value in zip(buffers, before, strict=True):
            torch.testing.assert_close(buffer.detach(), value, rtol=0, atol=0, equal_nan=True)
