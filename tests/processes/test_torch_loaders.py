"""Private names of torch's DataLoader: each does what we take it for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from worlds import in_turn

from lightning_dp.processes.draws import Parts
from lightning_dp.processes.torch_loaders import LoaderOfParts, copied


def test_index_sampler_is_what_a_loader_loads_and_what_its_length_is() -> None:
    def job(world: Any) -> Any:
        loader = DataLoader(range(9), batch_size=2)
        parts = Parts([[1, 2], [3]], lambda n: (n - 1, 1), world)
        own = copied(loader, LoaderOfParts, parts=parts, taken=[])
        seen = [batch.tolist() for batch in own]
        assert own.batch_sampler is loader.batch_sampler and own.taken == [(1, 1), (0, 1)]
        return seen, len(own), len(loader)

    assert in_turn(job, 2) == [([[1], [3]], 2, 5), ([[2], [3]], 2, 5)]


def test_iterator_holds_workers_that_a_copy_does_not_take_over() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    list(loader)
    workers = vars(loader)["_iterator"]
    assert workers is not None
    own = copied(loader, DataLoader)
    assert vars(own)["_iterator"] is None and vars(loader)["_iterator"] is workers
    workers._shutdown_workers()
