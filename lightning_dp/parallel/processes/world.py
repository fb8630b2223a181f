"""The world: the processes that train together, as one of them sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.parallel.generated import context
from lightning_dp.parallel.processes.exchange import Exchange

T = TypeVar("T")

_SUMMED_AS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Neither gloo nor NCCL adds these up, or not as torch does; the low bits of these sums are theirs.

Of bools gloo makes bytes above 1.
"""

_ADDED_UP = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)


class World:
    """All processes call the same methods in the same order; each call waits for the others.

    Only one thread of a process at a time may call them: replicas meet first, and the host speaks
    for them all. Torch's default process group has to be there.

    Args:
        rank: which of the processes this is.
        size: how many there are.
        device_counts: how many devices each of them has.
        timeout: how long a call waits for the others; None for torch's default. Only for groups
            that are made here: that of torch has its own.

    Attributes:
        is_idle: whether this process has no samples of the batch that is worked on. It takes part
            with samples that others have as well, and what it does with them counts for nothing:
            losses, logs, metrics and rows of its replicas are left out.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device_counts: Sequence[int] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.device_counts = tuple(device_counts or [1] * size)
        self.is_idle = False
        self._served = _served_types()
        # What processes tell each other is on the host, whatever their devices are.
        on_host = self._served.get("cpu") == "gloo"
        self._host_group = None if on_host else dist.new_group(backend="gloo", timeout=timeout)
        self._exchange = Exchange(rank, size, _Group(self._host_group))

    def __deepcopy__(self, _: object) -> World:
        """What is copied stays among the same processes: a Trainer's loaders, say."""
        return self

    def gather(self, value: T, device: torch.device | None = None) -> list[T]:
        """Every process's value, in the order of the ranks, in one round trip mostly.

        Args:
            value: containers of numbers and tensors, and whatever can be pickled.
            device: where a value that is a tensor arrives; None for the host, where tensors within
                containers arrive.
        """
        values = self._exchange.gather(value)
        if device is not None:
            values = [v.to(device) if isinstance(v, Tensor) else v for v in values]
        return values

    def sum_(self, tensor: Tensor) -> None:
        """Adds up the processes' tensors, in place and as torch adds.

        Each may lie in memory in its own way. Sums of bools are True where one of them is.
        """
        dtype = tensor.dtype
        if dtype not in _ADDED_UP and dtype not in _SUMMED_AS:
            raise TypeError(
                f"Expected a tensor of a dtype that processes can add up, got {dtype}. Convert it "
                "to torch.float32 before."
            )
        own = tensor.detach()
        is_served = own.device.type in self._served
        # Strides are not looked at when bytes are added up.
        if is_served and dtype in _ADDED_UP and own.is_contiguous() and not own.is_conj():
            self._all_reduce(own)
            return
        device = own.device if is_served else torch.device("cpu")
        wide = _SUMMED_AS.get(dtype, dtype)
        source = own.view(torch.int64) if dtype == torch.uint64 else own
        total = torch.empty(own.shape, dtype=wide, device=device).copy_(source)
        self._all_reduce(total)
        own.copy_(total.view(dtype) if dtype == torch.uint64 else total)

    def start_sum(self, tensor: Tensor) -> Any:
        """Begins to add up the processes' tensors, in place; its `wait()` ends it."""
        group = self._host_group if tensor.device.type == "cpu" else None
        return dist.all_reduce(tensor, group=group, async_op=True)

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of one process in all of them; tensors arrive on the host."""
        result: T = self._exchange.broadcast(value, src)
        return result

    def ask(self) -> None:
        """Asks for something, of which all processes are to hear, see `take_asking`."""
        self._exchange.asks = True

    def forget_asking(self) -> None:
        """Nobody has asked. All processes have to forget it at the same place."""
        self._exchange.asks, self._exchange.asking = False, None
        self._exchange.state, self._exchange.differs = 0, False

    def take_asking(self, state: int = 0) -> tuple[list[int], bool]:
        """The ranks that have asked since the last call, and whether states differed since.

        All processes hear it with whatever they tell each other between two calls; if that was
        nothing, they do so now.

        Args:
            state: a number of 64 bits that is to be the same in all processes from now on.
        """
        exchange, self._exchange.state = self._exchange, state
        if exchange.asking is None:
            self.gather(None)
        told = exchange.asking or [], exchange.differs
        exchange.asking, exchange.differs = None, False
        return told

    def barrier(self) -> None:
        """Waits for all processes."""
        dist.barrier(group=self._host_group)

    @context
    def working(self, *, is_idle: bool) -> Iterator[None]:
        """While it lasts, the process has samples of the batch that is worked on, or none."""
        before, self.is_idle = self.is_idle, is_idle
        try:
            yield
        finally:
            self.is_idle = before

    def _all_reduce(self, tensor: Tensor) -> None:
        # Not run on a GPU yet: there the default group's NCCL adds up, on its own stream, and the
        # current one of the tensor's device waits for it.
        dist.all_reduce(tensor, group=self._host_group if tensor.device.type == "cpu" else None)


class _Group:
    """A process group, which moves bytes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all_gather(self, parts: list[Tensor], own: Tensor) -> None:
        # Without the checks and the log of `dist.all_gather`, which take as long as the codec.
        group = self._group or dist.group.WORLD
        assert group is not None  # there is one as long as there is a world
        group.allgather([parts], [own]).wait()

    def broadcast(self, own: Tensor, src: int) -> None:
        dist.broadcast(own, src, group=self._group)


def _served_types() -> dict[str, str]:
    """The backend of torch's process group for every type of device that it has one for."""
    config = dist.get_backend_config()
    pairs = [entry.split(":") for entry in config.split(",")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
