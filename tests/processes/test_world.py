"""What ranks exchange: values, and sums of gradients in buckets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.processes import run_in_processes
from torch import Tensor, nn

from lightning_dp.parallel.processes import ProcessesApartError, RankReducer, World, check_together
from lightning_dp.parallel.processes import gradients as room


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
    """None everywhere, or in some ranks; sparse; in other strides."""
    torch.manual_seed(rank + 1)
    grads: list[Tensor | None] = [torch.randn_like(p).detach() for p in parameters()]
    if rank > 0:
        grads[0] = None
        grads[1] = torch.randn(2, 3, 2, 2)
    grads[4] = None
    index = torch.tensor([[rank, 3, 3]])
    grads[5] = torch.sparse_coo_tensor(index, torch.ones(3, 3), (7, 3), check_invariants=False)
    if rank == 1:
        grads[7] = None
    return grads


def summed() -> list[Any]:
    """Once in one bucket per dtype, and once in buckets of a few bytes."""
    everyone, results = world(), []
    for size in (room.BUCKET_BYTES, 16):
        room.BUCKET_BYTES = size
        own = parameters()
        reducer = RankReducer(everyone)
        for _ in range(2):  # two that accumulate; the second one sums both
            reducer.begin(own, (), stay=_ == 0)
            for parameter, grad in zip(own, gradients(everyone.rank), strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            reducer.finish()
        results.append([p.grad for p in own])
        assert own[1].grad is not None and own[1].grad.stride() == own[1].stride()
    reducer = RankReducer(everyone)  # what is a sum already is not added up again
    p = nn.Parameter(torch.ones(2))
    for _ in range(2):
        reducer.begin([p], (), stay=False)
        p.grad = torch.ones(2) if p.grad is None else p.grad + 1
        reducer.finish()
    results.append([p.grad])
    return results


def everything() -> tuple[list[Any], list[Any]]:
    return summed(), exchanged()


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_summed_and_values_arrive_as_they_are(count: int) -> None:
    told = run_in_processes(everything, count)
    assert_exchanged([values for _, values in told], count)
    for whole, pieces, twice in [sums for sums, _ in told]:
        for got in (whole, pieces):
            for i, grad in enumerate(got):
                terms = [g for r in range(count) if (g := gradients(r)[i]) is not None]
                if not terms:
                    assert grad is None, i
                    continue
                dense = [2 * term.to_dense() for term in terms]
                torch.testing.assert_close(grad.to_dense(), sum(dense[1:], dense[0]))
                assert grad.layout is terms[0].layout
        torch.testing.assert_close(twice[0], torch.full((2,), 2.0 * count))


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


def exchanged() -> list[Any]:
    everyone = world()
    x = torch.arange(6.0, requires_grad=True).view(2, 3)[:, everyone.rank : everyone.rank + 1]
    values = {"x": x * 2, "flags": torch.tensor([True]), "half": torch.ones(2).bfloat16(), "n": 3}
    first = everyone.broadcast(values, 1)
    got = [everyone.gather(values), first, everyone.gather(torch.zeros(0, 2))]
    for value in (Refuses(), Refuses() if everyone.rank else 1):
        with pytest.raises(TypeError, match=r"Process [012]: expected .* stays here"):
            everyone.gather(value)
    return got


def assert_exchanged(told: list[Any], count: int) -> None:
    for ranks, first, empty in told:
        for rank, values in enumerate(ranks):
            expected = 2 * torch.arange(6.0).view(2, 3)[:, rank : rank + 1]
            assert torch.equal(values["x"], expected) and not values["x"].requires_grad
            assert values["flags"].dtype is torch.bool and values["half"].dtype is torch.bfloat16
        assert torch.equal(first["x"].detach(), ranks[1]["x"]) and first["n"] == 3
        assert [t.shape for t in empty] == [(0, 2)] * count


class At:
    def __init__(self, what: str) -> None:
        self.what = what


def test_ranks_at_different_places_are_named() -> None:
    check_together([At("all_gather"), At("all_gather")])
    with pytest.raises(ProcessesApartError, match="0 is at all_gather, process 1 has ended"):
        check_together([At("all_gather"), 3])
