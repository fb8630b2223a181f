"""Gradients and buffers of all ranks: sums in buckets, and one rank's buffers or their mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dp.parallel.processes.world import World
from lightning_dp.parallel.torch_private import version

if TYPE_CHECKING:
    from lightning_dp.parallel.processes.graph import JointLoss

BUCKET_BYTES = 4 * 2**20


@torch.no_grad()
def sum_over_ranks(
    tensors: Sequence[Tensor | None], like: Sequence[Tensor], world: World
) -> list[Tensor | None]:
    """The sums of the ranks' tensors; None for one that no rank has.

    A first small all_reduce shows which tensors exist in any rank, and which are sparse there.
    These are gathered as objects; the others are added up in buckets that travel together. Sums are
    written in place where a tensor has the strides of `like`, as fused optimizers need them.
    """
    sums = list(tensors)
    dense = [t is not None and t.layout is torch.strided for t in sums]
    sparse = [t is not None and t.layout is not torch.strided for t in sums]
    flags = torch.tensor([dense, sparse], dtype=torch.int32)
    world.sum_async(flags)()
    is_dense, is_sparse = flags.bool().tolist()
    buckets = _buckets(like, [i for i, there in enumerate(is_dense) if there])
    sent = [_send(sums, like, bucket, [dense[i] for i in bucket], world) for bucket in buckets]
    for finish in sent:
        finish()
    for i in [i for i, there in enumerate(is_sparse) if there]:
        sums[i] = _sum_sparse(
            tensors[i] if sparse[i] else None, sums[i] if is_dense[i] else None, world
        )
    return sums


def _sum_sparse(own: Tensor | None, total: Tensor | None, world: World) -> Tensor | None:
    """The sum of the ranks' sparse tensors, and of the dense ones' `total` where there are any."""
    own = None if own is None else own.coalesce()
    parts = world.gather(None if own is None else (own.indices(), own.values(), tuple(own.shape)))
    for part in [part for part in parts if part is not None]:
        # The explicit argument keeps torch from warning about its default.
        term = torch.sparse_coo_tensor(*part, check_invariants=False)
        total = term if total is None else total + term.to(total.device)
    return total.coalesce() if total is not None and total.is_sparse else total


def _buckets(like: Sequence[Tensor], positions: Sequence[int]) -> Iterator[list[int]]:
    """Positions of tensors that travel together; all ranks make the same buckets."""
    open_buckets: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for i in positions:
        dtype, size = like[i].dtype, like[i].numel() * like[i].element_size()
        if dtype in open_buckets and sizes[dtype] + size > BUCKET_BYTES:
            yield open_buckets.pop(dtype)
        if dtype not in open_buckets:
            open_buckets[dtype], sizes[dtype] = [], 0
        open_buckets[dtype].append(i)
        sizes[dtype] += size
    yield from open_buckets.values()


def _send(
    sums: list[Tensor | None],
    like: Sequence[Tensor],
    bucket: Sequence[int],
    dense: Sequence[bool],
    world: World,
) -> Callable[[], None]:
    """Starts the all_reduce of a bucket; what it returns waits for it and unpacks the sums."""
    pairs = zip(bucket, dense, strict=True)
    parts = [sums[i] if there else torch.zeros_like(like[i]) for i, there in pairs]
    flat = torch.cat([part.detach().reshape(-1) for part in parts if part is not None])
    finish = world.sum_async(flat)

    def unpack() -> None:
        finish()
        for i, total in zip(bucket, flat.split([like[i].numel() for i in bucket]), strict=True):
            own = sums[i]
            if own is None or own.layout is not torch.strided or own.stride() != _strides(like[i]):
                sums[i] = own = torch.empty_like(like[i], requires_grad=False)
            own.copy_(total.view(like[i].shape))

    return unpack


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives a parameter's gradient."""
    return torch.empty_like(tensor, device="meta").stride()


class RankReducer:
    """Makes the root's gradients those of all ranks.

    A backward that accumulates leaves gradients that are this rank's own and sends nothing; the
    next one that does not accumulate adds up what all ranks have by then.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._own: dict[int, Tensor] = {}  # parameters whose gradients are this rank's own, by id
        self._pending: list[Tensor] = []  # to be summed at the end of the running backward

    def own_among(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those whose gradients are this rank's own."""
        return [p for p in parameters if id(p) in self._own]

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor], without: Collection[int], *, stay: bool) -> None:
        """A backward is about to add to these parameters' gradients, except at some positions.

        With `stay` they stay this rank's own. Gradients that are sums already are left to rank 0
        and zeroed elsewhere, so that they are added up once.
        """
        trained = [
            p
            for i, p in enumerate(parameters)
            if (p.requires_grad or id(p) in self._own) and i not in without
        ]
        for parameter in trained if self._world.rank > 0 else ():
            if parameter.grad is not None and id(parameter) not in self._own:
                parameter.grad.zero_()
        self._pending = [] if stay else trained
        if stay:
            self._own |= zip(map(id, trained), trained, strict=True)

    def finish(self) -> None:
        """The backward has ended."""
        pending, self._pending = self._pending, []
        self.sum_(pending)

    def sum_(self, parameters: Sequence[Tensor]) -> None:
        """Adds up the gradients of parameters, which are this rank's own."""
        if not parameters:
            return
        grads = sum_over_ranks([p.grad for p in parameters], parameters, self._world)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
            self._own.pop(id(parameter), None)

    def sum_waiting(self) -> None:
        """Adds up what has accumulated, if no backward has done it."""
        self.sum_(list(self._own.values()))

    def cancel(self) -> None:
        """Forgets a backward that did not end."""
        self._pending = []


class RankBuffers:
    """Gives all ranks the same buffers after a training step that has written to them.

    Args:
        read: returns the root's buffers, which steps may read.
        write: gives the root buffers of several ranks, by policy, given these and their samples.
        world: the processes.
        is_mean: whether they become the mean of all ranks, not those of the first with samples.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Tensor | None]],
        write: Callable[[list[list[Tensor | None]], list[int]], None],
        world: World,
        *,
        is_mean: bool,
    ) -> None:
        self._read, self._write, self._world, self._is_mean = read, write, world, is_mean
        self._before: list[Any] = []
        self._joint: JointLoss | None = None

    def before_step(self) -> None:
        """A training step begins."""
        self._before = self._versions()

    def has_written(self) -> bool:
        """Whether the step has written to a buffer."""
        return self._before != self._versions()

    def _versions(self) -> list[Any]:
        there = [b for b in self._read() if b is not None]
        return [None if b.is_inference() else (id(b), version(b)) for b in there]

    def exchanged(self, joint: JointLoss) -> None:
        """The ranks have exchanged their losses, and whether they have written to buffers."""
        self._joint = joint

    def after_step(self) -> None:
        """The step's backward has ended: no graph needs the buffers as they are."""
        joint, self._joint = self._joint, None
        if joint is None or not joint.writes:
            return
        own = self._read()
        if self._is_mean:
            pairs = zip(self._world.gather(own), joint.samples, strict=True)
            ranks = [(buffers, n) for buffers, n in pairs if n]
        else:
            is_first = self._world.rank == joint.first
            ranks = [(self._world.broadcast(own if is_first else [], joint.first), 1)]
        self._write([list(buffers) for buffers, _ in ranks], [n for _, n in ranks])
