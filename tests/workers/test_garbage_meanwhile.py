"""Python collects no garbage while replicas run in threads: torch may not survive it there.

Of two threads one may wait for the lock of a random generator, and keep the other one, which has
the lock, from ending a collection that its new object of Python has begun.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")


class Littering(nn.Linear):
    """Leaves circles behind, of which Python would collect some, and asks for random states."""

    fails = False

    def __init__(self) -> None:
        super().__init__(4, 4)

    def training_step(self, x: Tensor) -> Tensor:
        for _ in range(2000):
            circle: list[Any] = [torch.zeros(1)]
            circle.append(circle)
        if self.fails:
            raise ValueError("on purpose")
        y = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        loss: Tensor = y.square().mean()
        return loss


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection that begins."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def engine_of(executor: Any) -> StepParallel:
    return StepParallel(
        Littering(), [CPU] * 3, output_device=CPU, split=lambda n: (n - 2, 1, 1), executor=executor
    )


def test_nothing_is_collected_while_threads_run(collections: list[int]) -> None:
    engine = engine_of("threads")
    gc.collect()
    for _ in range(3):
        before = len(collections)
        loss = engine.train("training_step", torch.randn(6, 4))
        within = collections[before:]
        loss.backward()
        assert len(within) <= 1, "one at the end, for all that the replicas have left"
        assert gc.isenabled()
    engine.close()


def test_in_order_it_is_collected_as_always(collections: list[int]) -> None:
    engine = engine_of("inorder")
    engine.train("training_step", torch.randn(6, 4)).backward()
    assert len(collections) > 3
    engine.close()


@pytest.mark.parametrize("is_on", [True, False])
def test_afterwards_it_is_as_before_also_after_an_error(is_on: bool) -> None:
    engine = engine_of("threads")
    engine.module.fails = True  # type: ignore[assignment]  # a flag, no tensor
    if not is_on:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            engine.train("training_step", torch.randn(6, 4))
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    engine.close()
