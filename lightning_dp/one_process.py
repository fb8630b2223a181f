"""A strategy of several devices in one process, as Lightning sees it: one rank, world size 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from lightning_dp.parallel.workers import collectives

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy
else:
    # The packages `lightning` and `pytorch_lightning` have the same classes twice: which
    # ParallelStrategy comes next is for the class to say that mixes this one in.
    ParallelStrategy = object


class OneProcessMixin(ParallelStrategy):
    """Every rank is 0, also under a launcher that set the variables of several processes.

    Collectives act over the replicas where a replica calls them in its step; see `collectives` for
    what they give. Elsewhere there is only one process, and values pass through. To be mixed into
    the `ParallelStrategy` of either package.
    """

    global_rank = local_rank = node_rank = 0
    world_size = 1

    @property
    def num_nodes(self) -> int:
        """1: a process is on one machine. The Trainer sets what it was given."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                f"num_nodes: expected 1, as one process has all the devices, got {num_nodes}. "
                "Leave it out, or take strategy='ddp' for several machines."
            )

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return collectives.reduce(tensor, reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """The batch's tensor; gradients flow through it whatever `sync_grads`, as on one device."""
        return collectives.all_gather(tensor)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return collectives.broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        collectives.barrier(name)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return collectives.decide(decision, everybody=all)
