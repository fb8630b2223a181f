"""The world: the processes that train together, and how they exchange values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.parallel.comm import group

T = TypeVar("T")


class ProcessesApartError(RuntimeError):
    """The processes did not all come to the same collective."""


class World:
    """The processes. All of them call the same methods in the same order, from one thread each.

    Torch's default process group must exist.

    Args:
        rank: of this process.
        size: the number of processes.
        timeout: of collectives on the CPU; None for torch's default.

    Attributes:
        is_idle: whether this process has no samples of the current batch. It runs the step with
            samples of others, so that it takes part in all collectives, and its results are left
            out.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self.rank, self.size = rank, size
        self.is_idle = False
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self._has_nccl = backends.get("cuda") == "nccl"
        has_gloo = backends.get("cpu") == "gloo"
        # Objects are exchanged on the CPU, whatever the devices are.
        self._cpu_group = None if has_gloo else dist.new_group(backend="gloo", timeout=timeout)

    def __deepcopy__(self, _: object) -> World:
        """A copied loader stays among the same processes."""
        return self

    def all_gather_objects(self, value: T, place: str = "") -> list[T]:
        """Every rank's value, in the order of the ranks. Tensors arrive on the CPU, detached.

        Args:
            value: this rank's.
            place: what calls it, for the error that all ranks get if others are elsewhere.
        """
        received: list[Any] = [None] * self.size
        dist.all_gather_object(received, (place, _pickled(value)), group=self._cpu_group)
        places = [other for other, _ in received]
        if len(set(places)) > 1:
            got = ", ".join(f"process {rank} is at {other}" for rank, other in enumerate(places))
            raise ProcessesApartError(
                f"Expected all processes at the same collective, got: {got}. Make the same calls "
                "in the same order in every process: they must not depend on its rank or its "
                "samples."
            )
        return [_unpickled(data, rank) for rank, (_, data) in enumerate(received)]

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of one rank in all of them; that rank gets the same object again."""
        data: list[Any] = [_pickled(value) if self.rank == src else None]
        dist.broadcast_object_list(data, src, group=self._cpu_group)
        is_own = self.rank == src and isinstance(data[0], bytes)
        return value if is_own else _unpickled(data[0], src)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives named tensors the values that rank 0 has; all ranks must have the same ones."""
        ranks = self.all_gather_objects([f"{n} {[*t.shape]} {t.dtype}" for n, t in tensors.items()])
        for rank, names in enumerate(ranks):
            if names != ranks[0]:
                differing = sorted({*names} ^ {*ranks[0]}) or names
                raise ValueError(
                    "Expected the same parameters and buffers in every process, got others in "
                    f"process {rank} than in process 0: {differing[:3]}. Build the same module in "
                    "all processes."
                )
        for tensor in tensors.values():
            sent = tensor.detach().cpu().contiguous()
            dist.broadcast(sent, 0, group=self._cpu_group)
            if self.rank > 0:
                tensor.copy_(sent)

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of the ranks' tensors; None for one that no rank has.

        A first small all_reduce shows which tensors exist in any rank. These travel in buckets.

        Args:
            tensors: this rank's; sums are written to them where they have the strides of `like`.
            like: tensors of the same shapes and dtypes in all ranks. The sums get the strides that
                autograd gives their gradients, as fused optimizers need them.

        Raises:
            ValueError: in all ranks, if one of them has a sparse tensor.
        """
        flags = [[t is not None for t in tensors], [t is not None and t.is_sparse for t in tensors]]
        of_any = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(of_any, group=self._cpu_group)
        exist, are_sparse = of_any.bool().tolist()
        if any(are_sparse):
            shapes = [tuple(like[i].shape) for i, is_sparse in enumerate(are_sparse) if is_sparse]
            raise ValueError(
                "Expected dense gradients in several processes, got sparse ones of parameters of "
                f"the shapes {shapes[:3]}. Use nn.Embedding(sparse=False), or one process."
            )
        sums, sent = list(tensors), []
        some = [i for i, exists in enumerate(exist) if exists]
        # Detached: the same buckets in all ranks, whatever requires gradients.
        for positions in group([like[i].detach() for i in some]):
            bucket = [some[j] for j in positions]
            parts = [torch.zeros_like(like[i]) if sums[i] is None else sums[i] for i in bucket]
            flat = torch.cat([part.reshape(-1) for part in parts if part is not None])
            if flat.device.type != "cpu" and not self._has_nccl:
                flat = flat.cpu()
            ranks = self._cpu_group if flat.device.type == "cpu" else None
            sent.append((bucket, flat, dist.all_reduce(flat, group=ranks, async_op=True)))
        for bucket, flat, work in sent:
            cast(Any, work).wait()
            for i, total in zip(bucket, flat.split([like[i].numel() for i in bucket]), strict=True):
                target, new = sums[i], torch.empty_like(like[i], requires_grad=False)
                if target is None or target.stride() != new.stride():
                    sums[i] = target = new
                target.copy_(total.view(like[i].shape))
        return sums

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self._cpu_group)


def _pickled(value: Any) -> bytes | str:
    """The value's pickle; where it has none the reason, so that no rank waits for it."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(value)
    except Exception as error:  # a user's object may raise anything
        return f"{type(error).__name__}: {error}"
    return file.getvalue()


def _unpickled(data: bytes | str, rank: int) -> Any:
    if isinstance(data, str):
        raise TypeError(
            f"Process {rank}: expected a value that can be pickled, to be sent to the other "
            f"processes, got {data}. Use tensors and plain values."
        )
    with torch.inference_mode(False):
        return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Pickles tensors from any device, without graphs, and of a view no more than the view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        with torch.inference_mode(False):  # an inference tensor has no version to be saved
            copied = torch.empty_like(obj, device="cpu", requires_grad=False).copy_(obj.detach())
        return copied.__reduce_ex__(5)
