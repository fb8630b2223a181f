"""What ranks exchange: values, and sums of gradients in buckets."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from support.processes import run_in_processes
from torch import Tensor, nn

from lightning_dp.parallel.comm import buckets
from lightning_dp.parallel.processes import World, sum_gradients


def world() -> World:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def parameters() -> list[nn.Parameter]:
    shapes: list[Any] = [(3,), (2, 3, 2, 2), (4, 2), (2, 0), (), (7, 3), (5,), (6, 2)]
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in shapes]
    made[1] = made[1].to(memory_format=torch.channels_last)
    made[2], made[6] = made[2].to(torch.complex64), made[6].bfloat16()
    return [nn.Parameter(value) for value in made]


def gradients(rank: int) -> list[Tensor | None]:
    """None in some ranks, or in all; in other strides."""
    torch.manual_seed(rank + 1)
    grads: list[Tensor | None] = [torch.randn_like(p).detach() for p in parameters()]
    if rank > 0:
        grads[0], grads[1] = None, torch.randn(2, 3, 2, 2)
    grads[4] = None
    if rank == 1:
        grads[7] = None
    return grads


def exchanged() -> tuple[list[Any], Any, Any]:
    """Sums in one bucket per dtype and in buckets of a few bytes; values that arrive."""
    everyone, sums = world(), []
    for size in (buckets.BUCKET_BYTES, 16):
        own = parameters()
        for parameter, grad in zip(own, gradients(everyone.rank), strict=True):
            parameter.grad = grad
        with mock.patch.object(buckets, "BUCKET_BYTES", size):
            sum_gradients(own, everyone)
        sums.append([p.grad for p in own])
    x = torch.arange(6.0, requires_grad=True).view(2, 3)[:, everyone.rank : everyone.rank + 1]
    values = {"x": x * 2, "half": torch.ones(2).bfloat16(), "n": 3, "empty": torch.zeros(0, 2)}
    found = sums, everyone.all_gather_objects(values), everyone.broadcast(values, 1)
    with pytest.raises(RuntimeError, match="0 is at A, process 1 is at B"):
        everyone.all_gather_objects(1, "B" if everyone.rank else "A")
    sparse = nn.Parameter(torch.ones(2))
    sparse.grad = torch.ones(2).to_sparse()
    with pytest.raises(ValueError, match=r"Expected dense gradients .* shape \(2,\)"):
        sum_gradients([sparse], everyone)
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_summed_and_values_arrive_as_they_are(count: int) -> None:
    for sums, ranks, second in run_in_processes(exchanged, count):
        for got in sums:
            for i, grad in enumerate(got):
                terms = [g for r in range(count) if (g := gradients(r)[i]) is not None]
                if terms:
                    torch.testing.assert_close(grad, sum(terms[1:], terms[0]))
                else:
                    assert grad is None, i
        for rank, values in enumerate(ranks):
            expected = 2 * torch.arange(6.0).view(2, 3)[:, rank : rank + 1]
            assert torch.equal(values["x"], expected) and not values["x"].requires_grad
            assert values["half"].dtype is torch.bfloat16 and values["empty"].shape == (0, 2)
        assert torch.equal(second["x"].detach(), ranks[1]["x"]) and second["n"] == 3
