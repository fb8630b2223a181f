"""Private names of torch, of activation checkpoints: each does what we take it for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.torch_private import watch_checkpoints
from lightning_dp.parallel.workers.generators import begin_checkpoint


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What a watch hears."""
    said: list[str] = []

    def watch() -> Any:
        said.append("begins")
        return lambda: said.append("ends")

    watch_checkpoints(watch)
    yield said
    watch_checkpoints(begin_checkpoint)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoint_without_reentrant_generator_and_function_are_heard(
    heard: list[str], is_reentrant: bool
) -> None:
    x = torch.ones(2, requires_grad=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        heard.append("computes")
        return x.exp()

    y = checkpoint(part, x, use_reentrant=is_reentrant)
    assert heard == ["begins", "computes", "ends"]
    heard.clear()
    y.sum().backward()
    assert heard == ["computes"] and x.grad is not None
    heard.clear()
    checkpoint(part, x, use_reentrant=is_reentrant, preserve_rng_state=False)
    assert heard == ["computes"]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_an_error_in_one_is_the_users_and_ends_it(heard: list[str], is_reentrant: bool) -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=is_reentrant)
    assert heard == ["begins", "ends"]


def test_where_nothing_is_computed_again_nothing_is_heard(heard: list[str]) -> None:
    with torch.no_grad():
        checkpoint(torch.exp, torch.ones(2), use_reentrant=False)
    assert not heard
