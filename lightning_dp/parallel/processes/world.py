"""The world: the processes that train together, and how they exchange values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_dp.parallel.processes.graph import RankGraph

T = TypeVar("T")


class World:
    """The processes. All of them call the same methods in the same order, from one thread each.

    Torch's default process group must exist.

    Args:
        rank: of this process.
        size: the number of processes.
        timeout: of collectives on the host; None for torch's default.

    Attributes:
        is_idle: whether this process has no samples of the current batch. It runs the step with
            samples of others, so that it takes part in all collectives, and its results are left
            out.
        graph: of the step that this process runs itself, outside of replicas; None if it runs none.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self.rank, self.size = rank, size
        self.is_idle = False
        self.graph: RankGraph | None = None
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self._has_nccl = backends.get("cuda") == "nccl"
        has_gloo = backends.get("cpu") == "gloo"
        # Objects are exchanged on the host, whatever the devices are.
        self._host_group = None if has_gloo else dist.new_group(backend="gloo", timeout=timeout)

    def __deepcopy__(self, _: object) -> World:
        """A copied loader stays among the same processes."""
        return self

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks. Tensors arrive on the host, detached."""
        received: list[Any] = [None] * self.size
        dist.all_gather_object(received, _pickled(value), group=self._host_group)
        return [_unpickled(data, rank) for rank, data in enumerate(received)]

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of one rank in all of them; that rank gets the same object again."""
        data: list[Any] = [_pickled(value) if self.rank == src else None]
        dist.broadcast_object_list(data, src, group=self._host_group)
        is_own = self.rank == src and isinstance(data[0], bytes)
        return value if is_own else _unpickled(data[0], src)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives named tensors the values that rank 0 has; all ranks must have the same ones."""
        ranks = self.gather([f"{n} {[*t.shape]} {t.dtype}" for n, t in tensors.items()])
        for rank, own in enumerate(ranks):
            if own != ranks[0]:
                differing = sorted({*own} ^ {*ranks[0]}) or own
                raise ValueError(
                    "Expected the same parameters and buffers in every process, got others in "
                    f"process {rank} than in process 0: {differing[:3]}. Build the same module in "
                    "all processes."
                )
        for tensor in tensors.values():
            sent = tensor.detach().cpu().contiguous()
            dist.broadcast(sent, 0, group=self._host_group)
            if self.rank > 0:
                tensor.copy_(sent)

    def sum_async(self, tensor: Tensor) -> Callable[[], None]:
        """Starts to add up the ranks' tensors in place; what it returns waits for the end."""
        is_served = tensor.device.type == "cpu" or (tensor.is_cuda and self._has_nccl)
        total = tensor if is_served else tensor.cpu()
        group = self._host_group if total.device.type == "cpu" else None
        work: Any = dist.all_reduce(total, group=group, async_op=True)

        def finish() -> None:
            work.wait()
            if total is not tensor:
                tensor.copy_(total)

        return finish

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self._host_group)


class ProcessesApartError(RuntimeError):
    """The processes did not all come to the same collective."""


def check_together(values: Sequence[Any]) -> None:
    """Raises an error unless all ranks have gathered these values at the same place.

    Of values from different places the attribute `what` differs, or only one has it.
    """
    places = [getattr(value, "what", None) for value in values]
    if len(set(places)) > 1:
        texts = [f"is at {what}" if what else "has ended its step" for what in places]
        got = ", ".join(f"process {rank} {text}" for rank, text in enumerate(texts))
        raise ProcessesApartError(
            f"Expected all processes at the same collective, got: {got}. Make the same calls in "
            "the same order in every process: they must not depend on its rank or its samples."
        )


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
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Pickles tensors by their bytes: torch's own way is slow, and keeps the base of a view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout is not torch.strided:
            return obj.detach().cpu().__reduce_ex__(4)
        own = torch.empty(obj.numel(), dtype=obj.dtype, device="cpu")
        own.copy_(obj.detach().reshape(-1))
        return _tensor, (own.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
