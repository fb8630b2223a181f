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
from lightning_dp.parallel.processes import ProcessesApartError, World, sum_gradients


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


def summed(everyone: World) -> list[Any]:
    """Once in one bucket per dtype, and once in buckets of a few bytes."""
    results = []
    for size in (buckets.BUCKET_BYTES, 16):
        own = parameters()
        for parameter, grad in zip(own, gradients(everyone.rank), strict=True):
            parameter.grad = grad
        with mock.patch.object(buckets, "BUCKET_BYTES", size):
            sum_gradients(own, everyone)
        results.append([p.grad for p in own])
        assert own[1].grad is not None and own[1].grad.stride() == own[1].stride()
    return results


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


def exchanged(everyone: World) -> list[Any]:
    x = torch.arange(6.0, requires_grad=True).view(2, 3)[:, everyone.rank : everyone.rank + 1]
    values = {"x": x * 2, "flags": torch.tensor([True]), "half": torch.ones(2).bfloat16(), "n": 3}
    first = everyone.broadcast(values, 1)
    return [
        everyone.all_gather_objects(values),
        first,
        everyone.all_gather_objects(torch.zeros(0, 2)),
    ]


def everything() -> tuple[list[Any], list[Any]]:
    everyone = world()
    found = summed(everyone), exchanged(everyone)
    for value in (Refuses(), Refuses() if everyone.rank else 1):
        with pytest.raises(TypeError, match=r"Process [012]: expected .* stays here"):
            everyone.all_gather_objects(value)
    with pytest.raises(ProcessesApartError, match="0 is at A, process 1 is at B"):
        everyone.all_gather_objects(1, "B" if everyone.rank else "A")
    sparse = nn.Parameter(torch.ones(2))
    sparse.grad = torch.ones(2).to_sparse() if everyone.rank else None
    with pytest.raises(ValueError, match=r"Expected dense gradients .* shapes \[\(2,\)\]"):
        sum_gradients([sparse], everyone)
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_summed_and_values_arrive_as_they_are(count: int) -> None:
    for sums, (ranks, first, empty) in run_in_processes(everything, count):
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
            assert values["flags"].dtype is torch.bool and values["half"].dtype is torch.bfloat16
        assert torch.equal(first["x"].detach(), ranks[1]["x"]) and first["n"] == 3
        assert [t.shape for t in empty] == [(0, 2)] * count
