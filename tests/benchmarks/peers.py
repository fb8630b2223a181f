"""Ways to train a benchmark's model: ours and its peers, each at the pace that the runner sets."""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from benchmarks.models import WORKLOADS
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, _utils, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dp


@dataclass(frozen=True)
class Job:
    """What one contestant does.

    Args:
        peer: a key of `PEERS`.
        model: a key of `WORKLOADS`.
        device: `"cpu"`, `"sim"` or `"cuda"`.
        devices: how many.
        cores: of the CPU, for all devices together.
        samples: in a batch of all devices; None for the model's own number.
        options: of `DataParallelStrategy`.
        links: on virtual time, those between the simulated devices; else empty.
        master: where the processes of DDP meet, `tcp://host:port`.
        rank: among these processes.
    """

    peer: str
    model: str
    device: str = "cpu"
    devices: int = 1
    cores: int = 1
    samples: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    links: str = ""
    master: str = ""
    rank: int = 0

    @property
    def torch_devices(self) -> list[torch.device]:
        """The devices; a machine with too few GPUs has one of them several times."""
        if self.device == "cpu":
            return [torch.device("cpu")] * self.devices
        there = torch.get_device_module(self.device).device_count()
        indices = range(self.devices) if there >= self.devices else [0] * self.devices
        return [torch.device(self.device, index) for index in indices]

    @property
    def batches(self) -> list[Any]:
        """Those of all devices together."""
        return WORKLOADS[self.model].batches(self.samples)


class Pace:
    """Lets a training do the steps of a turn, and waits between turns.

    Args:
        job: what is trained.
        pipe: receives the number of steps of each turn, and None at the end; gets an answer when
            the training is ready, and after each turn.
    """

    def __init__(self, job: Job, pipe: Connection) -> None:
        self._is_virtual, self._pipe = bool(job.links), pipe
        self._accelerators = list(dict.fromkeys(d for d in job.torch_devices if d.type != "cpu"))
        self._ends: list[float] = []
        self._left = 0

    def begin(self) -> bool:
        """The training is ready; returns whether a step is to be done."""
        self._pipe.send({})
        return self._next()

    def step_done(self, losses: Sequence[Tensor]) -> bool:
        """A step was launched; returns whether another one is to be done."""
        self._left -= 1
        if self._is_virtual:
            self._ends.append(torch.sim.elapsed())
        if self._left:
            return True
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - self._start
        if self._is_virtual:  # from the end of one step to the end of the next
            seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * len(self._ends)
            torch.sim.set_clock("wall")
        peaks = [torch.accelerator.max_memory_allocated(d) for d in self._accelerators]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = max(peaks, default=resident)
        loss = sum(float(loss.detach()) for loss in losses) / len(losses)
        self._pipe.send({"seconds": seconds, "loss": loss, "memory": memory})
        return self._next()

    def _next(self) -> bool:
        steps = self._pipe.recv()
        if steps is None:
            return False
        self._left, self._ends = steps, []
        for device in self._accelerators:
            torch.accelerator.reset_peak_memory_stats(device)
        if self._is_virtual:
            torch.sim.set_clock("virtual")
        self._start = time.perf_counter()
        return True


# --- through Lightning's Trainer ------------------------------------------------------------------


class _InTurns(IterableDataset[Any]):
    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


class _Paced(Callback):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = not self._pace.begin()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        trainer.should_stop = not self._pace.step_done([outputs["loss"]])


QUIET: dict[str, Any] = dict.fromkeys(
    ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
)


def fit(job: Job, pace: Pace, batches: Sequence[Any], **options: Any) -> None:
    """Trains the job's model by a Trainer with these options."""
    options |= {"max_epochs": 1, "min_epochs": 0, "min_steps": 0, "callbacks": [_Paced(pace)]}
    kind = {"cuda": "gpu"}.get(job.device, job.device)
    trainer = Trainer(accelerator=kind, **QUIET, **options)
    trainer.fit(WORKLOADS[job.model].make(), DataLoader(_InTurns(batches), batch_size=None))


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


