"""Two streams of one simulated device, for tests of what orders them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SIM = "sim:0"


def main() -> torch.Stream:
    """The stream that is current; the other one is the fixture `side`."""
    stream: torch.Stream = torch.sim.current_stream(SIM)
    return stream


@contextlib.contextmanager
def devices_at_work() -> Iterator[None]:
    """Devices that nobody has waited for are not through when they are asked first."""
    torch.sim.set_prompt(False)
    try:
        yield
    finally:
        torch.sim.set_prompt(True)
