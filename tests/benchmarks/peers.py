"""Ways to train a benchmark's model: ours and its peers, each at the pace that the runner sets."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from benchmarks.models import WORKLOADS
from lightning.pytorch import Callback, LightningModule, Trainer
from support.oracle import QUIET
from torch import Tensor, _utils, nn

import lightning_dp


@dataclass(frozen=True)
class Job:
    """What one contestant does: so many devices, "cpu", "sim" or "cuda", train a model.

    `samples` are those of a batch of all devices. The processes of DDP meet at `master`,
    `tcp://host:port`, and each has a rank.
    """

    peer: str
    model: str
    device: str
    devices: int
    samples: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_virtual: bool = False
    master: str = ""
    rank: int = 0

    @property
    def torch_devices(self) -> list[torch.device]:
        """The devices; a machine with too few GPUs has one of them several times."""
        if self.device == "cpu":
            return [torch.device("cpu")] * self.devices
        count = torch.get_device_module(self.device).device_count()
        return [torch.device(self.device, k % count) for k in range(self.devices)]

    @property
    def batches(self) -> list[Any]:
        """Those of all devices together."""
        return WORKLOADS[self.model].batches(self.samples)


class Pace:
    """Lets a training do the steps of a turn, and waits between turns.

    The pipe brings the number of steps of each turn, and None at the end; it takes an answer when
    the training is ready, and after each turn.
    """

    def __init__(self, job: Job, pipe: Connection) -> None:
        self._is_virtual, self._pipe = job.is_virtual, pipe
        self._accelerators = {device for device in job.torch_devices if device.type != "cpu"}

    def begin(self) -> bool:
        """The training is ready; returns whether a step is to be done."""
        self._pipe.send({})
        return self._next()

    def step_done(self, loss: Tensor) -> bool:
        """A step was launched; returns whether another one is to be done."""
        self._left -= 1
        if self._left:
            return True
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        seconds = torch.sim.elapsed() if self._is_virtual else time.perf_counter() - self._start
        peaks = [torch.accelerator.max_memory_allocated(device) for device in self._accelerators]
        answer = {"seconds": seconds / self._steps, "memory": max(peaks, default=0)}
        self._pipe.send({**answer, "loss": float(loss.detach())})
        return self._next()

    def _next(self) -> bool:
        self._steps = self._left = self._pipe.recv()
        for device in self._accelerators:
            torch.accelerator.reset_peak_memory_stats(device)
        if self._is_virtual:
            torch.sim.set_clock("virtual")
        self._start = time.perf_counter()
        return self._steps is not None


# --- through Lightning's Trainer ------------------------------------------------------------------


class _Paced(Callback):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = not self._pace.begin()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        trainer.should_stop = not self._pace.step_done(outputs["loss"])


def fit(job: Job, pace: Pace, batches: Sequence[Any], **options: Any) -> None:
    """Trains the job's model by a Trainer with these options."""
    options |= {"max_epochs": 1, "min_epochs": 0, "min_steps": 0, "callbacks": [_Paced(pace)]}
    trainer = Trainer(accelerator=job.device, **QUIET, **options)
    trainer.fit(WORKLOADS[job.model].make(), itertools.cycle(batches))


def one_device(job: Job, pace: Pace) -> None:
    """Plain Lightning: the whole batch on one device, with all cores."""
    fit(job, pace, job.batches, devices=1)


def one_share(job: Job, pace: Pace) -> None:
    """Plain Lightning with one device's share of the batch: what others take beyond is overhead."""
    fit(job, pace, [share(batch, job.devices, 0) for batch in job.batches], devices=1)


def dp_custom(job: Job, pace: Pace) -> None:
    """Ours."""
    strategy = lightning_dp.DataParallelStrategy(devices=job.torch_devices, **job.options)
    fit(job, pace, job.batches, strategy=strategy)


# --- in a loop of plain PyTorch -------------------------------------------------------------------


def share(batch: Sequence[Tensor], parts: int, k: int) -> list[Tensor]:
    """The samples of one of several devices."""
    return [torch.tensor_split(tensor, parts)[k].contiguous() for tensor in batch]


def loop(model: Any, net: Any, pace: Pace, batches: Sequence[Any], device: torch.device) -> None:
    """Trains a model on its device, with `net` in place of its net."""
    optimizer = model.configure_optimizers()
    turns = itertools.cycle(batches)
    going = pace.begin()
    while going:
        optimizer.zero_grad()
        batch = [tensor.to(device, non_blocking=True) for tensor in next(turns)]
        loss = model.loss(batch, net)
        loss.backward()
        optimizer.step()
        going = pace.step_done(loss)


def torch_ddp(job: Job, pace: Pace) -> None:
    """DistributedDataParallel: a process for each device."""
    device, world = job.torch_devices[job.rank], {"rank": job.rank, "world_size": job.devices}
    torch.distributed.init_process_group(init_method=job.master, **world)
    model = WORKLOADS[job.model].make().to(device)
    net = nn.parallel.DistributedDataParallel(model.net)
    loop(model, net, pace, [share(batch, job.devices, job.rank) for batch in job.batches], device)
    torch.distributed.destroy_process_group()


class OnVirtualTime(nn.DataParallel[nn.Module]):
    """nn.DataParallel whose threads are known, on virtual time, to work for the one that waits."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        work_for = torch.sim.hand_over()

        def call(replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with work_for():
                return replica(*args, **kwargs)

        return super().parallel_apply([partial(call, r) for r in replicas], inputs, kwargs)


def nn_data_parallel(job: Job, pace: Pace) -> None:
    """torch.nn.DataParallel: one process, the loss on the first device."""
    for own in (_broadcast_coalesced, _scatter, _gather):
        if not torch.cuda.is_available():
            setattr(torch._C, own.__name__, own)
    devices = job.torch_devices
    model = WORKLOADS[job.model].make().to(devices[0])
    kind = OnVirtualTime if job.is_virtual else nn.DataParallel
    net = kind(model.net, [device.index for device in devices])
    loop(model, net, pace, job.batches, devices[0])


# C++ functions that need CUDA (torch/csrc/cuda/comm.cpp), as they are without NCCL:
# the same copies in the same order on the same streams, none of which the host waits for.


def _broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    copies: list[list[Tensor]] = [[] for _ in devices[1:]]
    for chunk in _utils._take_tensors(tensors, buffer_size):
        flat = _utils._flatten_dense_tensors(chunk)
        for own, index in zip(copies, devices[1:], strict=True):
            there = flat.to(torch.device(index), non_blocking=True)
            # As new tensors, which do not know each other's versions.
            own.extend(part.data for part in _utils._unflatten_dense_tensors(there, chunk))
    return [list(tensors), *(list(_utils._reorder_tensors_as(own, tensors)) for own in copies)]


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any
) -> list[Tensor]:
    chunks = list(tensor.chunk(len(devices), dim))
    for i, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        with (streams and streams[i]) or contextlib.nullcontext():
            chunks[i] = chunk.to(torch.device(index), non_blocking=True)
    return chunks


def _gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
    return torch.cat([t.to(torch.device(destination), non_blocking=True) for t in tensors], dim)


PEERS: dict[str, Callable[[Job, Pace], None]] = {
    "one device": one_device,
    "one share": one_share,
    "dp_custom": dp_custom,
    "torch DDP": torch_ddp,
    "nn.DataParallel": nn_data_parallel,
}
CANNOT = {("torch DDP", "sim"), ("nn.DataParallel", "cpu")}
"""Simulated devices are in one process, and nn.DataParallel does not spread on the CPU."""
