"""DDP's schedule on simulated devices: on virtual time, what DDP would take with NCCL's ring.

Simulated devices are in one process, so DDP itself cannot run on them. Here each device has its own
model, optimizer and share, as a process of DDP has. Buckets are as there: gradients in the reverse
order of the parameters, 1 MiB in the first bucket and 25 MiB in the others. A bucket leaves as soon
as the backward of each device has filled it, while the backward goes on, round a ring of devices:
K - 1 exchanges of a K-th of it sum it up, and K - 1 more bring the sums to all.

One host thread drives them all. That is no matter as long as the host takes no time, as on virtual
time without `seconds_per_launch`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.job import Job, share
from benchmarks.models import workload
from benchmarks.pace import Pace
from benchmarks.peers.loop import moved, optimizers_of
from benchmarks.peers.peer import Peer
from benchmarks.peers.trainer import loader
from torch import Tensor, nn

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20


def train(job: Job, pace: Pace) -> None:
    """Each device with its share of every batch."""
    devices = job.torch_devices
    model = workload(job.model).make()
    models: list[Any] = [copy.deepcopy(model).to(device) for device in devices]
    optimizers = [optimizers_of(own)[0] for own in models]
    ring = Ring(models)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    shares = [tuple(share(b, len(devices), k) for k in range(len(devices))) for b in job.batches()]
    if not pace.begin(devices, parameter_bytes=weights):
        return
    for batch in loader(job, shares):
        losses = []
        for own, optimizer, part, device in zip(models, optimizers, batch, devices, strict=True):
            optimizer.zero_grad()
            here = moved(part, device)
            loss = own.loss(own(*own.inputs(here)), *own.targets(here))
            loss.backward()
            losses.append(loss.detach())
        ring.reduce()
        for optimizer in optimizers:
            optimizer.step()
        if not pace.step_done(losses):
            return


class Ring:
    """Averages the gradients of models that are alike, each on its own device."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._parameters = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self._devices = [own[0].device for own in self._parameters]
        self._buckets = buckets([p.numel() * p.element_size() for p in self._parameters[0]])
        self._filled = [[torch.Event(device) for _ in self._buckets] for device in self._devices]
        self._sends, self._receives = (
            [torch.Stream(device) for device in self._devices] for _ in range(2)
        )
        self._flats = [
            [self._room(own, bucket) for bucket in self._buckets] for own in self._parameters
        ]
        self._arrived = [[torch.empty_like(flat[0]) for flat in own] for own in self._flats]
        for k, own in enumerate(self._parameters):
            for b, bucket in enumerate(self._buckets):
                _note_filled(own, bucket, self._filled[k][b])

    def _room(self, own: Sequence[Tensor], bucket: Sequence[int]) -> Tensor:
        """Room for a bucket's gradients, a row for each device."""
        size = -(-sum(own[i].numel() for i in bucket) // len(self._devices))
        return own[0].new_zeros(len(self._devices), size)

    def reduce(self) -> None:
        """Makes every device's gradients their mean; they are of use on the current streams."""
        if len(self._devices) == 1:
            return
        for b in range(len(self._buckets)):
            self._pack(b)
            for turn in range(len(self._devices) - 1):
                self._exchange(b, turn, adds=True)
            for turn in range(len(self._devices) - 1):
                self._exchange(b, turn - 1, adds=False)
        self._unpack()

    def _pack(self, b: int) -> None:
        """Puts the bucket's gradients side by side once they are all there."""
        for k, own in enumerate(self._parameters):
            with _on(self._receives[k]):
                self._receives[k].wait_event(self._filled[k][b])
                views = self._views(k, b)
                gradients = [own[i].grad for i in self._buckets[b]]
                torch._foreach_copy_(views, gradients)

    def _views(self, k: int, b: int) -> list[Tensor]:
        own = [self._parameters[k][i] for i in self._buckets[b]]
        flat = self._flats[k][b].view(-1)[: sum(p.numel() for p in own)]
        parts = flat.split([p.numel() for p in own])
        return [part.view_as(p) for part, p in zip(parts, own, strict=True)]

    def _exchange(self, b: int, turn: int, *, adds: bool) -> None:
        """Every device sends a row to the next one, which adds it to its own or keeps it."""
        count = len(self._devices)
        for send, receive in zip(self._sends, self._receives, strict=True):
            send.wait_stream(receive)  # what was received last is what leaves next
        for k in range(count):
            following, row = (k + 1) % count, (k - turn) % count
            flat = self._flats[following][b]
            room = self._arrived[following][b] if adds else flat[row]
            with _on(self._receives[following]), _on(self._sends[k]):
                room.copy_(self._flats[k][b][row], non_blocking=True)
        for k in range(count) if adds else ():
            row = (k - 1 - turn) % count
            with _on(self._receives[k]):
                self._flats[k][b][row] += self._arrived[k][b]

    def _unpack(self) -> None:
        for k, (own, device) in enumerate(zip(self._parameters, self._devices, strict=True)):
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._receives[k])
            current.wait_stream(self._sends[k])
            for b, bucket in enumerate(self._buckets):
                gradients = [own[i].grad for i in bucket]
                torch._foreach_copy_(gradients, self._views(k, b))
                torch._foreach_div_(gradients, len(self._devices))


def _note_filled(own: Sequence[Tensor], bucket: Sequence[int], filled: torch.Event) -> None:
    """Records the moment when the bucket's last gradient is there.

    The hooks do not know the ring: no collection of garbage finds a circle through them.
    """
    seen: set[int] = set()
    device = own[0].device

    def hook(i: int) -> None:
        seen.add(i)
        if len(seen) == len(bucket):
            seen.clear()
            filled.record(torch.accelerator.current_stream(device))

    for i in bucket:
        own[i].register_post_accumulate_grad_hook(lambda _, i=i: hook(i))


def buckets(sizes: Sequence[int], first: int = FIRST_BUCKET, most: int = BUCKET) -> list[list[int]]:
    """Positions of parameters that travel together, the last ones first.

    Args:
        sizes: of the parameters in bytes.
        first: bytes after which the first bucket is full.
        most: bytes after which any other one is.

    Example:
        >>> buckets([5, 5, 2, 1], first=3, most=8)
        [[3, 2], [1, 0]]
    """
    found: list[list[int]] = [[]]
    held = 0
    for i in reversed(range(len(sizes))):
        if held >= (first if len(found) == 1 else most):
            found.append([])
            held = 0
        found[-1].append(i)
        held += sizes[i]
    return found


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Any:
    """Makes a stream its device's current one, and the device too."""
    before = torch.accelerator.current_stream(stream.device)
    with torch.accelerator.device_index(stream.device.index):
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def why_not(job: Job) -> str:
    """It is a simulation, of one backward for each step."""
    if job.device != "sim" or not job.virtual:
        return "it is for simulated devices on virtual time"
    return "it takes one backward for each step" if job.model == "gan" else ""


PEER = Peer(train, why_not)
