"""Several processes, the ranks: each has devices, replicas and a slice of every batch.

They exchange values over `torch.distributed` alone, through a `World`. In a training step that is
what each rank's loss is and counts for (`exchange_losses`), and in its backward the sums of their
gradients (`sum_gradients`). With one process none of this is imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.parallel.comm import group

T = TypeVar("T")


class World:
    """The processes. All of them call the same methods in the same order, from one thread each.

    Torch's default process group must exist.

    Args:
        rank: of this process.
        size: the number of processes.
        timeout: of collectives on the CPU; None for torch's default.

    Attributes:
        is_idle: whether this process has no samples of the current batch. It then runs the step
            with samples of others, so that it takes part in all exchanges, and its results are
            left out.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self.rank, self.size = rank, size
        self.is_idle = False
        backends = dist.get_backend_config()
        self._has_nccl = "cuda:nccl" in backends
        # Objects are exchanged on the CPU, whatever the devices are.
        has_gloo = "cpu:gloo" in backends
        self._cpu_group = None if has_gloo else dist.new_group(backend="gloo", timeout=timeout)

    def all_gather_objects(self, value: T, place: str = "") -> list[T]:
        """Every rank's value, in the order of the ranks. Tensors arrive on the CPU, detached.

        Args:
            value: this rank's.
            place: what calls it, for the error that all ranks get if others are elsewhere.
        """
        sent = io.BytesIO()
        received: list[Any] = [None] * self.size
        _Pickler(sent, protocol=5).dump(value)
        dist.all_gather_object(received, (place, sent.getvalue()), group=self._cpu_group)
        places = [other for other, _ in received]
        if len(set(places)) > 1:
            got = ", ".join(f"process {rank} is at {other}" for rank, other in enumerate(places))
            raise RuntimeError(
                f"Expected all processes at the same collective, got: {got}. Make the same calls "
                "in the same order in every process: they must not depend on its rank or its "
                "samples."
            )
        with torch.inference_mode(False):
            return [pickle.loads(data) for _, data in received]

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of one rank in all of them; that rank gets the same object again."""
        received = self.all_gather_objects(value if self.rank == src else None, "a broadcast")[src]
        return value if self.rank == src else cast(T, received)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives named tensors the values that rank 0 has; all ranks must have the same ones."""
        kinds = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
        for rank, others in enumerate(self.all_gather_objects(kinds)):
            if others != kinds:
                raise ValueError(
                    f"Expected the same parameters and buffers in every process, got others in "
                    f"process {rank} than in process {self.rank}. Build the same module in all."
                )
        for tensor in tensors.values():
            sent = tensor.detach().cpu().contiguous()
            dist.broadcast(sent, 0, group=self._cpu_group)
            if self.rank > 0:
                tensor.copy_(sent)

    def all_reduce(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Begins to add up a tensor of all ranks; returns the sum, and what to wait for.

        Without NCCL the sum of a tensor on a GPU is on the CPU.
        """
        if tensor.device.type != "cpu" and not self._has_nccl:
            tensor = tensor.cpu()
        ranks = self._cpu_group if tensor.device.type == "cpu" else None
        return tensor, dist.all_reduce(tensor, group=ranks, async_op=True)

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self._cpu_group)


class _Pickler(pickle.Pickler):
    """Pickles tensors from any device, without graphs, and of a view no more than the view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        with torch.inference_mode(False):  # an inference tensor has no version to be saved
            copied = torch.empty_like(obj, device="cpu", requires_grad=False).copy_(obj.detach())
        return copied.__reduce_ex__(5)


class _RankLoss(NamedTuple):
    """What one rank sends of its loss."""

    value: float | None  # of its samples; None if no replica has a loss
    samples: int  # 0 for an idle rank, whose loss weighs nothing
    items: float | None  # what the loss is a mean over, if not samples
    has_graph: bool  # whether parameters get gradients from it
    dtype: torch.dtype | None


class JointLoss(NamedTuple):
    """The loss of all ranks' samples.

    Attributes:
        value: the loss; None if no rank has one.
        share: the weight of this rank's loss.
        items: what it is a mean over, if not samples.
        has_graph: whether any rank's parameters get gradients from it.
        dtype: of the loss, the same in every rank.
        samples: of each rank.
    """

    value: float | None
    share: float
    items: float | None
    has_graph: bool
    dtype: torch.dtype | None
    samples: list[int]

    def on(self, device: torch.device) -> Tensor:
        """The value as a tensor."""
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def exchange_losses(
    loss: Tensor | None,
    samples: int,
    items: float | None,
    world: World,
    *,
    has_graph: bool,
    is_sum: bool,
) -> JointLoss:
    """The loss of all ranks, given that of this rank's samples; ranks weigh as replicas do.

    `items` is what it is a mean over, if not samples; `is_sum`: it is a sum over samples.
    """
    value, dtype = (None, None) if loss is None else (float(loss), loss.dtype)
    sent = _RankLoss(value, 0 if world.is_idle else samples, items, has_graph, dtype)
    ranks = world.all_gather_objects(sent, "the end of its step")
    rank_samples = [rank.samples for rank in ranks]
    found = [rank for rank in ranks if rank.value is not None and rank.samples]
    if not found:
        return JointLoss(None, 0.0, None, False, None, rank_samples)
    of_items = [rank.items for rank in found]
    if of_items.count(None) not in (0, len(of_items)):
        raise ValueError(
            f"Expected num_items from every process or from none, got {of_items}. Give it for "
            "every shard: the number of items that the loss is a mean over."
        )
    counts = of_items if any(of_items) else [rank.samples for rank in found]
    total = 1.0 if is_sum else sum(count or 0.0 for count in counts)
    shares = [(1.0 if is_sum else count or 0.0) / total for count in counts]
    pairs = list(zip(found, shares, strict=True))
    return JointLoss(
        sum(share * (rank.value or 0.0) for rank, share in pairs if share),  # it may be NaN
        next((share for rank, share in pairs if rank is ranks[world.rank]), 0.0),
        None if None in of_items else sum(n or 0.0 for n in of_items),
        any(rank.has_graph for rank in found),
        found[0].dtype,
        rank_samples,
    )


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], world: World) -> None:
    """Makes the gradients of parameters those of all ranks; None where no rank has one.

    A first small all_reduce shows which gradients exist in any rank. These travel in buckets.
    """
    exist = torch.tensor([parameter.grad is not None for parameter in parameters]).int()
    counts, work = world.all_reduce(exist)
    work.wait()
    sums: list[Tensor] = []
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise ValueError(
                    "Expected dense gradients in several processes, got a sparse one of a "
                    f"parameter of the shape {tuple(parameter.shape)}. Use "
                    "nn.Embedding(sparse=False), or one process."
                )
            sums.append(parameter.grad.detach())
    sent = []
    for positions in group(sums):
        bucket = [sums[i] for i in positions]
        flat = torch.cat([part.reshape(-1) for part in bucket])
        sent.append((bucket, *world.all_reduce(flat)))
    for bucket, flat, work in sent:
        work.wait()
        for part, total in zip(bucket, flat.split([part.numel() for part in bucket]), strict=True):
            part.copy_(total.view(part.shape))
