"""Simulated devices for every test here, left as they were found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sim_devices
import torch
from support.device_kinds import SIM_DEVICES


@pytest.fixture(scope="session", autouse=True)
def _devices() -> None:
    sim_devices.enable(SIM_DEVICES)


@pytest.fixture(autouse=True)
def _clean(_devices: None) -> Iterator[None]:
    yield
    torch.sim.set_device(0)
    for index in range(SIM_DEVICES):
        torch.sim.synchronize(index)  # nothing is under way when the next test begins
        torch.sim.set_memory_limit(index, None)
        torch.sim.set_speed(index)
    torch.sim.set_links(None)
    torch.sim.set_clock("wall")


@pytest.fixture
def side(_devices: None) -> torch.Stream:
    return torch.Stream("sim:0")
