"""Ways to train a benchmark's model: ours and its peers, each at the pace that the runner sets."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import sim_devices
import torch
from benchmarks.models import WORKLOADS
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, _utils, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dp


@dataclass(frozen=True)
class Job:
    """What one contestant does; its processes read it as JSON.

    Args:
        peer: a key of `PEERS`.
        model: a key of `WORKLOADS`.
        device: `"cpu"`, `"sim"` or `"cuda"`.
        devices: how many.
        cores: of the CPU, for all devices together.
        samples: in a batch of all devices; None for the model's own number.
        options: of `DataParallelStrategy`.
        machine: on virtual time, `links` and the `speed` of the simulated devices; else empty.
    """

    peer: str
    model: str
    device: str = "cpu"
    devices: int = 1
    cores: int = 1
    samples: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

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
        commands: a line with a number of steps begins a turn; their end is the training's.
        answers: gets a line of JSON when the training is ready, and after each turn.
    """

    def __init__(self, job: Job, commands: IO[str], answers: IO[str]) -> None:
        self._job, self._commands, self._answers = job, commands, answers
        self._accelerators = list(dict.fromkeys(d for d in job.torch_devices if d.type != "cpu"))
        self._ends: list[float] = []
        self._left = 0

    def begin(self, module: nn.Module) -> bool:
        """The training is ready; returns whether a step is to be done."""
        self._answer({"bytes": sum(p.nbytes for p in module.parameters())})
        return self._next()

    def step_done(self, loss: Any) -> bool:
        """A step was launched, with this loss; returns whether another one is to be done."""
        self._left -= 1
        if self._job.machine:
            self._ends.append(torch.sim.elapsed())
        if self._left:
            return True
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - self._start
        if self._job.machine:  # from the end of one step to the end of the next
            seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * len(self._ends)
            torch.sim.set_clock("wall")
        peaks = [torch.accelerator.max_memory_allocated(d) for d in self._accelerators]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = max(peaks, default=resident)
        self._answer({"seconds": seconds, "loss": float(loss), "memory": memory})
        return self._next()

    def _next(self) -> bool:
        if not (line := self._commands.readline()):
            return False
        self._left, self._ends = int(line), []
        for device in self._accelerators:
            torch.accelerator.reset_peak_memory_stats(device)
        if self._job.machine:
            torch.sim.set_clock("virtual")
        self._start = time.perf_counter()
        return True

    def _answer(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the runner is gone, and so are its commands
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()


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
        trainer.should_stop = not self._pace.begin(pl_module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        trainer.should_stop = not self._pace.step_done(outputs["loss"])


def fit(job: Job, pace: Pace, batches: Sequence[Any], **options: Any) -> None:
    """Trains the job's model by a Trainer with these options."""
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    kind = {"cuda": "gpu"}.get(job.device, job.device)
    trainer = Trainer(
        accelerator=kind,
        max_epochs=1,
        min_epochs=0,
        min_steps=0,
        callbacks=[_Paced(pace)],
        **quiet,
        **options,
    )
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
    going = pace.begin(model)
    for batch in itertools.cycle(batches):
        if not going:
            break
        optimizer.zero_grad()
        loss = model.loss(moved(batch, device), net)
        loss.backward()
        optimizer.step()
        going = pace.step_done(loss.detach())


def torch_ddp(job: Job, pace: Pace) -> None:
    """DistributedDataParallel: a process for each device."""
    rank = int(os.environ["RANK"])
    device = job.torch_devices[rank]
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = WORKLOADS[job.model].make().to(device)
    net = nn.parallel.DistributedDataParallel(model.net)
    loop(model, net, pace, [share(batch, job.devices, rank) for batch in job.batches], device)
    torch.distributed.destroy_process_group()


class OnVirtualTime(nn.DataParallel[nn.Module]):
    """nn.DataParallel whose threads are known, on virtual time, to work for the one that waits."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        work_for = torch.sim.hand_over() if sim_devices.is_enabled() else None
        if work_for is not None:
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
    net = OnVirtualTime(model.net, [device.index for device in devices])
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
    ring = Ring(models)
    going = pace.begin(models[0])
    for batch in itertools.cycle(job.batches):
        if not going:
            break
        losses = []
        for k, (own, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = own.loss(moved(share(batch, len(devices), k), devices[k]))
            loss.backward()
            losses.append(loss.detach())
        ring.reduce()
        for optimizer in optimizers:
            optimizer.step()
        going = pace.step_done(_Mean(losses))


class _Mean:
    """The mean of losses on several devices, read when the turn is over."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self._losses = losses

    def __float__(self) -> float:
        return sum(map(float, self._losses)) / len(self._losses)


class Ring:
    """Averages the gradients of equal models, each on its own device, as NCCL's ring does.

    Gradients travel in the reverse order of the parameters, 1 MiB in the first bucket and 25 MiB in
    the others. A bucket leaves when each device's backward has filled it: K - 1 exchanges of a K-th
    of it sum it up, and K - 1 more bring the sums to all.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._parameters = [list(model.parameters()) for model in models]
        devices = [own[0].device for own in self._parameters]
        self._buckets = _buckets([p.nbytes for p in self._parameters[0]])
        self._filled = [[torch.Event(device) for _ in self._buckets] for device in devices]
        self._sends = [torch.Stream(device) for device in devices]
        self._receives = [torch.Stream(device) for device in devices]
        self._flats = [[self._room(own, b) for b in self._buckets] for own in self._parameters]
        self._arrived = [[torch.empty_like(flat[0]) for flat in own] for own in self._flats]
        for own, events in zip(self._parameters, self._filled, strict=True):
            for bucket, event in zip(self._buckets, events, strict=True):
                _record_when_filled([own[i] for i in bucket], event)

    def _room(self, own: Sequence[Tensor], bucket: Sequence[int]) -> Tensor:
        size = -(-sum(own[i].numel() for i in bucket) // len(self._parameters))
        return own[0].new_zeros(len(self._parameters), size)

    def reduce(self) -> None:
        """Makes every device's gradients their mean; they are of use on the current streams."""
        count = len(self._parameters)
        for b, bucket in enumerate(self._buckets):
            for k, own in enumerate(self._parameters):
                with torch.sim.stream(self._receives[k]):
                    self._receives[k].wait_event(self._filled[k][b])
                    torch._foreach_copy_(self._views(k, b), [own[i].grad for i in bucket])
            for turn in range(count - 1):
                self._exchange(b, turn, adds=True)
            for turn in range(count - 1):
                self._exchange(b, turn - 1, adds=False)
        for k, own in enumerate(self._parameters):
            current = torch.accelerator.current_stream(own[0].device)
            current.wait_stream(self._receives[k])
            current.wait_stream(self._sends[k])
            for b, bucket in enumerate(self._buckets):
                gradients = [own[i].grad for i in bucket]
                torch._foreach_copy_(gradients, self._views(k, b))
                torch._foreach_div_(gradients, count)

    def _views(self, k: int, b: int) -> list[Tensor]:
        own = [self._parameters[k][i] for i in self._buckets[b]]
        flat = self._flats[k][b].view(-1)[: sum(p.numel() for p in own)]
        parts = flat.split([p.numel() for p in own])
        return [part.view_as(p) for part, p in zip(parts, own, strict=True)]

    def _exchange(self, b: int, turn: int, *, adds: bool) -> None:
        """Every device sends a row to the next one, which adds it to its own or keeps it."""
        count = len(self._parameters)
        for send, receive in zip(self._sends, self._receives, strict=True):
            send.wait_stream(receive)  # the row that arrived last leaves next
        for k in range(count):
            following, row = (k + 1) % count, (k - turn) % count
            room = self._arrived[following][b] if adds else self._flats[following][b][row]
            with torch.sim.stream(self._receives[following]), torch.sim.stream(self._sends[k]):
                room.copy_(self._flats[k][b][row], non_blocking=True)
        for k in range(count) if adds else ():
            with torch.sim.stream(self._receives[k]):
                self._flats[k][b][(k - 1 - turn) % count] += self._arrived[k][b]


def _record_when_filled(bucket: Sequence[Tensor], filled: torch.Event) -> None:
    seen: set[int] = set()

    def hook(parameter: Tensor) -> None:
        seen.add(id(parameter))
        if len(seen) == len(bucket):
            seen.clear()
            filled.record(torch.accelerator.current_stream(parameter.device))

    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(hook)


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of parameters that travel together, the last ones first."""
    found: list[list[int]] = [[]]
    for i in reversed(range(len(sizes))):
        if sum(sizes[j] for j in found[-1]) >= (2**20 if len(found) == 1 else 25 * 2**20):
            found.append([])
        found[-1].append(i)
    return found


def why_not(name: str, job: Job) -> str:
    """Why a peer cannot do a job; empty if it can."""
    if name == "torch DDP" and job.device == "sim":
        return "simulated devices are in one process"
    if name == "torch DDP" and job.device == "cuda" and torch.cuda.device_count() < job.devices:
        return "each process needs a GPU of its own"
    if name == "nn.DataParallel" and job.device == "cpu":
        return "it does not spread on the CPU"
    return "it is simulated, on virtual time" if name == "DDP's ring" and not job.machine else ""


PEERS: dict[str, Callable[[Job, Pace], None]] = {
    "one device": one_device,
    "one share": one_share,
    "dp_custom": dp_custom,
    "torch DDP": torch_ddp,
    "nn.DataParallel": nn_data_parallel,
    "DDP's ring": ring_ddp,
}
