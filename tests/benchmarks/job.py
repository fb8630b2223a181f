"""What a contestant is to do: plain values, which travel to its processes as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.models import workload


@dataclass(frozen=True)
class Job:
    """Trains a model by a peer's way.

    Args:
        peer: which way, see `benchmarks.peers.PEERS`.
        model: what, see `benchmarks.models.workload`.
        device: the devices' type: `"cpu"`, `"sim"` or `"cuda"`.
        devices: how many.
        cores: of the CPU, for all devices together.
        samples: in a batch of all devices; None for the model's own number.
        virtual: whether time is virtual.
        links: of simulated devices, on virtual time; see `torch.sim.set_links`.
        flops: a simulated device's operations per second, on virtual time.
        options: of `DataParallelStrategy`, and `logs`: whether each step logs its loss.
        processes: that share the devices out between them, where a peer does that.
    """

    peer: str
    model: str
    device: str = "cpu"
    devices: int = 1
    cores: int = 1
    samples: int | None = None
    virtual: bool = False
    links: str | None = None
    flops: float = 1e9
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1

    def to_json(self) -> str:
        """The job as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that a text is of."""
        return cls(**json.loads(text))

    @property
    def logs(self) -> bool:
        """Whether each step logs its loss, that of all devices."""
        return bool(self.options.get("logs"))

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The strategy's own options, and what the model needs."""
        own = {key: value for key, value in self.options.items() if key != "logs"}
        return {**own, **workload(self.model).strategy}

    def with_devices(self, count: int) -> Job:
        """The same for another number of devices."""
        return dataclasses.replace(self, devices=count)

    def on_virtual_time(self, links: str, flops: float) -> Job:
        """The same on virtual time."""
        return dataclasses.replace(self, virtual=True, links=links, flops=flops)

    def batches(self) -> list[Any]:
        """Those of all devices together."""
        return workload(self.model).batches(self.samples)

    def own_batches(self) -> list[Any]:
        """The shares of this process, where each device has one."""
        rank = int(os.environ.get("RANK", 0))
        return [share(batch, self.devices, rank) for batch in self.batches()]

    @property
    def torch_devices(self) -> list[torch.device]:
        """The devices; a machine with too few GPUs has one of them several times."""
        if self.device == "cpu":
            return [torch.device("cpu")] * self.devices
        there = torch.get_device_module(self.device).device_count()
        indices = range(self.devices) if there >= self.devices else [0] * self.devices
        return [torch.device(self.device, index) for index in indices]

    @property
    def accelerator(self) -> str:
        """The devices' type as a Trainer has it."""
        return {"cuda": "gpu"}.get(self.device, self.device)


def share(batch: Any, parts: int, rank: int) -> Any:
    """The rows of one of several processes; the first ones have one more where it matters."""
    if isinstance(batch, dict):
        return {key: share(value, parts, rank) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(share(value, parts, rank) for value in batch)
    return torch.tensor_split(batch, parts)[rank].contiguous()
