"""Batch norm over all replicas: the mean and the variance of the whole batch.

Every replica computes the moments of its shard; the replicas merge them into those of the batch
(Chan et al., "Algorithms for computing the sample variance", 1983: no large numbers are
subtracted). The merged moments are functions of all replicas' inputs, so the step's
backward, which runs through all graphs, gives each replica the gradients of the others' losses.
"""

from __future__ import annotations

from types import MethodType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.apply.collectives import exchange, must_meet
from lightning_dp.parallel.apply.executor import Calls
from lightning_dp.parallel.torch_private import BATCH_NORMS, check_batch_norm_input

Moments: TypeAlias = tuple[int, Tensor, Tensor]
"""Values per channel, their means [C] and their variances [C], divided by their number."""


def forward(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Replaces a batch norm layer's `forward`, with the statistics of the whole batch.

    Where one replica has the whole batch, or the running statistics normalise, it calls the
    layer's own. Of the input's size, the graph keeps one tensor alone, `centred`.
    """
    if not _uses_batch(self) or not must_meet("batch norm"):
        return type(self).forward(self, x)
    check_batch_norm_input(self, x)
    wide, dims = x.to(torch.promote_types(x.dtype, torch.float32)), {*range(x.dim())} - {1}
    shape = [1, -1] + [1] * (x.dim() - 2)
    shard_mean = wide.mean([*dims])
    centred = wide - shard_mean.view(shape)
    moments: Moments = (x.numel() // x.size(1), shard_mean, centred.square().mean([*dims]))
    n, mean, var = exchange("batch norm", moments, _merged)
    if self.training and self.track_running_stats:
        _track(self, n, mean.detach(), var.detach())
    scale = torch.rsqrt(var + self.eps)
    scale = scale if self.weight is None else scale * self.weight
    shift = (shard_mean - mean) * scale
    shift = shift if self.bias is None else shift + self.bias
    return torch.addcmul(shift.view(shape), centred, scale.view(shape)).to(x.dtype)


def _merged(calls: Calls, moments: list[Moments]) -> Moments:
    """The moments of the batch, where these were taken of its shards."""
    device, total = calls.participants[0].device, sum(n for n, _, _ in moments)
    if total == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training with batch norm, got 1 in the "
            "whole batch. Use larger batches, or drop_last=True in the DataLoader."
        )
    means = torch.stack([mean.to(device) for _, mean, _ in moments])
    variances = torch.stack([var.to(device) for _, _, var in moments])
    shares = torch.tensor([[n / total] for n, _, _ in moments], dtype=means.dtype)
    weights = shares.to(device, non_blocking=True)  # the thread need not wait
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return total, mean, var


@torch.no_grad()
def _track(layer: nn.BatchNorm1d, n: int, mean: Tensor, var: Tensor) -> None:
    """Updates a replica's running statistics, without a change of version, as the layer does."""
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    unbiased = var * (n / (n - 1))
    for running, value in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        if running is not None:
            running.data.lerp_(value.to(running.dtype), factor or 0.0)


def _uses_batch(layer: nn.Module) -> bool:
    """Whether a batch norm layer normalises by the statistics of its input."""
    return layer.training or layer.running_mean is None


def is_synced(module: nn.Module) -> bool:
    """Whether `forward` here replaces a module's own."""
    bound = module.__dict__.get("forward")
    return isinstance(bound, MethodType) and bound.__func__ is forward


def can_be_synced(module: nn.Module) -> bool:
    """Whether a module is a batch norm layer whose `forward` is torch's own."""
    # In a copy that was made while it was synced, it is an attribute of the layer.
    forward = getattr(module.__dict__.get("forward", module.forward), "__func__", None)
    return isinstance(module, BATCH_NORMS) and forward is nn.BatchNorm1d.forward


def fewest_samples(module: nn.Module, path: str = "") -> int:
    """How many samples a replica needs for a call of a submodule: 2 if batch norm trains there."""
    refuses_one = any(
        isinstance(layer, BATCH_NORMS) and _uses_batch(layer) and not is_synced(layer)
        for layer in module.get_submodule(path).modules()
    )
    return 1 + refuses_one
