"""Two streams of one simulated device, for tests of what orders them."""

from __future__ import annotations

import torch

SIM = "sim:0"


def main() -> torch.Stream:
    """The stream that is current; the other one is the fixture `side`."""
    stream: torch.Stream = torch.sim.current_stream(SIM)
    return stream
