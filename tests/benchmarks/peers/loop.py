"""Trainings by a loop of plain PyTorch, at a pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.job import Job
from benchmarks.models import Spread
from benchmarks.pace import Pace
from benchmarks.peers.trainer import loader
from lightning.pytorch import LightningModule
from torch import Tensor, nn


def optimizers_of(model: LightningModule) -> list[torch.optim.Optimizer]:
    """What the module configures, as a list."""
    configured: Any = model.configure_optimizers()
    return configured if isinstance(configured, list) else [configured]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(moved(value, device) for value in batch)
    return batch.to(device, non_blocking=True)


def run(
    job: Job,
    pace: Pace,
    model: LightningModule,
    batches: Sequence[Any],
    device: torch.device,
    spread: Spread,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    devices: Sequence[torch.device] = (),
    takes_host_batches: bool = False,
) -> None:
    """Trains.

    Args:
        job: what is trained.
        pace: how many steps.
        model: the model, on its device.
        batches: of this process.
        device: of the model.
        spread: see `Model.loop_step`.
        optimizers: those of the model, if they were wrapped.
        backward: how gradients are computed.
        devices: of this process; `device` alone, if there are none.
        takes_host_batches: whether `spread` moves its inputs itself.
    """
    optimizers = optimizers or optimizers_of(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not pace.begin(devices or [device], parameter_bytes=weights):
        return
    for batch in loader(job, batches):
        here = moved(batch, device)
        inputs = batch if takes_host_batches else here
        if not pace.step_done(model.loop_step(spread, inputs, here, optimizers, backward)):
            return


def wrapping(
    model: LightningModule, wrap: Callable[[nn.Module], nn.Module], *, always: bool = False
) -> Spread:
    """Calls what `wrap` makes of the model's parts, `always` or where they are trained."""
    parts: list[nn.Module] = model.parts()
    wrapped = {part: wrap(part) for part in parts}

    def spread(part: nn.Module, *, trained: bool = True) -> Callable[..., Any]:
        return wrapped[part] if trained or always else part

    return spread
