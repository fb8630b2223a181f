"""What is noted of a replica's call: what the module computes, and nothing of the engine's."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import ByHand, Classifier, loader, trainer

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.additive import traces

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Manual(ByHand, Classifier):
    pass


@pytest.mark.parametrize("make", [Manual, Classifier])
def test_calls_in_order_are_those_in_threads(
    make: type[Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order one replica hosts what all do together, as the optimizer's step by hand."""
    made: list[traces.Trace] = []

    class Kept(traces.Trace):
        def __init__(self, shard: Any) -> None:
            super().__init__(shard)
            made.append(self)

    monkeypatch.setattr(traces, "Trace", Kept)

    def names(executor: Any) -> list[tuple[str, ...]]:
        made.clear()
        job = trainer(3, DataParallelStrategy(executor=executor), limit_train_batches=2)
        job.fit(make(), loader(), loader())
        return sorted(tuple([call.name for call in trace.calls]) for trace in made)

    expected = names("threads")
    assert len(expected) >= 3 and all("linear" in calls for calls in expected)
    assert names("inorder") == expected
