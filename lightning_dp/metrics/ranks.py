"""Several processes: what the replicas of all ranks have recorded is replayed on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from lightning_dp.lightning_private import results_of
from lightning_dp.metrics.recorder import Records
from lightning_dp.parallel.contexts import replaced

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


def of_all_ranks(own: Records, world: World) -> Records:
    """What the replicas of all ranks recorded, in the order of the batch.

    Every rank takes part in every step: no other rank knows whether it has recorded anything.
    """
    sent = None if world.is_idle else own
    received = world.all_gather_objects(sent, "the end of its step")
    received[world.rank] = sent  # whose values may have a graph
    parts = [part for part in received if part is not None]
    return Records(
        [calls for part in parts for calls in part.calls],
        [size for part in parts for size in part.sizes],
        [name for part in parts for name in part.replicas],
    )


@contextmanager
def logging_for_all(module: LightningModule, samples: int) -> Iterator[None]:
    """In this context `self.log` gets values of all processes, with `samples` as batch size.

    `sync_dist=True, rank_zero_only=True` keeps Lightning from syncing them again, and from warning
    about a missing sync. The batch size is passed, since Lightning knows this process's part only.
    """
    results = results_of(module.trainer)
    if results is None:
        yield
        return
    own = results.log

    def log(*args: Any, batch_size: int | None = None, **options: Any) -> None:
        of_all = {**options, "sync_dist": True, "rank_zero_only": True}
        own(*args, batch_size=samples if batch_size is None else batch_size, **of_all)

    with replaced(results, log=log):
        yield