def moved(batch: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The batch on a device."""
    return [tensor.to(device, non_blocking=True) for tensor in batch]


def loop(model: Any, net: Any, pace: Pace, batches: Sequence[Any], device: torch.device) -> None:
    """Trains a model on its device, with `net` in place of its net."""
    optimizer = model.configure_optimizers()
    turns = itertools.cycle(batches)
    going = pace.begin()
    while going:
        optimizer.zero_grad()
        loss = model.loss(moved(next(turns), device), net)
        loss.backward()
        optimizer.step()
        going = pace.step_done([loss])


def torch_ddp(job: Job, pace: Pace) -> None:
    """DistributedDataParallel: a process for each device."""
    device = job.torch_devices[job.rank]
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=job.master,
        rank=job.rank,
        world_size=job.devices,
    )
    model = WORKLOADS[job.model].make().to(device)
    net = nn.parallel.DistributedDataParallel(model.net)
    loop(model, net, pace, [share(batch, job.devices, job.rank) for batch in job.batches], device)
    torch.distributed.destroy_process_group()


class OnVirtualTime(nn.DataParallel[nn.Module]):
    """nn.DataParallel whose threads are known, on virtual time, to work for the one that waits."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        work_for = torch.sim.hand_over()
        replicas = [partial(_called, work_for, replica) for replica in replicas]
        return super().parallel_apply(replicas, inputs, kwargs)


def _called(work_for: Any, replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with work_for():
        return replica(*args, **kwargs)


def nn_data_parallel(job: Job, pace: Pace) -> None:
    """torch.nn.DataParallel: one process, the loss on the first device."""
    for function in (_broadcast_coalesced, _scatter, _gather):
        if not hasattr(torch._C, function.__name__):
            setattr(torch._C, function.__name__, function)
    devices = job.torch_devices
    model = WORKLOADS[job.model].make().to(devices[0])
    kind = OnVirtualTime if job.links else nn.DataParallel
    net = kind(model.net, [device.index for device in devices])
    loop(model, net, pace, job.batches, devices[0])


# C++ functions that PyTorch's CPU wheels lack (torch/csrc/cuda/comm.cpp), as they are without NCCL:
# the same copies in the same order on the same streams, none of which the host waits for.


def _broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    copies: list[list[Tensor]] = [[] for _ in devices[1:]]
    for chunk in _utils._take_tensors(tensors, buffer_size):
        flat = _utils._flatten_dense_tensors(chunk)
        for own, index in zip(copies, devices[1:], strict=True):
            with torch.accelerator.device_index(index):
                there = torch.empty_like(flat, device=torch.device(index))
                there.copy_(flat, non_blocking=True)
                # As new tensors, which do not know each other's versions.
                own.extend(part.data for part in _utils._unflatten_dense_tensors(there, chunk))
    return [list(tensors), *(list(_utils._reorder_tensors_as(own, tensors)) for own in copies)]


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any
) -> list[Tensor]:
    chunks = list(tensor.chunk(len(devices), dim))
    for i, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        if torch.device(index) != tensor.device:
            with (streams and streams[i]) or contextlib.nullcontext():
                chunks[i] = chunk.to(torch.device(index), non_blocking=True)
    return chunks


def _gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
    shape, sizes = list(tensors[0].shape), [tensor.shape[dim] for tensor in tensors]
    shape[dim] = sum(sizes)
    joined = tensors[0].new_empty(shape, device=torch.device(destination))
    for part, tensor in zip(joined.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    return joined


# --- DDP's schedule on simulated devices, which are in one process --------------------------------


def ring_ddp(job: Job, pace: Pace) -> None:
    """Each device has a model, an optimizer and a share; one host thread, which takes no time."""
    devices = job.torch_devices
    models = [WORKLOADS[job.model].make() for _ in devices]
    for own, device in zip(models, devices, strict=True):
        own.load_state_dict(models[0].state_dict())
        own.to(device)
    optimizers = [own.configure_optimizers() for own in models]
    ring, batches = Ring(models), itertools.cycle(job.batches)
    going = pace.begin()
    while going:
        batch, losses = next(batches), []
        for k, (own, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            losses.append(own.loss(moved(share(batch, len(devices), k), devices[k])))
            losses[-1].backward()
        ring.reduce()
        for optimizer in optimizers:
            optimizer.step()
        going = pace.step_done(losses)


class Ring:
    """Averages the gradients of equal models, each on its own device, as NCCL's ring does.

    Gradients travel in the reverse order of the parameters, 1 MiB in the first bucket and 25 MiB in
    the others. A bucket leaves when each device's backward has filled it: K - 1 exchanges of a K-th
    of it sum it up, and K - 1 more bring the sums to all.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        reverse = [list(model.parameters())[::-1] for model in models]
        self._parameters = list(zip(*map(_buckets, reverse), strict=True))
        self._count = len(models)
        self._rows = [[self._room(own) for own in devices] for devices in self._parameters]
        self._filled = [[_filled(own) for own in devices] for devices in self._parameters]
        self._sends = [torch.Stream(own[0].device) for own in reverse]
        self._receives = [torch.Stream(own[0].device) for own in reverse]

    def _room(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """K rows for the gradients of a bucket, and one that arrives."""
        size = -(-sum(p.numel() for p in parameters) // self._count)
        return parameters[0].new_zeros(self._count, size), parameters[0].new_empty(size)

    def reduce(self) -> None:
        """Makes every device's gradients their mean; they are of use on the current streams."""
        turns = range(self._count - 1)
        for devices, rows, filled in zip(self._parameters, self._rows, self._filled, strict=True):
            for k, own in enumerate(devices):
                with torch.sim.stream(self._receives[k]):
                    self._receives[k].wait_event(filled[k])
                    torch._foreach_copy_(_views(rows[k][0], own), [p.grad for p in own])
            for turn in turns:
                self._exchange(rows, turn, adds=True)
            for turn in turns:
                self._exchange(rows, turn - 1, adds=False)
        for k, streams in enumerate(zip(self._receives, self._sends, strict=True)):
            current = torch.accelerator.current_stream(streams[0].device)
            for stream in streams:
                current.wait_stream(stream)
            for devices, rows in zip(self._parameters, self._rows, strict=True):
                gradients = [p.grad for p in devices[k]]
                torch._foreach_copy_(gradients, _views(rows[k][0], devices[k]))
                torch._foreach_div_(gradients, self._count)

    def _exchange(self, rows: Sequence[tuple[Tensor, Tensor]], turn: int, *, adds: bool) -> None:
        """Every device sends a row to the next one, which adds it to its own or keeps it."""
        for send, receive in zip(self._sends, self._receives, strict=True):
            send.wait_stream(receive)  # the row that arrived last leaves next
        for k, (own, _) in enumerate(rows):
            following, row = (k + 1) % self._count, (k - turn) % self._count
            kept, arrived = rows[following]
            with torch.sim.stream(self._receives[following]), torch.sim.stream(self._sends[k]):
                (arrived if adds else kept[row]).copy_(own[row], non_blocking=True)
        for k, (own, arrived) in enumerate(rows) if adds else ():
            with torch.sim.stream(self._receives[k]):
                own[(k - 1 - turn) % self._count] += arrived


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    sums = itertools.accumulate(p.nbytes for p in parameters)
    first = sum(total < 2**20 for total in sums) + 1
    return [parameters[:first], *_utils._take_tensors(parameters[first:], 25 * 2**20)]


def _views(rows: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    sizes = [p.numel() for p in parameters]
    parts = rows.view(-1)[: sum(sizes)].split(sizes)
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]


def _filled(bucket: Sequence[Tensor]) -> torch.Event:
    """Is recorded when the backward has accumulated the gradients of all parameters of a bucket."""
    event, seen = torch.Event(bucket[0].device), set[int]()

    def hook(parameter: Tensor) -> None:
        seen.add(id(parameter))
        if len(seen) == len(bucket):
            seen.clear()
            event.record(torch.accelerator.current_stream(parameter.device))

    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(hook)
    return event


def why_not(name: str, job: Job) -> str:
    """Why a peer cannot do a job; empty if it can."""
    if name == "torch DDP" and job.device == "sim":
        return "simulated devices are in one process"
    if name == "torch DDP" and job.device == "cuda" and torch.cuda.device_count() < job.devices:
        return "each process needs a GPU of its own"
    if name == "nn.DataParallel" and job.device == "cpu":
        return "it does not spread on the CPU"
    return "it is simulated, on virtual time" if name == "DDP's ring" and not job.links else ""


PEERS: dict[str, Callable[[Job, Pace], None]] = {
    "one device": one_device,
    "one share": one_share,
    "dp_custom": dp_custom,
    "torch DDP": torch_ddp,
    "nn.DataParallel": nn_data_parallel,
    "DDP's ring": ring_ddp,
}
